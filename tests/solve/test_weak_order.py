"""The weak order of the solver, by regression over step sizes; run with `-m slow -s` to see the biases.

Each bias is from the solver at half the step, driven by the same normals, which leaves little of the Monte Carlo error.
"""

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from helpers.budget import assert_within, mean_and_error
from helpers.cases import random_covariance
from helpers.given_normals import paths_from

import sdeinfer as si

pytestmark = pytest.mark.slow

BATCH = 20_000


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


def log_det(V):
    return jnp.linalg.slogdet(V)[1]


def rho(V):
    return V[0, 1] / jnp.sqrt(V[0, 0] * V[1, 1])


RELU = {
    "E ρ₁₂": rho,
    "E V₁₂": lambda V: V[0, 1],
    "E log det V": log_det,
    "E effective rank": lambda V: jnp.trace(V) ** 2 / jnp.trace(V @ V),
    "P(ρ₁₂ > .5)": lambda V: (rho(V) > 0.5) * 1.0,
}
TRANSFORMER = {"E log det V": log_det, "E log tr V": lambda V: jnp.log(jnp.trace(V))}
CASES = {
    "ReLU drift": (si.ResidualFeedForward(0.6, 3.0, -3.0), RELU, np.array([4, 8, 16, 32]), 960_000),
    "Transformer": (si.ShapedTransformer(0.3, 0.2, 2.0, -2.0), TRANSFORMER, np.array([2, 4, 8, 16]), 960_000),
    "causal Transformer": (
        si.ShapedTransformer(0.3, 0.2, 2.0, -2.0, pattern=si.CAUSAL),
        {"E log det V": log_det},
        np.array([2, 4, 8, 16]),
        240_000,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_bias_from_half_the_step_is_of_the_second_order(name, key):
    """Bias = C h² + D h³ leaves nothing unexplained: no constant, no lower power of h."""
    (layer, statistics, steps, paths), V0 = CASES[name], 0.4 * jnp.asarray(random_covariance(3))
    found = [
        bias_from_half_the_step(layer, V0, 0.5, int(count), statistics, paths, k)
        for count, k in zip(steps, jr.split(key, len(steps)), strict=True)
    ]
    powers = np.stack([1.0 / steps**2, 1.0 / steps**3], axis=1)
    for number, statistic in enumerate(statistics):
        biases, errors = (np.array(part)[:, number] for part in zip(*found, strict=True))
        print(f"\n{name}: {statistic}: biases {biases} ± {errors} at {steps} steps", end="")
        # In the orthogonal complement of both powers the standardised biases are standard normal.
        complement = np.linalg.svd((powers / errors[:, None]).T)[2][2:]
        assert_within(complement @ (biases / errors))
