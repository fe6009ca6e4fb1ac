import diffrax
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from conftest import LAYERS, random_covariance
from references import assert_agrees, extrapolated

import sdeinfer as si
from sdeinfer.solve import step_grid
from sdeinfer.solve._splitting import splitting_step

TIMES = [0.0, 0.013, 0.1]
GOOD = {"ts": TIMES, "paths": 2, "step": 0.02}


@pytest.fixture
def V0():
    return random_covariance(3)


@pytest.mark.parametrize("name", LAYERS)
def test_paths_start_at_v0_and_are_saved_at_the_times_asked_for(name, V0, key):
    V = si.simulate(LAYERS[name](), V0, TIMES, paths=5, step=0.02, key=key)
    assert V.shape == (5, 3, 3, 3)
    assert V.dtype == jnp.float64
    assert_agrees(V[:, 0], jnp.broadcast_to(V0, (5, 3, 3)), rtol=1e-14)
    assert len(np.unique(np.asarray(V)[:, 1, 0, 0])) == 5


def test_single_precision_stays_single_and_differs_by_rounding_only_where_it_starts(V0, key):
    V = si.simulate(LAYERS["transformer"](), V0.astype(jnp.float32), TIMES, paths=5, step=0.02, key=key)
    assert V.dtype == jnp.float32
    assert_agrees(V[:, 0], jnp.broadcast_to(V0, (5, 3, 3)), rtol=20 * float(jnp.finfo(jnp.float32).eps))
    assert jnp.isfinite(V).all()


HARD = {
    "feedforward": (si.ResidualFeedForward(0.8, 0.0, -2.0), 0.5, 1.0),
    "transformer": (si.ShapedTransformer(0.5, 2.0, 0.0, -2.0), 0.2, 0.3),
}
"""Layers with an initial correlation and norm: strong alignment, and attention too weak for its drift to explode."""


@pytest.mark.parametrize(
    ("name", "tokens", "dtype"),
    [
        ("feedforward", 3, jnp.float32),
        ("transformer", 3, jnp.float32),
        ("transformer", 3, jnp.float64),
        pytest.param("feedforward", 8, jnp.float32, marks=pytest.mark.long),
    ],
)
def test_paths_stay_covariances_at_steps_that_euler_would_not_survive(name, tokens, dtype, key):
    layer, correlation, norm = HARD[name]
    V0 = si.equicorrelated(tokens=tokens, correlation=correlation, norm=norm).astype(dtype)
    V = np.asarray(si.simulate(layer, V0, [0.5, 1.0], paths=200, step=0.25, key=key), np.float64)
    assert np.isfinite(V).all()
    eps = float(jnp.finfo(dtype).eps)
    largest = np.abs(V).max(axis=(-2, -1))
    assert (np.abs(V - np.swapaxes(V, -1, -2)).max(axis=(-2, -1)) <= tokens * eps * largest).all()
    assert (np.linalg.eigvalsh(V)[..., 0] >= -tokens * eps * largest).all()


def test_a_key_gives_one_set_of_paths(V0, key):
    layer = LAYERS["transformer"]()
    one = si.simulate(layer, V0, **GOOD, key=key)
    np.testing.assert_array_equal(one, si.simulate(layer, V0, **GOOD, key=key))
    assert not np.allclose(one[:, 1:], si.simulate(layer, V0, **GOOD, key=jr.key(1))[:, 1:])


def test_time_zero_alone_needs_no_solver(V0, key):
    V = si.simulate(LAYERS["mlp"](), V0, [0.0], paths=3, key=key)
    assert_agrees(V, jnp.broadcast_to(V0, (3, 1, 3, 3)), rtol=1e-14)


def test_saving_more_often_on_the_same_steps_changes_no_path(V0, key):
    layer = LAYERS["transformer"]()
    often = si.simulate(layer, V0, [0.1, 0.2, 0.3], paths=3, step=0.1, key=key)
    once = si.simulate(layer, V0, [0.3], paths=3, step=0.1, key=key)
    assert_agrees(once[:, 0], often[:, 2], rtol=1e-6)


