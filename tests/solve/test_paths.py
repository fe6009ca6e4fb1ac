"""Single paths: against composed flows, against forward mode, by Diffrax alone, and from singular starts."""

import functools

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
import references
from conftest import LAYERS, random_covariance
from references import assert_agrees, extrapolated

import sdeinfer as si
from sdeinfer.covariance import semidefinite_cholesky
from sdeinfer.solve import BrownianArray, BrownianSteps, CovarianceTerm, PSDSplitting, solve_paths, step_grid
from sdeinfer.solve._splitting import flows_of

DTYPES = pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64], ids=["float32", "float64"])
TIMES, STEP, PATHS = [0.02, 0.13], 0.06, 5
"""Of most tests: one program for each layer and type."""
GRID = step_grid(TIMES, STEP)
LENGTHS = np.diff(GRID.steps)


def normals_for(layer, tokens: int, paths: int = PATHS, grid=GRID):
    return jr.normal(jr.key(tokens), (paths, len(grid.steps) - 1, *layer.limit().normals(tokens)))


@functools.partial(jax.jit, static_argnames="odd")
def one_step(limit, X, h, G, *, odd: bool):
    flows = flows_of(limit, h, jnp.sqrt(h) * G, tangents=False)
    for flow in reversed(flows) if odd else flows:
        X = flow(X)
    return X


def composed_path(limit, V0, lengths, normals) -> np.ndarray:
    """V at the start of one path and after each step: the flows one after the other, by turns in both orders."""
    X = np.linalg.cholesky(V0)
    path = [X @ X.T]
    for number, (h, G) in enumerate(zip(lengths, normals, strict=True)):
        X = np.asarray(one_step(limit, X, h, G, odd=number % 2 == 1))
        path.append(X @ X.T)
    return np.stack(path)


def test_the_steps_of_these_tests_are_unequal():
    np.testing.assert_allclose(LENGTHS, [0.02, 0.055, 0.055])


@pytest.mark.parametrize("tokens", [1, 3, 18])
def test_paths_are_compositions_of_flows(tokens):
    layer, V0 = LAYERS["transformer"](), random_covariance(tokens)
    normals = normals_for(layer, tokens)
    found = si.simulate_from(layer, V0, TIMES, normals, step=STEP)
    expected = [composed_path(layer.limit(), V0, LENGTHS, path)[[1, 3]] for path in np.asarray(normals)]
    assert_agrees(found, np.stack(expected))


@pytest.mark.parametrize("name", LAYERS)
def test_the_twins_coefficients_are_those_of_its_drift_and_diffusion(name):
    layer, V = LAYERS[name](), np.asarray(random_covariance(3))
    theta1, theta2, a, kappa2 = references.coefficients(layer)
    drift = theta1 * references.attention_drift(V) + theta2 * references.relu_drift(V, 1.0, 0.0)
    assert_agrees(drift, references.drift(layer, V))
    diffusion = a * references.linear_tensor(V) + kappa2 * references.attention_tensor(V)
    assert_agrees(diffusion, references.diffusion_tensor(layer, V))


def test_many_v0_and_many_coefficients_are_solved_side_by_side():
    layers = [LAYERS[name]() for name in LAYERS]
    V0 = [random_covariance(3, seed) for seed in range(len(layers))]
    normals = normals_for(LAYERS["transformer"](), 3)
    names = ("attention_drift", "relu_drift", "linear_noise", "attention_noise")
    limit = si.layers.Limit(*(np.stack([getattr(layer.limit(), name) for layer in layers]) for name in names))

    @jax.jit
    def solve(limit, V0, normals):
        brownian = BrownianArray(jnp.asarray(GRID.steps), normals)
        return solve_paths(limit, semidefinite_cholesky(V0), GRID, brownian)

    V, stopped = solve(limit, np.stack(V0, axis=-1), np.moveaxis(normals, 0, -1))
    assert np.isinf(stopped).all()
    for number, each in enumerate(layers):
        one = si.layers.Limit(*(getattr(each.limit(), name) for name in names))
        expected = composed_path(one, V0[number], LENGTHS, np.asarray(normals[number]))
        assert_agrees(np.asarray(V)[..., number], expected[[1, 3]])


def test_paths_under_vmap_are_those_of_a_loop():
    layer, V0 = LAYERS["transformer"](), jnp.stack([random_covariance(3), jnp.ones((3, 3))])
    normals = normals_for(layer, 3)
    together = jax.jit(jax.vmap(lambda V0: si.simulate_from(layer, V0, TIMES, normals, step=STEP)))(V0)
    for number in range(2):
        assert_agrees(together[number], si.simulate_from(layer, V0[number], TIMES, normals, step=STEP))


