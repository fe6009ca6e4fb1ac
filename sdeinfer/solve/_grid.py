"""The steps of a solve, from the times at which its paths are kept."""

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from sdeinfer._files import InputError
from sdeinfer.covariance import is_concrete

MOST_STEPS = 10**6
"""Between two saved times: more is a slip of the user's."""


class Grid(NamedTuple):
    """Where the solver steps to, and which of these times are kept; hashable, since each is compiled for.

    Attributes:
        steps: the times between which the solver steps, from 0 on: one more than there are steps.
        saved: the times to save, each of them in `steps`.
    """

    steps: tuple[float, ...]
    saved: tuple[float, ...]


def step_grid(ts: ArrayLike, step: float) -> Grid:
    """Cut [0, ts[0]], [ts[0], ts[1]], … into equal steps no longer than `step`.

    Raises:
        InputError: for times or a step that make no grid.
    """
    if not is_concrete(ts):
        raise InputError("ts: the times must be known when the solver is compiled, got traced values")
    times = np.asarray(ts, np.float64)
    if times.ndim != 1 or times.size == 0 or not np.isfinite(times).all():
        raise InputError(f"ts: a non-empty list of finite times is needed, got shape {times.shape}")
    if times[0] < 0 or (np.diff(times) <= 0).any():
        raise InputError("ts: times must start at 0 or later and increase")
    if not (step > 0 and math.isfinite(step)):
        raise InputError(f"step: must be positive and finite, got {step}")
    grid = [0.0]
    for time in times:
        exact = (time - grid[-1]) / step
        if exact > MOST_STEPS:
            raise InputError(f"step: {step:g} cuts the time to {time:g} into more than {MOST_STEPS} steps")
        # A ratio that is whole but for rounding is not rounded up.
        steps = max(math.ceil(exact - 1e-9), int(time > grid[-1]))
        grid.extend(np.linspace(grid[-1], time, steps + 1)[1:].tolist())
    if (np.diff(np.asarray(grid, np.float32)) <= 0).any():
        shortest = np.diff(grid).min()
        raise InputError(f"step: {shortest:.2g} is too short at times of {grid[-1]:g}: single precision sees none")
    return Grid(tuple(grid), tuple(times.tolist()))
