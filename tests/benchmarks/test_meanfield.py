"""1,024 tokens that cluster on the sphere: `meanfield.solve` against loops of NumPy and SciPy of equal accuracy.

The error of a solver is the root mean square over the tokens of their distance, at the end, to a solution of
tolerances 10⁴ times smaller. Euler's error is of first order in its step, as its last halvings show; where the step of
equal error takes too long, the time is that of the smallest step here, times the ratio of the errors.
"""

import time

import jax
import jax.random as jr
import numpy as np
import pytest
from scipy.integrate import solve_ivp

from sdeinfer import meanfield

pytestmark = pytest.mark.benchmark

TOKENS, DIMENSION, BETA, TIME = 1024, 3, 9.0, 30.0
STEPS = (300, 600, 1200)
"""Of Euler's method: 0.1 as in published experiments, and smaller."""

TOLERANCES = (1e-2, 1e-3, 1e-4, 1e-5, 1e-6, 1e-7)
"""Relative ones; the last is the default, as is a tenth of each for the absolute one."""


def softmax_field(x: np.ndarray) -> np.ndarray:
    """The velocity, with one array of n² numbers."""
    kernel = x @ (BETA * x.T)
    kernel -= kernel.max(axis=1, keepdims=True)
    np.exp(kernel, out=kernel)
    mean = kernel @ x / kernel.sum(axis=1, keepdims=True)
    return mean - (x * mean).sum(axis=1, keepdims=True) * x


def euler(x: np.ndarray, steps: int) -> np.ndarray:
    for _ in range(steps):
        x = x + TIME / steps * softmax_field(x)
        x = x / np.linalg.norm(x, axis=1, keepdims=True)
    return x


def runge_kutta(x: np.ndarray) -> np.ndarray:
    found = solve_ivp(
        lambda t, y: softmax_field(y.reshape(x.shape)).ravel(), (0, TIME), x.ravel(), rtol=1e-7, atol=1e-8
    )
    return found.y[:, -1].reshape(x.shape)


def measured(run) -> tuple[np.ndarray, float]:
    started = time.perf_counter()
    end = np.asarray(jax.block_until_ready(run()))
    return end, time.perf_counter() - started


@pytest.mark.parametrize("seed", [0, 1])
def test_against_numpy_at_equal_accuracy(seed, record):
    flow, tokens = meanfield.SelfAttentionFlow(BETA), meanfield.random_tokens(TOKENS, DIMENSION, key=jr.key(seed))
    x = np.asarray(tokens)
    reference = np.asarray(meanfield.solve(flow, tokens, [TIME], rtol=1e-11, atol=1e-12)[0])

    def error(end):
        return float((((end - reference) ** 2).sum(axis=1).mean()) ** 0.5)

    def solve(rtol):
        return meanfield.solve(flow, tokens, [TIME], rtol=rtol, atol=rtol / 10)[0]

    jax.clear_caches()
    _, cold = measured(lambda: meanfield.solve(flow, tokens, [TIME])[0])
    ours = {}
    for rtol in TOLERANCES:
        runs = [measured(lambda rtol=rtol: solve(rtol)) for _ in range(4)][1:]  # the first compiles
        ours[rtol] = error(runs[0][0]), float(np.median([seconds for _, seconds in runs]))
    mine, warm = ours[TOLERANCES[-1]]
    rows = {"`solve`": [f"{mine:.0e}", f"{warm:.1f} s", f"{cold:.1f} s"]}
    end, seconds = measured(lambda: runge_kutta(x))
    rows["SciPy's RK45, same tolerance"] = [f"{error(end):.0e}", f"{seconds / warm:.1f}", f"{seconds / cold:.1f}"]
    for steps in STEPS:
        end, seconds = measured(lambda steps=steps: euler(x, steps))
        theirs = error(end)
        # The loosest tolerance that is at least as accurate.
        rtol = next((rtol for rtol in TOLERANCES if ours[rtol][0] <= theirs), TOLERANCES[-1])
        rows[f"Euler, step {TIME / steps:g}"] = [f"{theirs:.0e}", f"{seconds / ours[rtol][1]:.0f}", ""]
    whole = seconds * theirs / mine
    rows["Euler at `solve`'s error, extrapolated"] = [f"{mine:.0e}", f"{whole / warm:.0e}", f"{whole / cold:.0e}"]
    record("time_of_flow", {f"seed {seed}: {name}": cells for name, cells in rows.items()})
    print(f"\nseed {seed}: {rows}")