IN_A_BLOCK = 2
"""Three blocks, and one path too many in the last."""


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr("sdeinfer.solve._blocks.ENTRIES", 9 * IN_A_BLOCK)


def normals_of_blocks(key):
    """What `simulate` draws, by hand: a key for each block, one draw for each step."""
    shape = jax.ShapeDtypeStruct((3, 3, IN_A_BLOCK), jnp.float64)
    steps = list(zip(GRID.steps[:-1], GRID.steps[1:], strict=True))

    @jax.jit
    def block(number):
        brownian = BrownianSteps(shape, key, number)
        return jnp.stack([brownian.evaluate(jnp.array(a), jnp.array(b)) / np.sqrt(b - a) for a, b in steps])

    blocks = [np.asarray(block(np.uint32(number))) for number in range(3)]
    return np.moveaxis(np.concatenate(blocks, axis=-1), -1, 0)[:PATHS]


@pytest.mark.usefixtures("small_blocks")
def test_blocks_hold_the_paths_of_their_own_normals(key):
    layer, V0 = LAYERS["mlp"](), random_covariance(3)
    V = si.simulate(layer, V0, TIMES, paths=PATHS, step=STEP, key=key)
    assert V.shape == (PATHS, 2, 3, 3)
    assert jnp.isfinite(V).all()
    assert len(np.unique(np.asarray(V)[:, 0, 0, 0])) == PATHS
    assert_agrees(V, si.simulate_from(layer, V0, TIMES, normals_of_blocks(key), step=STEP))


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.slow
def test_gradient_across_blocks_is_that_of_forward_mode(key):
    weights = jr.normal(key, (2 * PATHS, 1, 2, 2))

    def size(values, V0, adjoint):
        layer = si.ShapedTransformer(*values)
        return jnp.sum(weights * si.simulate(layer, V0, [0.1], paths=2 * PATHS, step=0.05, adjoint=adjoint, key=key))

    @jax.jit
    def backwards(*at):
        return jax.grad(lambda *at: size(*at, diffrax.RecursiveCheckpointAdjoint()), (0, 1))(*at)

    @jax.jit
    def forwards(at, direction):
        return jax.jvp(lambda *at: size(*at, diffrax.ForwardMode()), at, direction)[1]

    at = jnp.array([0.5, 0.6, 0.3, -1.5]), random_covariance(2)
    by_values, by_V0 = backwards(*at)
    for slope, unit in zip(by_values, jnp.eye(4), strict=True):
        np.testing.assert_allclose(forwards(at, (unit, jnp.zeros((2, 2)))), slope, rtol=1e-10)
    direction = random_covariance(2, seed=5)
    np.testing.assert_allclose(forwards(at, (jnp.zeros(4), direction)), jnp.vdot(by_V0, direction), rtol=1e-10)


def test_given_increments_are_the_normals_times_the_root_of_the_step():
    normals = normals_for(LAYERS["mlp"](), 2, paths=1)[0]
    brownian = BrownianArray(jnp.asarray(GRID.steps), normals)
    increment = jax.jit(lambda t0, t1: brownian.evaluate(t0, t1))
    assert (brownian.t0, brownian.t1) == (GRID.steps[0], GRID.steps[-1])
    for number, (start, end) in enumerate(zip(GRID.steps[:-1], GRID.steps[1:], strict=True)):
        found = increment(start, end)
        np.testing.assert_allclose(found, normals[number] * np.sqrt(end - start), rtol=1e-15)
    with pytest.raises(ValueError, match="a Brownian motion on steps has increments only"):
        brownian.evaluate(jnp.array(0.0))
    with pytest.raises(ValueError, match="no Lévy areas"):
        brownian.evaluate(jnp.array(0.0), jnp.array(0.02), use_levy=True)


def test_paths_can_be_differentiated_in_their_normals():
    layer, V0 = LAYERS["transformer"](), random_covariance(2)
    normals = normals_for(layer, 2, paths=2)
    direction = jr.normal(jr.key(1), normals.shape)

    @jax.jit
    @jax.value_and_grad
    def size(normals):
        return jnp.sum(si.simulate_from(layer, V0, TIMES, normals, step=STEP) ** 2)

    def central(h):
        return (size(normals + h * direction)[0] - size(normals - h * direction)[0]) / (2 * h)

    gradient = size(normals)[1]
    assert (jnp.abs(gradient) > 0).all()
    # The h² error of central differences is extrapolated away.
    difference = extrapolated(central(2e-4), central(1e-4))
    np.testing.assert_allclose(jnp.vdot(gradient, direction), difference, rtol=1e-8)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_normals_take_the_type_of_v0(dtype):
    V0, normals = random_covariance(3).astype(dtype), normals_for(LAYERS["mlp"](), 3)
    V = si.simulate_from(LAYERS["mlp"](), V0, TIMES, normals, step=STEP)
    assert V.dtype == dtype
    exact = si.simulate_from(LAYERS["mlp"](), random_covariance(3), TIMES, normals, step=STEP)
    # The condition number of V amplifies the rounding of each of three steps.
    assert_agrees(V, exact, rtol=3 * 8 * 3 * float(jnp.finfo(dtype).eps) * float(jnp.linalg.cond(V0)))


