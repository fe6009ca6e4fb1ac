import math

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from helpers.budget import assert_estimate
from helpers.cases import LAYERS, random_covariance
from helpers.given_normals import paths_from
from helpers.internals import step_grid
from helpers.references import assert_agrees, extrapolated

import sdeinfer as si

TIMES = [0.0, 0.013, 0.1]


@pytest.fixture
def V0():
    return random_covariance(3)


@pytest.mark.one_case
@pytest.mark.parametrize("name", LAYERS)
def test_paths_start_at_v0_and_are_saved_at_the_times_asked_for(name, V0, key):
    V = si.simulate(LAYERS[name](), V0, TIMES, paths=5, step=0.02, key=key)
    assert V.shape == (5, 3, 3, 3)
    assert V.dtype == jnp.float64
    assert_agrees(V[:, 0], jnp.broadcast_to(V0, (5, 3, 3)), rtol=1e-14)
    assert len(np.unique(np.asarray(V)[:, 1, 0, 0])) == 5


def test_saving_more_often_on_the_same_steps_changes_no_path(V0, key):
    layer = LAYERS["transformer"]()
    often = si.simulate(layer, V0, [0.1, 0.2, 0.3], paths=3, step=0.1, key=key)
    once = si.simulate(layer, V0, [0.3], paths=3, step=0.1, key=key)
    assert_agrees(once[:, 0], often[:, 2], rtol=1e-6)


@pytest.mark.long
@pytest.mark.parametrize(
    "start", ["unequal", *(pytest.param(s, marks=pytest.mark.slow) for s in ("equicorrelated", "orthogonal"))]
)
def test_gradient_is_the_central_difference_on_common_random_numbers(start, key):
    """Derivatives by parameters, V0 and normals; backwards and forwards through the scan."""
    # Equicorrelated and orthogonal tokens repeat eigenvalues, where eigenvectors have no derivative.
    V0 = {
        "unequal": random_covariance(3),
        "equicorrelated": si.equicorrelated(tokens=3, correlation=0.2),
        "orthogonal": jnp.eye(3),
    }[start]
    at = jnp.array([0.5, 0.6, 0.3, -1.5]), V0, jr.normal(key, (8, 3, 3, 9))

    def expectation(values, V0, normals):
        V = paths_from(si.ShapedTransformer(*values), V0, [0.1, 0.3], normals, step=0.1)
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
        return jax.jvp(expectation, at, direction)[1]

    zero = jax.tree.map(jnp.zeros_like, at)
    directions = [(unit, *zero[1:]) for unit in jnp.eye(4)]
    directions.append((zero[0], jnp.array([[0.3, 0.1, 0.2], [0.1, -0.2, 0.4], [0.2, 0.4, 0.1]]), zero[2]))
    directions.append((*zero[:2], jr.normal(jr.key(1), at[2].shape)))
    for direction in directions:
        slope = sum(jnp.vdot(*pair) for pair in zip(gradient, direction, strict=True))
        np.testing.assert_allclose(slope, difference(direction), rtol=1e-7)
        np.testing.assert_allclose(forward(direction), slope, rtol=1e-10)


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


@pytest.mark.long
def test_relu_networks_cannot_explode_however_deep(key):
    """Their tokens align until correlations are 1 in rounding: V turns singular, not NaN."""
    V0 = si.equicorrelated(tokens=3, correlation=0.2).astype(jnp.float32)
    V = si.simulate(si.ResidualFeedForward(0.9, 2.0, -2.0), V0, [5.0, 10.0], paths=256, step=0.05, key=key)
    assert jnp.isfinite(V).all()


@pytest.mark.long
def test_known_and_traced_arguments_give_the_same_paths(V0, monkeypatch, key):
    """Known ones by Diffrax's loop, two blocks on the host; traced ones by a scan, its last chunk filled up."""
    monkeypatch.setattr("sdeinfer.solve._solve.CHECKPOINT_STEPS", 4)

    def simulate(gamma):
        layer = si.ResidualFeedForward(gamma, 1.0, -1.0)
        return si.simulate(layer, V0, [0.0, 0.01, 0.1], paths=600, step=0.01, key=key)

    known = simulate(0.5)
    assert len(np.unique(known[:, 1, 0, 0])) == 600
    np.testing.assert_allclose(jax.jit(simulate)(0.5), known, rtol=1e-9)


@pytest.mark.long
@pytest.mark.parametrize(("tokens", "gamma", "tau0"), [(3, 0.5, 0.5), (2, 8**-0.5, 1.0)])
def test_explosions_are_of_the_sde_and_not_of_the_step(tokens, gamma, tau0, key):
    layer = si.ShapedTransformer(gamma=gamma, tau0=tau0, c_plus=0.0, c_minus=-1.0)
    V0 = si.equicorrelated(tokens=tokens, correlation=0.2 if tokens == 3 else -1.0)
    shares = []
    # Of 75 and of 250 steps: one program, which is compiled for 256.
    for step, k in zip((0.01, 0.003), jr.split(key), strict=True):
        V = si.simulate(layer, V0, [0.75], paths=4000, step=step, key=k)
        shares.append(float(jnp.isinf(V[:, 0, 0, 0]).mean()))
    error = math.sqrt(sum(share * (1 - share) / 4000 for share in shares))
    assert min(shares) > 0.01
    assert_estimate(*shares, error)
