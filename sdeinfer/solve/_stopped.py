"""Stopping times: the first time at which an eigenvalue of V leaves a range (Definition 4.1, §4.4)."""

import enum
import math

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from diffrax import AbstractAdjoint
from jaxtyping import Array, Float, Int, PRNGKeyArray
from numpy.typing import ArrayLike

from sdeinfer._files import InputError
from sdeinfer.layers import AbstractLayer
from sdeinfer.solve._grid import step_grid
from sdeinfer.solve._paths import CHECKPOINTED
from sdeinfer.solve._psd import PSDEuler, above, below
from sdeinfer.solve._simulate import check_inputs, solve_from_key

PAPERS_RANGE = (1e-4, 1e4)
"""The range of Fig. 5."""


class Reason(enum.IntEnum):
    """Why a path was stopped."""

    NOT = 0
    """It was not."""
    ABOVE = 1
    """An eigenvalue reached the upper bound."""
    BELOW = 2
    """An eigenvalue reached the lower bound."""
    EXPLODED = 3
    """Inside the range, but about to explode within the next step: a shorter step follows it further."""


class StoppedPaths(eqx.Module):
    """Paths of V_{t ∧ T}, with T the time at which an eigenvalue first left a range.

    Attributes:
        covariance: V at the saved times, shape (paths, times, m, m); from T on it stays as it was at T.
        time: T, shape (paths,); +∞ for a path that was not stopped.
        reason: why, a `Reason` for each path, shape (paths,).
    """

    covariance: Float[Array, "paths times m m"]
    time: Float[Array, " paths"]
    reason: Int[Array, " paths"]


def simulate_stopped(
    layer: AbstractLayer,
    V0: Float[Array | np.ndarray, "m m"],
    ts: ArrayLike,
    *,
    within: tuple[float, float] = PAPERS_RANGE,
    paths: int,
    step: float = 0.01,
    adjoint: AbstractAdjoint = CHECKPOINTED,
    key: PRNGKeyArray,
) -> StoppedPaths:
    """Simulate the covariance SDE up to the time at which an eigenvalue of V leaves a range (Definition 4.1).

    V is looked at after every step: what leaves the range and comes back within one is missed, so that stopping times
    are late by an amount of the order of √step. In single precision an eigenvalue below some 10⁻⁶ of the largest is
    rounding, and stops the path where `within` has a lower bound. The time has no derivative; `covariance` has those of
    `simulate`.

    Arguments:
        layer: the architecture, with its parameters.
        V0: covariance at time 0, shape (m, m).
        ts: depth-times at which to save, increasing; nothing is simulated after the last.
        within: the lowest and the highest eigenvalue, neither of them allowed itself.
        paths: how many independent paths.
        step: longest step in depth-time.
        adjoint: how Diffrax differentiates the solve.
        key: where the randomness comes from.

    Raises:
        InputError: as `simulate`, and for a range that is none.
    """
    lowest, highest = _range(within)
    layer, V0 = check_inputs(layer, V0, paths)
    solver = PSDEuler(lowest=lowest, highest=highest)
    V, time = solve_from_key(layer, V0, step_grid(ts, step), solver, adjoint, paths, key)
    return StoppedPaths(jnp.asarray(V), jnp.asarray(time), _reason(time, V[:, -1], lowest, highest))


@eqx.filter_jit
def _reason(
    time: Float[Array | np.ndarray, " paths"], V: Float[Array | np.ndarray, "paths m m"], lowest: float, highest: float
) -> Int[Array, " paths"]:
    last = jnp.moveaxis(V, 0, -1)
    conditions = [jnp.isinf(time), above(last, highest), below(last, lowest)]
    return jnp.select(conditions, [Reason.NOT, Reason.ABOVE, Reason.BELOW], Reason.EXPLODED)


def stopping_times(
    V: Float[np.ndarray, "paths times m m"], times: ArrayLike, *, within: tuple[float, float] = PAPERS_RANGE
) -> tuple[np.ndarray, np.ndarray]:
    """The stopping times of covariances that were observed, as those of `simulate_stopped`.

    Arguments:
        V: covariances of networks, or any other paths; entries that are not finite count as beyond the upper bound.
        times: when they were observed, shape (times,).
        within: the lowest and the highest eigenvalue.

    Returns:
        the first time with an eigenvalue outside, +∞ for none, and the `Reason`, each of shape (paths,).
    """
    lowest, highest = _range(within)
    V = np.asarray(V)
    finite = np.isfinite(V).all(axis=(-2, -1))
    eigenvalues = np.linalg.eigvalsh(np.where(finite[..., None, None], V, 0.0))
    too_high = ~finite | (eigenvalues[..., -1] >= highest)
    outside = too_high | (eigenvalues[..., 0] <= lowest)
    stopped, first = outside.any(axis=1), outside.argmax(axis=1)
    time = np.where(stopped, np.asarray(times, float)[first], np.inf)
    exceeded = np.take_along_axis(too_high, first[:, None], axis=1)[:, 0]
    return time, np.where(stopped, np.where(exceeded, Reason.ABOVE, Reason.BELOW), Reason.NOT)


def _range(within: tuple[float, float]) -> tuple[float, float]:
    lowest, highest = map(float, within)
    if not 0 <= lowest < highest < math.inf:
        raise InputError(f"within: 0 ≤ lowest < highest < ∞ is needed, got {lowest:g} and {highest:g}")
    return lowest, highest
