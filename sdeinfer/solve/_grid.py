"""The solver's time grid, made from the times to save, and the coefficients of the SDE over it.

Tests: `tests/layers/test_over_depth.py`.
"""
# pyright: reportIncompatibleVariableOverride=false
# Diffrax declares attributes that subclasses implement as fields.

import math
from typing import NamedTuple

import diffrax
import equinox as eqx
import jax
import numpy as np
from jaxtyping import Array, Float
from numpy.typing import ArrayLike

from sdeinfer._arguments import shown
from sdeinfer._compiler import padded_size
from sdeinfer._files import InputError
from sdeinfer.covariance._matrix import is_concrete
from sdeinfer.layers import AbstractLayer, OverDepth
from sdeinfer.layers._base import limit_of, limit_on_host
from sdeinfer.terms._limit import Limit, LimitSteps

STEP = 0.05
"""Default of the longest step, in depth-time."""


class Times(eqx.Module):
    """A grid as arrays, so that one compiled solve serves many.

    `steps` ends in at least two +∞, because `GridSteps` reads beyond the last step. `saved` may end in copies of its
    last time.
    """

    steps: Float[Array | np.ndarray, " steps"]
    saved: Float[Array | np.ndarray, " times"]
    end: Float[Array | np.ndarray, ""]


class Grid(NamedTuple):
    """The times between which the solver steps, from 0 on, and those of them to save; hashable."""

    steps: tuple[float, ...]
    saved: tuple[float, ...]

    def times(self, dtype: np.dtype) -> Times:
        """The grid in the state's type, padded to 256, 1024, … steps and 16, 64, … times: few shapes are compiled."""
        steps = padded_size(len(self.steps), least=256) - len(self.steps) + 2
        saved = padded_size(len(self.saved), least=16) - len(self.saved)
        return Times(
            np.array([*self.steps, *[np.inf] * steps], dtype),
            np.array([*self.saved, *[self.saved[-1]] * saved], dtype),
            np.array(self.steps[-1], dtype),
        )


class GridSteps(diffrax.AbstractStepSizeController):
    """Step from each time of a grid, followed by +∞, to the next: `diffrax.StepTo` with the number of steps as data."""

    ts: Float[Array, " steps"]

    def wrap(self, direction):
        """The controller itself: time runs forwards."""
        return self

    def init(self, terms, t0, t1, y0, dt0, args, func, error_order):
        """The end of the first step, and the index of the time after it."""
        return self.ts[1], 2

    def adapt_step_size(self, t0, t1, y0, y1_candidate, args, y_error, error_order, controller_state):
        """The next step; every step is accepted."""
        end = self.ts[controller_state]
        return True, t1, end, False, controller_state + 1, diffrax.RESULTS.successful


def step_grid(ts: ArrayLike, step: float) -> Grid:
    """Cut [0, ts[0]], [ts[0], ts[1]], … into equal steps no longer than `step`."""
    if not all(map(is_concrete, jax.tree.leaves(ts))):
        raise InputError(
            "ts: the times must be known when the solver is compiled, got traced values; inside of jax.jit make them "
            "by NumPy, as np.linspace"
        )
    try:
        times = np.asarray(ts, np.float64)
    except (TypeError, ValueError) as error:
        raise InputError(f"ts: a non-empty list of finite times is needed, got {shown(ts)}") from error
    if times.ndim != 1 or times.size == 0 or not np.isfinite(times).all():
        raise InputError(f"ts: a non-empty list of finite times is needed, got shape {times.shape}")
    if times[0] < 0 or (np.diff(times) <= 0).any():
        raise InputError("ts: times must start at 0 or later and increase")
    if not (step > 0 and math.isfinite(step)):
        raise InputError(f"step: must be positive and finite, got {step}")
    grid, most = [0.0], 10**6  # more steps between two times are taken for a mistake
    for time in times:
        exact = (time - grid[-1]) / step
        if exact > most:
            raise InputError(f"step: {step:g} cuts the time to {time:g} into more than {most} steps")
        # A ratio that is an integer up to rounding is not rounded up.
        steps = max(math.ceil(exact - 1e-9), int(time > grid[-1]))
        grid.extend(np.linspace(grid[-1], time, steps + 1)[1:].tolist())
    if (np.diff(np.asarray(grid, np.float32)) <= 0).any():
        shortest = np.diff(grid).min()
        raise InputError(f"step: {shortest:.2g} is too short for single precision at times of {grid[-1]:g}")
    return Grid(tuple(grid), tuple(times.tolist()))


def limit_over(layer: AbstractLayer, grid: Grid) -> Limit | LimitSteps:
    """The coefficients over a grid, those of a step at its midpoint; a path has the last axis if they have two."""
    if not isinstance(layer, OverDepth):
        return limit_of(layer)
    starts, middle = _steps(grid)
    return layer.raise_if_out_of_range(_limit_steps(layer, starts, middle), middle)


def limit_over_on_host(layer: AbstractLayer, grid: Grid) -> Limit | LimitSteps:
    """As `limit_over`, of a layer with concrete parameters in their range, in NumPy arrays."""
    if not isinstance(layer, OverDepth):
        return limit_on_host(layer)
    starts, middle = _steps(grid)
    layer.check_range(middle)
    return jax.tree.map(np.asarray, _limit_steps(layer, starts, middle))


def _steps(grid: Grid) -> tuple[np.ndarray, np.ndarray]:
    """Start and midpoint of every step; a grid without steps counts as one."""
    ends = np.asarray(grid.steps)
    ends = ends if len(ends) > 1 else np.append(ends, ends)
    return ends[:-1], (ends[1:] + ends[:-1]) / 2


@jax.jit
def _limit_steps(layer: OverDepth, starts: Array, times: Array) -> LimitSteps:
    limits = jax.vmap(lambda time: layer.at(time).limit())(times)
    return LimitSteps(jax.tree.map(lambda c: c[:, None], limits), starts)
