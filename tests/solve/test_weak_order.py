"""The weak orders of the solvers, by regression over step sizes; run with `-m slow -s` to see the figures.

Each bias comes from paths driven by the same normals as what it is a bias from, which leaves little of the Monte Carlo
error: the exact solution, where one is known for these normals, or the solver itself at half the step.
"""

from collections.abc import Callable

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


def bias_from_the_exact_law(layer, V0, time: float, steps: int, statistic: Callable, expected, paths: int, key):
    """E statistic(V_T) − expected, with Σ tr E_k and Σ tr E_k² as control variates: most of the log volume's noise."""
    tokens, h = len(V0), time / steps

    @jax.jit
    def batch(key):
        normals = jr.normal(key, (BATCH, steps, *layer.limit().normals(tokens)))
        V = paths_from(layer, V0, [time], normals, step=h)[:, 0]
        normals = normals[..., :tokens]
        trace = jnp.einsum("psii->p", normals) / jnp.sqrt(1.0 * steps)
        square = jnp.einsum("psij,psji->p", normals, normals) / steps - tokens
        return jax.vmap(statistic)(V) - expected, jnp.stack([trace, square], axis=1)

    found, controls = zip(*(batch(k) for k in jr.split(key, paths // BATCH)), strict=True)
    found, controls = np.concatenate(found), np.concatenate(controls)
    slopes = np.linalg.lstsq(controls, found - found.mean(), rcond=None)[0]
    return mean_and_error(found - controls @ slopes)


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


EXACT = {
    "log V, m = 1": (si.ShapedTransformer(0.5, 0.6, 0.3, -1.5), np.array([[1.7]]), 0.5, log_det),
    "log det V, m = 3, no gap": (si.ShapedMLP(-1.0, -1.0), random_covariance(3), 0.25, log_det),
}


def test_mean_is_kept_exactly_at_every_step(key):
    layer, V0, time = si.ResidualFeedForward(0.6, 0.4, 0.4), jnp.asarray(random_covariance(3)), 0.5
    for count, k in zip((1, 2, 8), jr.split(key, 3), strict=True):
        V = si.simulate(layer, V0, [time], paths=200_000, step=time / count, key=k)[:, 0]
        mean, error = mean_and_error(V)
        z = (mean - V0) / error
        print(f"\nE V − V0, no gap, {count} steps: largest {np.abs(z).max():.1f} Monte Carlo errors", end="")
        assert_within(z[np.triu_indices(3)])


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


def test_bias_from_an_exact_law_is_of_the_second_order(key):
    name = "log det V, m = 3, no gap"
    layer, V0, time, statistic = EXACT[name]
    tokens, steps = len(V0), np.array([2, 4, 8, 16])
    expected = float(log_det(V0) - layer.limit().linear_noise * tokens * (tokens + 1) * time / 2)
    found = [
        bias_from_the_exact_law(layer, jnp.asarray(V0), time, int(count), statistic, expected, 4 * PATHS, k)
        for count, k in zip(steps, jr.split(key, len(steps)), strict=True)
    ]
    biases, errors = (np.array(part) for part in zip(*found, strict=True))
    report(name, steps, biases, errors)
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
