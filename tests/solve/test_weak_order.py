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

import sdeinfer as si
from sdeinfer.solve import PSDEuler, PSDSplitting

pytestmark = pytest.mark.slow

BATCH, PATHS = 20_000, 60_000
EULER = PSDEuler()


def bias_from_the_exact_law(
    layer, V0, time: float, steps: int, statistic: Callable, expected, paths: int, key, solver=EULER
):
    """E statistic(V_T) − expected, with Σ tr E_k and Σ tr E_k² as control variates: most of the log volume's noise."""
    tokens, h = len(V0), time / steps

    @jax.jit
    def batch(key):
        normals = jr.normal(key, (BATCH, steps, *solver.normals(layer.limit(), tokens)))
        V = si.simulate_from(layer, V0, [time], normals, step=h, solver=solver)[:, 0]
        normals = normals[..., :tokens]
        trace = jnp.einsum("psii->p", normals) / jnp.sqrt(1.0 * steps)
        square = jnp.einsum("psij,psji->p", normals, normals) / steps - tokens
        return jax.vmap(statistic)(V) - expected, jnp.stack([trace, square], axis=1)

    found, controls = zip(*(batch(k) for k in jr.split(key, paths // BATCH)), strict=True)
    found, controls = np.concatenate(found), np.concatenate(controls)
    slopes = np.linalg.lstsq(controls, found - found.mean(), rcond=None)[0]
    return mean_and_error(found - controls @ slopes)


def bias_from_half_the_step(layer, V0, time: float, steps: int, statistic: Callable, paths: int, key, solver=EULER):
    """E statistic(V_T) at the step h minus that at h/2, on the same Brownian motion."""
    tokens = len(V0)

    @jax.jit
    def batch(key):
        fine = jr.normal(key, (BATCH, 2 * steps, *solver.normals(layer.limit(), tokens)))
        coarse = (fine[:, ::2] + fine[:, 1::2]) / jnp.sqrt(2.0)
        coarse, fine = (
            si.simulate_from(layer, V0, [time], normals, step=time / count, solver=solver)[:, 0]
            for normals, count in ((coarse, steps), (fine, 2 * steps))
        )
        # A path that explodes at either step is left out: at most one in 5000 of the second order's cases.
        finite = jnp.isfinite(coarse).all(axis=(1, 2)) & jnp.isfinite(fine).all(axis=(1, 2))
        of_coarse, of_fine = (jax.vmap(statistic)(jnp.where(finite[:, None, None], V, V0)) for V in (coarse, fine))
        return of_coarse - of_fine

    return mean_and_error(np.concatenate([batch(k) for k in jr.split(key, paths // BATCH)]))


def report(name: str, steps, biases, errors) -> None:
    """Print the biases, and the order as the slope of log |bias| in log h with its 95 % band."""
    x, y, weight = -np.log(steps), np.log(np.abs(biases)), np.abs(biases) / errors
    X = np.stack([np.ones_like(x), x], axis=1) * weight[:, None]
    covariance = np.linalg.inv(X.T @ X)
    order = (covariance @ X.T @ (y * weight))[1]
    values = ", ".join(f"{b:.2e} ± {e:.0e}" for b, e in zip(biases, errors, strict=True))
    print(f"\n{name}: bias at {steps} steps {values}: order {order:.2f} ± {1.96 * covariance[1, 1] ** 0.5:.2f}", end="")


def assert_vanishes(steps, biases, errors, order: int) -> None:
    """Bias = C h^q + D h^{q + 1} leaves nothing unexplained: no constant, no lower power of h."""
    h = 1 / np.asarray(steps, float)
    X = np.stack([h**order, h ** (order + 1)], axis=1) / errors[:, None]
    # In the orthogonal complement of X the standardised biases are standard normal.
    complement = np.linalg.svd(X.T)[2][2:]
    assert_within(complement @ (biases / errors))


STEPS = np.array([8, 16, 32, 64])


def log_det(V):
    return jnp.linalg.slogdet(V)[1]


EXACT = {
    "log V, m = 1": (si.ShapedTransformer(0.5, 0.6, 0.3, -1.5), np.array([[1.7]]), 0.5, log_det),
    "log det V, m = 3, no gap": (si.ShapedMLP(-1.0, -1.0), random_covariance(3), 0.25, log_det),
}


@pytest.mark.parametrize("name", EXACT)
def test_bias_from_an_exact_law_is_of_the_first_order(name, key):
    layer, V0, time, statistic = EXACT[name]
    tokens = len(V0)
    expected = float(log_det(V0) - layer.limit().linear_noise * tokens * (tokens + 1) * time / 2)
    found = [
        bias_from_the_exact_law(layer, jnp.asarray(V0), time, int(count), statistic, expected, PATHS, k)
        for count, k in zip(STEPS, jr.split(key, len(STEPS)), strict=True)
    ]
    biases, errors = (np.array(part) for part in zip(*found, strict=True))
    report(name, STEPS, biases, errors)
    assert_vanishes(STEPS, biases, errors, 1)


def test_mean_is_kept_exactly_at_every_step(key):
    layer, V0, time = si.ResidualFeedForward(0.6, 0.4, 0.4), jnp.asarray(random_covariance(3)), 0.5
    for count, k in zip((1, 2, 8), jr.split(key, 3), strict=True):
        V = si.simulate(layer, V0, [time], paths=200_000, step=time / count, solver=EULER, key=k)[:, 0]
        mean, error = mean_and_error(V)
        z = (mean - V0) / error
        print(f"\nE V − V0, no gap, {count} steps: largest {np.abs(z).max():.1f} Monte Carlo errors", end="")
        assert_within(z[np.triu_indices(3)])


def rho(V):
    return V[0, 1] / jnp.sqrt(V[0, 0] * V[1, 1])


LEVELS = {
    "attention drift: E ρ₁₂": (si.ShapedAttention(0.1, 0.03), rho),
    "attention drift: E log tr V": (si.ShapedAttention(0.1, 0.03), lambda V: jnp.log(jnp.trace(V))),
    "ReLU drift: E ρ₁₂": (si.ResidualFeedForward(0.6, 3.0, -3.0), rho),
    "ReLU drift: E V₁₂": (si.ResidualFeedForward(0.6, 3.0, -3.0), lambda V: V[0, 1]),
    "Transformer: E ρ₁₂": (si.ShapedTransformer(0.1, 0.03, 3.0, -3.0), rho),
}


@pytest.mark.parametrize("name", LEVELS)
def test_bias_from_half_the_step_is_of_the_first_order(name, key):
    layer, statistic = LEVELS[name]
    V0 = 0.4 * jnp.asarray(random_covariance(3))
    found = [
        bias_from_half_the_step(layer, V0, 0.25, int(count), statistic, PATHS, k)
        for count, k in zip(STEPS, jr.split(key, len(STEPS)), strict=True)
    ]
    biases, errors = (np.array(part) for part in zip(*found, strict=True))
    report(name, STEPS, biases, errors)
    assert_vanishes(STEPS, biases, errors, 1)


def test_bias_from_an_exact_law_is_of_the_second_order(key):
    name = "log det V, m = 3, no gap"
    layer, V0, time, statistic = EXACT[name]
    tokens, steps, solver = len(V0), np.array([2, 4, 8, 16]), PSDSplitting(attention=False)
    expected = float(log_det(V0) - layer.limit().linear_noise * tokens * (tokens + 1) * time / 2)
    found = [
        bias_from_the_exact_law(layer, jnp.asarray(V0), time, int(count), statistic, expected, 4 * PATHS, k, solver)
        for count, k in zip(steps, jr.split(key, len(steps)), strict=True)
    ]
    biases, errors = (np.array(part) for part in zip(*found, strict=True))
    report(name, steps, biases, errors)
    assert_vanishes(steps, biases, errors, 2)


def effective_rank(V):
    return jnp.trace(V) ** 2 / jnp.trace(V @ V)


SECOND = {
    "ReLU drift: E ρ₁₂": (si.ResidualFeedForward(0.6, 3.0, -3.0), rho),
    "ReLU drift: E V₁₂": (si.ResidualFeedForward(0.6, 3.0, -3.0), lambda V: V[0, 1]),
    "ReLU drift: E log det V": (si.ResidualFeedForward(0.6, 3.0, -3.0), log_det),
    "ReLU drift: E effective rank": (si.ResidualFeedForward(0.6, 3.0, -3.0), effective_rank),
    "ReLU drift: P(ρ₁₂ > .5)": (si.ResidualFeedForward(0.6, 3.0, -3.0), lambda V: (rho(V) > 0.5) * 1.0),
    "Transformer: E log det V": (si.ShapedTransformer(0.3, 0.2, 2.0, -2.0), log_det),
    "Transformer: E log tr V": (si.ShapedTransformer(0.3, 0.2, 2.0, -2.0), lambda V: jnp.log(jnp.trace(V))),
    "causal Transformer: E log det V": (si.ShapedTransformer(0.3, 0.2, 2.0, -2.0, pattern=si.CAUSAL), log_det),
}


@pytest.mark.parametrize("name", SECOND)
def test_bias_from_half_the_step_is_of_the_second_order(name, key):
    layer, statistic = SECOND[name]
    V0, steps = 0.4 * jnp.asarray(random_covariance(3)), np.array([2, 4, 8, 16])
    solver = PSDSplitting(attention=layer.has_attention)
    found = [
        bias_from_half_the_step(layer, V0, 0.5, int(count), statistic, 4 * PATHS, k, solver)
        for count, k in zip(steps, jr.split(key, len(steps)), strict=True)
    ]
    biases, errors = (np.array(part) for part in zip(*found, strict=True))
    report(name, steps, biases, errors)
    assert_vanishes(steps, biases, errors, 2)
