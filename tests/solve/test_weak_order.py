"""The weak order of the solver, by regression over step sizes; run with `-m slow -s` to see the figures.

Each bias is from the solver at half the step, driven by the same normals, which leaves little of the Monte Carlo error.
"""

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from budget import assert_within, mean_and_error
from conftest import random_covariance
from given_normals import paths_from

import sdeinfer as si

pytestmark = pytest.mark.slow

BATCH, PATHS = 20_000, 60_000


def bias_from_half_the_step(layer, V0, time: float, steps: int, statistics: dict, paths: int, key):
    """E statistic(V_T) at the step h less that at h/2, by the same normals, and its error; for each statistic."""
    tokens = len(V0)

    @jax.jit
    def batch(key):
        fine = jr.normal(key, (BATCH, 2 * steps, *layer.limit().normals(tokens)))
        coarse = (fine[:, ::2] + fine[:, 1::2]) / jnp.sqrt(2.0)
        coarse, fine = (
            paths_from(layer, V0, [time], normals, step=time / count)[:, 0]
            for normals, count in ((coarse, steps), (fine, 2 * steps))
        )
        # A path that explodes at either step is left out: at most one in 5000 of the second order's cases.
        finite = jnp.isfinite(coarse).all(axis=(1, 2)) & jnp.isfinite(fine).all(axis=(1, 2))
        coarse, fine = (jnp.where(finite[:, None, None], V, V0) for V in (coarse, fine))
        each = [jax.vmap(statistic)(coarse) - jax.vmap(statistic)(fine) for statistic in statistics.values()]
        return jnp.stack(each, axis=1)

    return mean_and_error(np.concatenate([batch(k) for k in jr.split(key, paths // BATCH)]))


def report(name: str, steps, biases, errors) -> None:
    """Print the biases and the order: the slope of log |bias| in log h, and that over the last halving; 95 % bands."""
    x, y, weight = -np.log(steps), np.log(np.abs(biases)), np.abs(biases) / errors
    X = np.stack([np.ones_like(x), x], axis=1) * weight[:, None]
    covariance = np.linalg.inv(X.T @ X)
    order, band = (covariance @ X.T @ (y * weight))[1], 1.96 * covariance[1, 1] ** 0.5
    last, last_band = (y[-2] - y[-1]) / np.log(2), 1.96 * np.hypot(*(1 / weight[-2:])) / np.log(2)
    values = ", ".join(f"{b:.2e} ± {e:.0e}" for b, e in zip(biases, errors, strict=True))
    print(f"\n{name}: bias at {steps} steps {values}: order {order:.2f} ± {band:.2f}", end="")
    print(f", of the last halving {last:.2f} ± {last_band:.2f}", end="")


def assert_vanishes(steps, biases, errors, order: int) -> None:
    """Bias = C h^q + D h^{q + 1} leaves nothing unexplained: no constant, no lower power of h."""
    h = 1 / np.asarray(steps, float)
    X = np.stack([h**order, h ** (order + 1)], axis=1) / errors[:, None]
    # In the orthogonal complement of X the standardised biases are standard normal.
    complement = np.linalg.svd(X.T)[2][2:]
    assert_within(complement @ (biases / errors))


def log_det(V):
    return jnp.linalg.slogdet(V)[1]


def rho(V):
    return V[0, 1] / jnp.sqrt(V[0, 0] * V[1, 1])


def log_trace(V):
    return jnp.log(jnp.trace(V))


def assert_order(name: str, layer, V0, time: float, steps, statistics: dict, paths: int, key) -> None:
    """Report the biases of each statistic from those at half the step, and check that they vanish with the order."""
    found = [
        bias_from_half_the_step(layer, V0, time, int(count), statistics, paths, k)
        for count, k in zip(steps, jr.split(key, len(steps)), strict=True)
    ]
    for number, statistic in enumerate(statistics):
        biases, errors = (np.array(part)[:, number] for part in zip(*found, strict=True))
        report(f"{name}: {statistic}", steps, biases, errors)
        assert_vanishes(steps, biases, errors, 2)


def effective_rank(V):
    return jnp.trace(V) ** 2 / jnp.trace(V @ V)


SECOND = {
    "ReLU drift": (
        si.ResidualFeedForward(0.6, 3.0, -3.0),
        {
            "E ρ₁₂": rho,
            "E V₁₂": lambda V: V[0, 1],
            "E log det V": log_det,
            "E effective rank": effective_rank,
            "P(ρ₁₂ > .5)": lambda V: (rho(V) > 0.5) * 1.0,
        },
        np.array([4, 8, 16, 32]),
        16 * PATHS,
    ),
    "Transformer": (
        si.ShapedTransformer(0.3, 0.2, 2.0, -2.0),
        {"E log det V": log_det, "E log tr V": log_trace},
        np.array([2, 4, 8, 16]),
        16 * PATHS,
    ),
    "causal Transformer": (
        si.ShapedTransformer(0.3, 0.2, 2.0, -2.0, pattern=si.CAUSAL),
        {"E log det V": log_det},
        np.array([2, 4, 8, 16]),
        4 * PATHS,
    ),
}


@pytest.mark.parametrize("name", SECOND)
def test_bias_from_half_the_step_is_of_the_second_order(name, key):
    layer, statistics, steps, paths = SECOND[name]
    assert_order(name, layer, 0.4 * jnp.asarray(random_covariance(3)), 0.5, steps, statistics, paths, key)