@pytest.mark.parametrize(
    "start", ["unequal", *(pytest.param(s, marks=pytest.mark.slow) for s in ("equicorrelated", "orthogonal"))]
)
def test_gradient_is_the_central_difference_on_common_random_numbers(start, key):
    """Derivatives by parameters, V0 and normals; backwards through a scan, and forwards through Diffrax's loop."""
    # Equicorrelated and orthogonal tokens repeat eigenvalues, where eigenvectors have no derivative.
    V0 = {
        "unequal": random_covariance(3),
        "equicorrelated": si.equicorrelated(tokens=3, correlation=0.2),
        "orthogonal": jnp.eye(3),
    }[start]
    at = jnp.array([0.5, 0.6, 0.3, -1.5]), V0, jr.normal(key, (8, 3, 3, 9))

    def expectation(values, V0, normals, adjoint=None):
        V = si.simulate_from(si.ShapedTransformer(*values), V0, [0.1, 0.3], normals, step=0.1, adjoint=adjoint)
        return jnp.mean(jnp.linalg.slogdet(V)[1] + jnp.trace(V, axis1=-2, axis2=-1) ** 2)

    # Its value too: another program for that alone would be compiled for as long.
    function = jax.jit(jax.value_and_grad(expectation, argnums=(0, 1, 2)))
    gradient = function(*at)[1]
    assert all((jnp.abs(part) > 0).all() for part in gradient)

    def difference(direction):
        """Central difference, its h² error extrapolated away."""

        def central(h):
            up, down = (
                function(*(x + sign * h * d for x, d in zip(at, direction, strict=True)))[0] for sign in (1, -1)
            )
            return (up - down) / (2 * h)

        return extrapolated(central(2e-4), central(1e-4))

    @jax.jit
    def forward(direction):
        return jax.jvp(lambda *at: expectation(*at, adjoint=diffrax.ForwardMode()), at, direction)[1]

    zero = jax.tree.map(jnp.zeros_like, at)
    directions = [(unit, *zero[1:]) for unit in jnp.eye(4)]
    directions.append((zero[0], jnp.array([[0.3, 0.1, 0.2], [0.1, -0.2, 0.4], [0.2, 0.4, 0.1]]), zero[2]))
    directions.append((*zero[:2], jr.normal(jr.key(1), at[2].shape)))
    for direction in directions:
        slope = sum(jnp.vdot(*pair) for pair in zip(gradient, direction, strict=True))
        np.testing.assert_allclose(slope, difference(direction), rtol=1e-7)
        np.testing.assert_allclose(forward(direction), slope, rtol=1e-10)


def test_gradient_in_the_slopes_is_finite_where_the_relu_is_linear(V0, key):
    def entry(c_plus):
        limit = si.ResidualFeedForward(0.5, c_plus, 0.3).limit()
        h, G = jnp.asarray(0.1), jr.normal(key, limit.normals(3))
        X, _ = splitting_step(limit, jnp.linalg.cholesky(V0), h, G, h < 0, tangents=False)
        return X[1, 0]

    assert jax.jit(jax.grad(entry))(0.3) == 0


def test_parameters_that_are_traced_and_out_of_range_raise(V0, key):
    def run(gamma):
        return si.simulate(si.ResidualFeedForward(gamma, 1.0, -1.0), V0, [0.1], paths=1, key=key)

    with pytest.raises(Exception, match="out of range"):  # noqa: B017, PT011 the type depends on how JAX wraps it
        jax.jit(run)(1.5).block_until_ready()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"paths": 0}, "paths: a whole number of at least 1 is needed, got 0"),
        ({"step": 0.0}, "step: must be positive and finite, got 0.0"),
        ({"step": -0.1}, "step: must be positive and finite, got -0.1"),
        ({"step": float("inf")}, "step: must be positive and finite, got inf"),
        ({"step": float("nan")}, "step: must be positive and finite, got nan"),
        ({"ts": []}, r"ts: a non-empty list of finite times is needed, got shape \(0,\)"),
        ({"ts": 1.0}, r"ts: a non-empty list of finite times is needed, got shape \(\)"),
        ({"ts": [0.1, float("nan")]}, "ts: a non-empty list of finite times is needed"),
        ({"ts": [0.2, 0.1]}, "ts: times must start at 0 or later and increase"),
        ({"ts": [0.1, 0.1]}, "ts: times must start at 0 or later and increase"),
        ({"ts": [-0.1, 0.1]}, "ts: times must start at 0 or later and increase"),
    ],
)
def test_what_makes_no_grid_is_refused(change, message, V0, key):
    with pytest.raises(ValueError, match=message):
        si.simulate(LAYERS["mlp"](), V0, **(GOOD | change), key=key)


