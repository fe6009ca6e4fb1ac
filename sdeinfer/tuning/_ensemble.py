"""Statistics of many paths and their derivatives along some directions, block by block, on common random numbers."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, PRNGKeyArray
from scipy.linalg import block_diag

from sdeinfer._threads import in_threads
from sdeinfer.covariance import factor_on_host
from sdeinfer.criteria import AbstractStatistic, Ensemble, evaluate
from sdeinfer.solve import (
    BrownianSteps,
    Grid,
    PSDSplitting,
    Times,
    block_size,
    solve_paths,
)
from sdeinfer.terms import Limit, LimitSteps

SAVED_ENTRIES = 2**22
"""Largest number of covariance entries that a block saves."""


class Sample(NamedTuple):
    """Statistics of many paths.

    Attributes:
        values: the value of each statistic, shape (statistics, paths).
        slopes: their derivatives, shape (statistics, directions, paths).
        exploded: whether each path exploded, shape (paths,).
    """

    values: Float[np.ndarray, "statistics paths"]
    slopes: Float[np.ndarray, "statistics directions paths"]
    exploded: Bool[np.ndarray, " paths"]


def sample_statistics(
    statistics: tuple[AbstractStatistic, ...],
    limit: LimitSteps,
    slopes: Limit,
    V0: Float[np.ndarray, "m m"],
    grid: Grid,
    *,
    paths: int,
    key: PRNGKeyArray,
) -> Sample:
    """Simulate paths and evaluate statistics, in memory that does not grow with the number of paths.

    Arguments:
        statistics: the statistics.
        limit: coefficients of each interval and, in their last axis, of one path or all.
        slopes: derivatives of the coefficients, with a leading axis of directions.
        V0: covariance at time 0.
        grid: the solver's steps, and the last time.
        paths: number of paths.
        key: PRNG key.
    """
    values = np.empty((len(statistics), paths), V0.dtype)
    along = np.empty((len(statistics), len(slopes.linear_noise), paths), V0.dtype)
    exploded = np.zeros(paths, bool)
    for tangent, mine in by_tangent(statistics).items():
        found = _blocks(mine, limit, slopes, V0, grid, tangent, paths=paths, key=key)
        places = [statistics.index(each) for each in mine]
        values[places], along[places] = found.values, found.slopes
        exploded |= found.exploded
    return Sample(values, along, exploded)


def by_tangent(statistics: tuple[AbstractStatistic, ...]) -> dict[Any, tuple[AbstractStatistic, ...]]:
    """The statistics that share paths: those of one tangent; those without one are with the first."""
    tangents = list(dict.fromkeys(each.directions for each in statistics if each.directions is not None)) or [None]
    return {
        tangent: tuple(
            each for each in statistics if (tangents[0] if each.directions is None else each.directions) == tangent
        )
        for tangent in tangents
    }


def _blocks(statistics, limit: LimitSteps, slopes: Limit, V0, grid: Grid, tangent, *, paths: int, key) -> Sample:
    dtype = V0.dtype
    every = any(each.every_step for each in statistics)
    if every:
        grid = Grid(grid.steps, grid.steps[1:])
    joint = V0 if tangent is None else np.asarray(block_diag(V0, tangent_at(tangent, len(V0), dtype)))
    start = factor_on_host(joint)
    saved = len(grid.saved) * start.size
    size = max(1, min(block_size(paths, start.size), SAVED_ENTRIES // saved))
    times = grid.times(dtype, padded=True)
    if not every:
        times = Times(times.steps, times.saved[:1], times.end)
    limit = limit.padded(dtype) if len(limit.starts) > 1 else jax.tree.map(lambda c: np.asarray(c, dtype), limit)
    count = len(limit.starts)
    # The last interval is repeated; intervals are the second axis.
    slopes = jax.tree.map(
        lambda c: np.pad(np.asarray(c, dtype), [(0, 0), (0, count - c.shape[1]), (0, 0)], "edge"), slopes
    )
    own = limit.limit.linear_noise.shape[-1] > 1
    solver = PSDSplitting(tangents=tangent is not None)
    values = np.empty((len(statistics), paths), dtype)
    along = np.empty((len(statistics), slopes.linear_noise.shape[0], paths), dtype)
    exploded = np.empty(paths, bool)

    def solve(number: int) -> None:
        members = np.minimum(np.arange(number * size, (number + 1) * size), paths - 1)
        kept = min(size, paths - number * size)
        here, there = (jax.tree.map(lambda c: c[..., members] if own else c, x) for x in (limit.limit, slopes))
        block = _solve_block(
            statistics, solver, LimitSteps(here, limit.starts), there, start, V0, times, key, np.uint32(number),
            size=size, times_saved=len(grid.saved),
        )  # fmt: skip
        block, chosen = [np.asarray(x) for x in block], members[:kept]
        values[:, chosen], along[:, :, chosen], exploded[chosen] = (x[..., :kept] for x in block)

    in_threads(solve, range(-(-paths // size)))
    return Sample(values, along, exploded)


def tangent_at(tangent: int | str, tokens: int, dtype: np.dtype) -> Float[np.ndarray, "m m"]:
    """D with tr D = 1 of a tangent at a token, or at all."""
    if tangent == "all":
        return np.eye(tokens, dtype=dtype) / tokens
    return np.diag((np.arange(tokens) == tangent).astype(dtype))


@functools.partial(jax.jit, static_argnums=(0,), static_argnames=("size", "times_saved"))
def _solve_block(statistics, solver, limit: LimitSteps, slopes, start, V0, times, key, number, *, size, times_saved):
    """Values of the statistics of one block of paths, their derivatives, and whether paths exploded."""
    tokens = len(V0)
    shape = jax.ShapeDtypeStruct((*limit.normals(len(start)), size), start.dtype)
    brownian = BrownianSteps(shape=shape, key=key, block=number)
    X0 = jnp.broadcast_to(start[..., None], (*start.shape, size))

    def values(coefficients: Limit) -> tuple[Array, Array]:
        steps = LimitSteps(coefficients, limit.starts)
        S, stopped = solve_paths(steps, X0, times, brownian, solver=solver)
        S = jnp.moveaxis(S[:times_saved], -1, 0)
        paths = Ensemble(
            initial=V0,
            covariance=S[..., :tokens, :tokens],
            tangent=S[..., tokens:, tokens:] if solver.tangents else None,
            exploded=jnp.isfinite(stopped),
        )
        return evaluate(statistics, paths), paths.exploded

    def along(direction: Limit) -> tuple[Array, Array, Array]:
        return jax.jvp(values, (limit.limit,), (direction,), has_aux=True)

    found, slope, exploded = jax.vmap(along, out_axes=(None, 1, None))(slopes)
    return found, slope, exploded
