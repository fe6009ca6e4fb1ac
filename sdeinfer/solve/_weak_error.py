"""Weak errors of the solver by Richardson's extrapolation, from paths at two step sizes with the same noise."""

import math
from typing import NamedTuple

import jax.random as jr
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray
from numpy.typing import ArrayLike

from sdeinfer._files import InputError
from sdeinfer.covariance import factor_on_host, is_concrete, validate_covariance
from sdeinfer.layers import AbstractLayer, check_parameters
from sdeinfer.solve._blocks import solve_in_blocks
from sdeinfer.solve._grid import Grid, step_grid
from sdeinfer.solve._limits import limit_over_on_host

STEP = 0.05
"""Default of the longest step, in depth-time."""

ORDER = 2
"""Weak order of the solver."""

LONGEST = 0.2
"""The step of the first pilot run, in depth-time."""

WORK = 2**28
"""Largest number of factor entries times steps of all pilot runs: some seconds."""

PILOT = 2**17
"""Number of factor entries of a pilot run: paths times m²."""


class WeakErrors(NamedTuple):
    """Errors of the means of V's statistics, of the paths that do not explode; each of shape (times, statistics).

    The statistics are the correlations ρ_αβ with α < β, log V_αα, and the logarithm of the effective rank
    (tr V)²/tr V².

    Attributes:
        error: E f(V) by the solver less E f(V) of the SDE.
        noise: Monte Carlo standard error of the estimate.
    """

    error: Float[np.ndarray, "times statistics"]
    noise: Float[np.ndarray, "times statistics"]

    @property
    def bound(self) -> float:
        """Largest absolute error of all statistics, each with twice its Monte Carlo error added."""
        return float(np.max(np.abs(self.error) + 2 * self.noise))


def weak_errors(
    layer: AbstractLayer,
    V0: Float[Array | np.ndarray, "m m"],
    ts: ArrayLike,
    *,
    step: float = STEP,
    paths: int | None = None,
    key: PRNGKeyArray,
) -> WeakErrors:
    """Estimate the weak errors of `simulate`.

    With errors C h² + …, paths at the steps h and h/2 differ by ¾ C h² on average. Both have the same
    Brownian motion, which removes most of the variance.

    Arguments:
        layer: the architecture, with its parameters.
        V0: covariance at time 0, shape (m, m).
        ts: depth-times, increasing.
        step: longest step.
        paths: number of paths; None for 2¹⁷/m².
        key: PRNG key.

    Raises:
        InputError: as `simulate`; for traced arguments; and if all paths explode.
    """
    V0 = np.asarray(validate_covariance(V0))
    paths = max(256, PILOT // V0.size) if paths is None else paths
    layer, coarse, X0 = check_parameters(layer), step_grid(ts, step), factor_on_host(V0)[None]
    ends = np.asarray(coarse.steps)
    middles = (ends[:-1] + ends[1:]) / 2
    fine = Grid(tuple(np.sort(np.concatenate([ends, middles])).tolist()), coarse.saved)
    V, stopped = zip(
        *(
            solve_in_blocks(limit_over_on_host(layer, grid), X0, grid, paths=paths, noise=fine, key=key)
            for grid in (coarse, fine)
        ),
        strict=True,
    )
    finite = np.minimum(*stopped) >= V0.dtype.type(coarse.saved[-1])  # a path that explodes at either step is left out
    if finite.sum() < 2:
        raise InputError("ts: all paths of the SDE explode; use shorter times or smaller tokens")
    difference = _statistics(V[0][finite]) - _statistics(V[1][finite])
    scale = 1 / (1 - 0.5**ORDER)
    noise = difference.std(axis=0, ddof=1) / math.sqrt(len(difference))
    return WeakErrors(scale * difference.mean(axis=0), scale * noise)


def step_within(
    layer: AbstractLayer,
    V0: Float[Array | np.ndarray, "m m"],
    ts: ArrayLike,
    *,
    tolerance: float,
    key: PRNGKeyArray,
) -> float:
    """A step at which the weak errors are no larger than a tolerance, by the bound of `weak_errors`.

    Pilot runs start at the step 0.2. After a run that misses the tolerance the step is that at which an error of the
    solver's order would take half of it, and there are as many paths as leave the other half to their Monte Carlo
    error.

    Arguments:
        layer: the architecture, with its parameters.
        V0: covariance at time 0, shape (m, m).
        ts: depth-times, increasing.
        tolerance: largest weak error, positive.
        key: PRNG key.

    Raises:
        InputError: as `weak_errors`, and if the tolerance takes more than some seconds of pilot runs.
    """
    if not (tolerance > 0 and math.isfinite(tolerance)):
        raise InputError(f"tolerance: must be positive and finite, got {tolerance:g}")
    if not all(map(is_concrete, (*layer.parameters().values(), V0, key))):
        raise InputError("tolerance: the layer, V0 and key must be known when the step is chosen, got traced values")
    step, paths, key, work, found = LONGEST, max(256, PILOT // np.size(V0)), jr.fold_in(key, 2**31), 0, math.inf
    while True:
        steps = len(step_grid(ts, step).steps) - 1
        work += 3 * steps * paths * np.size(V0)
        if work > WORK:
            raise InputError(
                f"tolerance: {tolerance:g} takes pilot runs of {paths} paths by {steps} steps and more, too many to "
                f"choose a step by; the last run's bound is {found:.2g}: give a larger tolerance, or a step"
            )
        errors = weak_errors(layer, V0, ts, step=step, paths=paths, key=key)
        found, error, noise = errors.bound, np.abs(errors.error).max(), errors.noise.max()
        if found <= tolerance:
            return step
        # Up to the noise an error may be smaller than it seems.
        if error > tolerance / 2:
            step *= min(0.7, max(0.1, 0.9 * (tolerance / 2 / error) ** (1 / ORDER)))
        paths = math.ceil(paths * max(1.0, (2 * noise / (tolerance / 2)) ** 2))


def _statistics(V: Float[np.ndarray, "paths times m m"]) -> Float[np.ndarray, "paths times statistics"]:
    V = V.astype(np.float64)
    norms = np.diagonal(V, axis1=-2, axis2=-1)
    rows, columns = np.triu_indices(V.shape[-1], 1)
    correlation = V[..., rows, columns] / np.sqrt(norms[..., rows] * norms[..., columns])
    rank = 2 * np.log(norms.sum(axis=-1)) - np.log((V * V).sum(axis=(-2, -1)))
    return np.concatenate([correlation, np.log(norms), rank[..., None]], axis=-1)
