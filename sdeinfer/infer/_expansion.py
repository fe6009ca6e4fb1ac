"""Functions of a few unconstrained coordinates about a point: slopes and curvatures by differences, and a minimum.

Coordinates have a scale of about 1, that of their priors. Tests: `tests/infer/test_expansion.py`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

STEP = 1e-5
"""Step of first derivatives in double precision: rounding and third derivatives change them by 1e-10 relatively."""

SECOND_STEP = 1e-4
"""Step of second derivatives, and of the derivatives of a layer's coordinates in those of the sites."""


def points_around(x: Float[Any, " coordinates"], step: float = STEP) -> Float[np.ndarray, "points coordinates"]:
    """A point, the points one step above it in each coordinate, and those below it."""
    x = np.asarray(x, float)
    steps = step * np.eye(len(x))
    return np.concatenate([x[None], x + steps, x - steps])


def slopes(values: Float[np.ndarray, "points ..."], step: float = STEP) -> Float[np.ndarray, "... coordinates"]:
    """Derivatives of the values at the points of `points_around`."""
    above, below = np.split(values[1:], 2)
    return np.moveaxis((above - below) / (2 * step), 0, -1)


def curvature(
    gradient: Callable[[np.ndarray], np.ndarray], x: Float[np.ndarray, " coordinates"], step: float = SECOND_STEP
) -> Float[np.ndarray, "coordinates coordinates"]:
    """The Hessian by differences of a gradient."""
    changes = np.array([gradient(x + along) - gradient(x - along) for along in step * np.eye(len(x))])
    return (changes + changes.T) / (4 * step)


class Expansion(NamedTuple):
    """A function's value, gradient and Hessian at a point."""

    value: float
    slope: Float[np.ndarray, " coordinates"]
    curvature: Float[np.ndarray, "coordinates coordinates"]


def expansion(
    potentials: Callable[[Float[np.ndarray, "points coordinates"]], Float[np.ndarray, " points"]],
    x: Float[np.ndarray, " coordinates"],
) -> Expansion:
    """Value, gradient and Hessian of a function of many points at once."""
    around = points_around(x, SECOND_STEP)
    count = len(x)
    steps = around[1:] - x
    pairs = (x + steps[:, None] + steps).reshape(-1, count)
    values = potentials(np.concatenate([around, pairs]))
    second = np.array(values[len(around) :]).reshape(2, count, 2, count)
    hessian = (second[0, :, 0] - second[0, :, 1] - second[1, :, 0] + second[1, :, 1]) / (4 * SECOND_STEP**2)
    return Expansion(values[0], slopes(np.asarray(values[: len(around)]), SECOND_STEP), hessian)


def minimum(
    potentials: Callable[[Float[np.ndarray, "points coordinates"]], Float[np.ndarray, " points"]],
    x: Float[np.ndarray, " coordinates"],
    *,
    close: float,
) -> tuple[Float[np.ndarray, " coordinates"], Expansion]:
    """The minimum by Newton steps until one gains less than `close`², and the expansion there.

    A call at many points takes little longer than at one: with a Hessian in each of them, seven calls do for what are
    24 with gradients alone.
    """
    expanded = expansion(potentials, x)
    for _ in range(50):
        values, axes = np.linalg.eigh(expanded.curvature)
        step = -axes @ (axes.T @ expanded.slope / np.maximum(abs(values), 1.0))
        while -step @ expanded.slope > close**2:
            trial = expansion(potentials, x + step)
            if trial.value < expanded.value:
                break
            step = step / 2
        else:
            break
        x, expanded = x + step, trial
    return x, expanded
