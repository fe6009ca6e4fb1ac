"""Stopping times: the first time at which an eigenvalue of V leaves a range (§4.4, Fig. 5)."""

import enum
import math

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PRNGKeyArray
from numpy.typing import ArrayLike

from sdeinfer._arguments import checked
from sdeinfer._files import InputError
from sdeinfer._progress import phase, with_progress_line
from sdeinfer.layers import AbstractLayer
from sdeinfer.solve._grid import step_grid
from sdeinfer.solve._psd import PSDSplitting, above, below
from sdeinfer.solve._simulate import check_inputs, solve_from_key

PAPERS_RANGE = (1e-4, 1e4)
"""Lower and upper bound on the eigenvalues of V in Fig. 5."""


class Reason(enum.IntEnum):
    """Why a path was stopped."""

    NOT = 0
    """The path was not stopped."""
    ABOVE = 1
    """An eigenvalue reached the upper bound."""
    BELOW = 2
    """An eigenvalue reached the lower bound."""
    EXPLODED = 3
    """The eigenvalues are inside the range, but the next step would explode; shorter steps follow the path further."""


class StoppedPaths(eqx.Module):
    """Paths of V_{t ∧ T}, with T the time at which an eigenvalue first left a range.

    Attributes:
        covariance: V at the saved times, shape (paths, times, m, m); constant from T on.
        time: T, shape (paths,); +∞ for a path that was not stopped.
        reason: the `Reason` of each path, shape (paths,).
    """

    covariance: Float[Array, "paths times m m"]
    time: Float[Array, " paths"]
    reason: Int[Array, " paths"]


@checked
@with_progress_line
def simulate_stopped(
    layer: AbstractLayer,
    V0: Float[Array | np.ndarray, "m m"],
    ts: ArrayLike,
    *,
    within: tuple[float, float] = PAPERS_RANGE,
    paths: int,
    step: float = 0.01,
    progress: bool = True,
    key: PRNGKeyArray,
) -> StoppedPaths:
    """Simulate the covariance SDE up to the time at which an eigenvalue of V leaves a range (§4.4, Fig. 5).

    Definition 4.1 stops where a norm of V reaches r: for a definite V, `within=(0, r)` does so with the spectral norm.

    V is checked after every step: an excursion within one step is missed, so that stopping times are late by O(√step).
    In single precision an eigenvalue below about 10⁻⁶ of the largest is rounding, and stops the path at any lower
    bound. The time has no derivative; `covariance` has those of `simulate`.

    Arguments:
        layer: the architecture, with its parameters.
        V0: covariance at time 0, shape (m, m).
        ts: depth-times at which to save, increasing; nothing is simulated after the last.
        within: exclusive lower and upper bound on the eigenvalues.
        paths: number of independent paths.
        step: longest step in depth-time.
        progress: whether a line on a terminal or in a notebook says what is done, after two seconds.
        key: PRNG key.

    Raises:
        InputError: as `simulate`, and for bounds that are not 0 ≤ lower < upper < ∞.
    """
    del progress  # for `with_progress_line`
    phase("simulating")
    lowest, highest = bounds_of(within)
    layer, V0 = check_inputs(layer, V0, paths)
    # Data of the compiled program, so that it serves every range.
    solver = PSDSplitting(np.asarray(lowest, V0.dtype), np.asarray(highest, V0.dtype))
    V, time = solve_from_key(layer, V0, step_grid(ts, step), solver, paths, key)
    return StoppedPaths(jnp.asarray(V), jnp.asarray(time), reason_of(time, V[:, -1], lowest, highest))


@eqx.filter_jit
def reason_of(
    time: Float[Array | np.ndarray, " paths"], V: Float[Array | np.ndarray, "paths m m"], lowest: float, highest: float
) -> Int[Array, " paths"]:
    """The `Reason` of each path, from its stopping time and its last V."""
    last = jnp.moveaxis(V, 0, -1)
    conditions = [jnp.isinf(time), above(last, highest), below(last, lowest)]
    return jnp.select(conditions, [Reason.NOT, Reason.ABOVE, Reason.BELOW], Reason.EXPLODED)


def stopping_times(
    V: Float[np.ndarray, "paths times m m"], times: ArrayLike, *, within: tuple[float, float] = PAPERS_RANGE
) -> tuple[np.ndarray, np.ndarray]:
    """The stopping times of observed covariances, as defined in `simulate_stopped`.

    Arguments:
        V: covariances of networks, or any other paths; non-finite entries count as above the upper bound.
        times: depth-times of the observations, shape (times,).
        within: exclusive lower and upper bound on the eigenvalues.

    Returns:
        the first time with an eigenvalue outside, +∞ if there is none, and the `Reason`; each of shape (paths,).
    """
    lowest, highest = bounds_of(within)
    V = np.asarray(V)
    finite = np.isfinite(V).all(axis=(-2, -1))
    eigenvalues = np.linalg.eigvalsh(np.where(finite[..., None, None], V, 0.0))
    too_high = ~finite | (eigenvalues[..., -1] >= highest)
    outside = too_high | (eigenvalues[..., 0] <= lowest)
    stopped, first = outside.any(axis=1), outside.argmax(axis=1)
    time = np.where(stopped, np.asarray(times, float)[first], np.inf)
    exceeded = np.take_along_axis(too_high, first[:, None], axis=1)[:, 0]
    return time, np.where(stopped, np.where(exceeded, Reason.ABOVE, Reason.BELOW), Reason.NOT)


def bounds_of(within: tuple[float, float]) -> tuple[float, float]:
    """The bounds on the eigenvalues, checked."""
    lowest, highest = map(float, within)
    if not 0 <= lowest < highest < math.inf:
        raise InputError(f"within: 0 ≤ lowest < highest < ∞ is needed, got {lowest:g} and {highest:g}")
    return lowest, highest