def test_traced_times_are_refused(V0, key):
    with pytest.raises(ValueError, match="ts: the times must be known when the solver is compiled, got traced values"):
        jax.jit(lambda ts: si.simulate(LAYERS["mlp"](), V0, ts, paths=1, key=key))(jnp.array([0.1]))
    with pytest.raises(ValueError, match=r"got traced values; inside of jax.jit make them by NumPy, as np.linspace"):
        jax.jit(lambda: si.simulate(LAYERS["mlp"](), V0, jnp.linspace(0.1, 0.2, 2), paths=1, key=key))()
    with pytest.raises(ValueError, match=r"ts: the times must be known"):
        jax.jit(lambda t: si.simulate(LAYERS["mlp"](), V0, [t, 2 * t], paths=1, key=key))(0.1)


@pytest.mark.parametrize(
    ("V0", "message"),
    [
        (np.array([[1.0, 2.0], [2.0, 1.0]]), "V0: not positive semi-definite: smallest eigenvalue -1"),
        (np.array([[1.0, np.nan], [np.nan, 1.0]]), "V0: 2 entries are NaN or infinite"),
        (np.ones((2, 3)), r"V0: a square matrix .* got shape \(2, 3\)"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_a_v0_that_is_not_a_covariance_is_refused(V0, message, key):
    with pytest.raises(ValueError, match=message):
        si.simulate(LAYERS["mlp"](), V0, **GOOD, key=key)


@pytest.mark.parametrize(
    ("ts", "step", "steps"),
    [([0.0], 0.1, 0), ([0.3], 0.1, 3), ([0.0, 0.05, 0.3], 0.1, 4), ([0.013, 0.5], 0.01, 51), ([1.0], 5.0, 1)],
)
def test_the_grid_holds_every_time_and_no_step_is_too_long(ts, step, steps):
    grid = step_grid(ts, step)
    assert len(grid.steps) == steps + 1
    assert grid.saved == tuple(ts)
    assert set(ts) <= set(grid.steps)
    lengths = np.diff(grid.steps)
    assert (lengths > 0).all()
    assert (lengths <= step * (1 + 1e-8)).all()


def test_relu_networks_cannot_explode_however_deep(key):
    """Their tokens align until correlations are 1 in rounding: V turns singular, not NaN."""
    V0 = si.equicorrelated(tokens=3, correlation=0.2).astype(jnp.float32)
    V = si.simulate(si.ResidualFeedForward(0.9, 2.0, -2.0), V0, [5.0, 10.0], paths=256, step=0.05, key=key)
    assert jnp.isfinite(V).all()


def test_tiny_times_are_steps_too(V0, key):
    V = si.simulate(LAYERS["mlp"](), V0, [0.0, 1e-12, 0.1], paths=2, step=0.1, key=key)
    assert V.shape == (2, 3, *V0.shape)


def test_steps_beyond_counting_are_refused(V0, key):
    with pytest.raises(ValueError, match="step: 1e-15 cuts the time to 0.1 into more than 1000000 steps"):
        si.simulate(LAYERS["mlp"](), V0, [0.1], paths=1, step=1e-15, key=key)


def test_steps_that_single_precision_does_not_tell_apart_are_refused(V0, key):
    with pytest.raises(ValueError, match="step: 1e-06 is too short for single precision at times of 100"):
        si.simulate(LAYERS["mlp"](), V0, [100.0, 100.000001], paths=1, step=1.0, key=key)


@pytest.mark.parametrize("paths", [pytest.param(5, marks=pytest.mark.long), 600], ids=["part of a block", "two blocks"])
def test_known_and_traced_arguments_give_the_same_paths(paths, V0, monkeypatch, key):
    """Known ones by Diffrax's loop, block by block on the host; traced ones by a scan, its last chunk filled up."""
    monkeypatch.setattr("sdeinfer.solve._solve.CHUNK", 4)

    def simulate(gamma):
        layer = si.ResidualFeedForward(gamma, 1.0, -1.0)
        return si.simulate(layer, V0, [0.0, 0.01, 0.1], paths=paths, step=0.01, key=key)

    known = simulate(0.5)
    np.testing.assert_allclose(jax.jit(simulate)(0.5), known, rtol=1e-9)
    if paths < 10:  # known arguments inside of jit
        np.testing.assert_allclose(jax.jit(lambda: simulate(0.5))(), known, rtol=1e-9)