@pytest.mark.parametrize("shape", [(3, 3, 2, 2), (2, 3, 3), (5, 2, 3, 3), (5, 4, 3, 3)])
@pytest.mark.usefixtures("unchecked")
def test_normals_of_another_shape_are_refused(shape):
    with pytest.raises(si.InputError, match=r"normals: shape \(paths, 3, 3, 3\) is needed, got \(\d, "):
        si.simulate_from(LAYERS["mlp"](), random_covariance(3), TIMES, jnp.zeros(shape), step=STEP)


def by_diffrax(layer, V0, brownian):
    """Four steps of 0.05 as a user of Diffrax would take them."""
    return _by_diffrax(layer.limit(), np.linalg.cholesky(V0), brownian)


@eqx.filter_jit
def _by_diffrax(limit, X0, brownian):
    solution = diffrax.diffeqsolve(
        CovarianceTerm(limit, brownian),
        PSDSplitting(),
        t0=0.0,
        t1=0.2,
        dt0=0.05,
        y0=X0,
        saveat=diffrax.SaveAt(steps=True),
        stepsize_controller=diffrax.ConstantStepSize(),
        max_steps=4,
    )
    assert solution.ys is not None
    return solution.ys @ jnp.swapaxes(solution.ys, 1, 2)


@pytest.mark.parametrize("name", LAYERS)
def test_diffrax_alone_solves_one_path(name):
    layer, V0, grid = LAYERS[name](), random_covariance(3), jnp.linspace(0, 0.2, 5)
    normals = jr.normal(jr.key(0), (4, *layer.limit().normals(3)))
    found = by_diffrax(layer, V0, BrownianArray(grid, normals))
    assert_agrees(found, composed_path(layer.limit(), V0, [0.05] * 4, np.asarray(normals))[1:])
    if name == "transformer":
        assert_agrees(found, si.simulate_from(layer, V0, grid[1:], normals[None], step=0.05)[0])


def test_diffrax_alone_takes_its_own_brownian_motion(key):
    layer, V0, times = LAYERS["transformer"](), random_covariance(3), np.linspace(0, 0.2, 5)
    brownian = diffrax.VirtualBrownianTree(0.0, 0.2, tol=0.01, shape=layer.limit().normals(3), key=key)
    increments = [np.asarray(brownian.evaluate(a, b)) for a, b in zip(times[:-1], times[1:], strict=True)]
    expected = composed_path(layer.limit(), V0, [0.05] * 4, np.stack(increments) / np.sqrt(0.05))
    assert_agrees(by_diffrax(layer, V0, brownian), expected[1:])


def test_the_solver_has_no_vector_field_and_the_term_no_product():
    normals = normals_for(LAYERS["mlp"](), 2, paths=1)[0]
    terms = CovarianceTerm(LAYERS["mlp"]().limit(), BrownianArray(jnp.asarray(GRID.steps), normals))
    with pytest.raises(NotImplementedError, match="no vector field along which to step"):
        PSDSplitting().func(terms, 0.0, jnp.eye(2), None)
    with pytest.raises(NotImplementedError, match="stepped by PSDSplitting only"):
        terms.prod(terms.limit, terms.contr(jnp.array(0.0), jnp.array(0.02)))


def singular_starts() -> dict[str, np.ndarray]:
    """Covariances of four tokens that are singular."""
    X = np.random.default_rng(1).normal(size=(4, 6)) / np.sqrt(6)
    one = np.array([0.5, 1.0, 1.5, 0.8])[:, None] * X[:1]
    pair = X[[0, 0, 1, 2]]
    tokens = {
        "multiples of one": one,
        "equal": X[[0, 0, 0, 0]],
        "two of them equal": pair,
        "two of them opposite": pair * np.array([1, -1, 1, 1])[:, None],
        "all of them opposite": X[[0, 0, 0, 0]] * np.array([1, -1, 1, -1])[:, None],
        "a zero": X * np.array([0, 1, 1, 1])[:, None],
        "a zero among equals": X[[0, 1, 1, 1]] * np.array([0, 1, 1, 1])[:, None],
        "nothing": 0 * X,
    }
    return {name: x @ x.T for name, x in tokens.items()}


