"""The coefficients of a solve: those of a layer, or of each step if its parameters change with depth."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from sdeinfer._compiler import RUN_ONCE
from sdeinfer.layers import AbstractLayer, OverDepth, limit_of, limit_on_host
from sdeinfer.solve._grid import Grid
from sdeinfer.terms import Limit, LimitSteps


def limit_over(layer: AbstractLayer, grid: Grid) -> Limit | LimitSteps:
    """The coefficients over a grid, those of a step at its midpoint; a path has the last axis if they have two."""
    if not isinstance(layer, OverDepth):
        return limit_of(layer)
    starts, middle = _steps(grid)
    limits = jax.vmap(lambda time: layer.at(time).limit())(jnp.asarray(middle, float))
    return LimitSteps(jax.tree.map(lambda c: c[:, None], limits), jnp.asarray(starts, float))


def limit_over_on_host(layer: AbstractLayer, grid: Grid) -> Limit | LimitSteps:
    """As `limit_over`, of a layer with concrete parameters, in NumPy arrays.

    Raises:
        InputError: for a profile that leaves its parameter's range.
    """
    if not isinstance(layer, OverDepth):
        return limit_on_host(layer)
    starts, middle = _steps(grid)
    layer.check_range(middle)
    limits = jax.tree.map(np.asarray, _limits(layer, jnp.asarray(middle, float)))
    return LimitSteps(jax.tree.map(lambda c: c[:, None], limits), starts)


def _steps(grid: Grid) -> tuple[np.ndarray, np.ndarray]:
    """Start and midpoint of every step; a grid without steps counts as one."""
    ends = np.asarray(grid.steps)
    ends = ends if len(ends) > 1 else np.append(ends, ends)
    return ends[:-1], (ends[1:] + ends[:-1]) / 2


@functools.partial(jax.jit, compiler_options=RUN_ONCE)
def _limits(layer: OverDepth, times: jax.Array) -> Limit:
    return jax.vmap(lambda time: layer.at(time).limit())(times)