HANDFUL = step_grid([0.05, 0.1, 0.3, 0.5], 0.05)


@jax.jit
def solve_from(limit, V0, normals):
    brownian = BrownianArray(jnp.asarray(HANDFUL.steps, V0.dtype), normals.astype(V0.dtype))
    return solve_paths(limit, semidefinite_cholesky(V0), HANDFUL, brownian)


@DTYPES
@pytest.mark.parametrize("name", LAYERS)
def test_singular_starts_stay_covariances_of_the_rank_that_the_theory_says(name, dtype):
    starts = singular_starts()
    V0 = np.stack(list(starts.values()), axis=-1).astype(dtype)
    normals = np.moveaxis(normals_for(LAYERS[name](), 4, paths=len(starts), grid=HANDFUL), 0, -1)
    V, stopped = solve_from(LAYERS[name]().limit(), V0, normals)
    assert V.dtype == dtype
    assert jnp.isinf(stopped).all()
    rounding = 4 * float(jnp.finfo(dtype).eps)
    of = dict(zip(starts, np.moveaxis(np.asarray(V, np.float64), -1, 0), strict=True))
    for path in of.values():
        assert np.isfinite(path).all()
        np.testing.assert_array_equal(path, np.swapaxes(path, 1, 2))
        assert (np.linalg.eigvalsh(path)[:, 0] >= -rounding * np.trace(path, axis1=1, axis2=2)).all()
    # Every term gives equal tokens equal increments, and a zero token none.
    for start, equal in (
        ("equal", [0, 1, 2, 3]),
        ("two of them equal", [0, 1]),
        ("a zero among equals", [1, 2, 3]),
    ):
        rows = of[start][:, equal]
        assert (np.abs(rows - rows[:, :1]) <= 8 * rounding * np.sqrt(diagonals(of[start]).max())).all()
    for start in ("a zero", "a zero among equals"):
        np.testing.assert_array_equal(of[start][:, 0], 0)
    # Every term of the SDE is a multiple of an entry of V.
    np.testing.assert_array_equal(of["nothing"], 0)
    # ν(1) = 0, and all other terms multiply X: tokens on one ray stay there, and without a ReLU no rank grows at all.
    linear = float(LAYERS[name]().limit().relu_drift) == 0
    ranks = {"multiples of one": 1, "equal": 1, "two of them equal": 3, "a zero": 3, "a zero among equals": 1}
    ranks |= {"two of them opposite": 3, "all of them opposite": 1} if linear else {}
    for start, rank in ranks.items():
        eigenvalues = np.linalg.eigvalsh(of[start])[:, ::-1]
        assert (eigenvalues[:, rank:] <= 2 * rounding * eigenvalues[:, :1]).all(), start


def diagonals(V) -> np.ndarray:
    return np.diagonal(V, axis1=-2, axis2=-1)


@DTYPES
@pytest.mark.parametrize("exponent", [-40, -10, 10, 40])
def test_relu_networks_have_no_scale(exponent, dtype):
    """Without attention the SDE is linear in V's scale; that of a power of four is exact in floating point."""
    V0, normals = random_covariance(3).astype(dtype), normals_for(LAYERS["mlp"](), 3)
    one = si.simulate_from(LAYERS["mlp"](), V0, TIMES, normals, step=STEP)
    scaled = si.simulate_from(LAYERS["mlp"](), V0 * 4.0**exponent, TIMES, normals, step=STEP)
    np.testing.assert_array_equal(scaled, one * 4.0**exponent)


@pytest.mark.parametrize("compile_it", [jax.jit, eqx.filter_jit], ids=["jit", "filter_jit"])
def test_a_traced_v0_that_is_no_covariance_raises(compile_it, key):
    @compile_it
    def run(V0):
        return si.simulate(LAYERS["mlp"](), V0, [0.1], paths=2, step=0.1, key=key)

    assert jnp.isfinite(run(jnp.ones((2, 2)))).all()
    for V0 in ([[1.0, 2.0], [2.0, 1.0]], [[1.0, 0.0], [0.0, -1e-3]], [[1.0, 0.0], [0.0, np.nan]]):
        with pytest.raises(Exception, match="V0: not .*positive semi-definite"):  # noqa: B017, PT011 JAX wraps it
            run(jnp.array(V0)).block_until_ready()
