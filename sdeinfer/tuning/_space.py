"""The parameters that tuning chooses: their coordinates on the real line, and the coefficients of the SDE at them.

Tests: `tests/tuning/test_problem.py`.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from diffrax import LinearInterpolation
from jaxtyping import Array, Bool, Float

from sdeinfer.infer._expansion import points_around, slopes
from sdeinfer.layers import AbstractLayer, Limit, OverDepth
from sdeinfer.layers._over_depth import Profile
from sdeinfer.parameters import BIJECTIONS, SLOPES

BOX = {"logit": (0.005, 0.999), "log": (0.02, 50.0), "identity": (-10.0, 10.0)}
"""Smallest and largest value of a free parameter, by its bijection."""

START = {"logit": 0.3, "log": 1.0, "identity": 0.0}
"""Value at which a free parameter starts, by its bijection."""


@dataclasses.dataclass(frozen=True)
class Free:
    """A free coordinate of the layer, or several with one value, as `strength`; with several knots, over depth."""

    name: str
    members: tuple[str, ...]
    bijection: str
    low: float
    high: float
    knots: int = 1

    def from_real(self, u: Any) -> Any:
        return BIJECTIONS[self.bijection].from_real(jnp if isinstance(u, jax.Array) else np, u)

    def to_real(self, value: float) -> float:
        return float(BIJECTIONS[self.bijection].to_real(np, np.float64(value)))


@dataclasses.dataclass(frozen=True)
class Space:
    """The free coordinates of a layer, and which parameters are fixed functions; hashable, for compiled programs."""

    kind: AbstractLayer
    free: tuple[Free, ...]
    profiled: tuple[str, ...] = ()

    @property
    def names(self) -> list[str]:
        """One name per coordinate, with the knot's number where there are several."""
        return [
            parameter.name if parameter.knots == 1 else f"{parameter.name}[{knot}]"
            for parameter in self.free
            for knot in range(parameter.knots)
        ]

    @property
    def over_depth(self) -> bool:
        return bool(self.profiled) or any(parameter.knots > 1 for parameter in self.free)

    def bounds(self) -> Float[np.ndarray, "coordinates 2"]:
        ends = [
            (parameter.to_real(parameter.low), parameter.to_real(parameter.high))
            for parameter in self.free
            for _ in range(parameter.knots)
        ]
        return np.array(ends).reshape(-1, 2)

    def at_end(self, u: Float[np.ndarray, " coordinates"]) -> Bool[np.ndarray, " coordinates"]:
        """Whether each coordinate is at an end of its box, up to 10⁻⁶ of its width."""
        low, high = self.bounds().T
        return np.minimum(u - low, high - u) < 1e-6 * (high - low)

    def start(self) -> Float[np.ndarray, " coordinates"]:
        values = [
            (parameter, min(max(START[parameter.bijection], parameter.low), parameter.high)) for parameter in self.free
        ]
        return np.array([parameter.to_real(value) for parameter, value in values for _ in range(parameter.knots)])

    def values(self, u: Float[Any, " coordinates"]) -> dict[str, Any]:
        """The free values by name: a scalar, or one value per knot."""
        by_name, offset = {}, 0
        for parameter in self.free:
            at_knots = parameter.from_real(u[offset : offset + parameter.knots])
            by_name[parameter.name] = at_knots[0] if parameter.knots == 1 else at_knots
            offset += parameter.knots
        return by_name

    def mean_of(self, name: str) -> Float[np.ndarray, " coordinates"]:
        """Weights of the free values in the mean over depth of one of them."""
        weights = []
        for parameter in self.free:
            shares = np.ones(parameter.knots)
            shares[[0, -1]] = 0.5 if parameter.knots > 1 else 1.0
            weights.append(shares / shares.sum() * (parameter.name == name))
        return np.concatenate(weights)

    def slopes(self, u: Float[np.ndarray, " coordinates"]) -> Float[np.ndarray, " coordinates"]:
        """Derivative of each free value by its coordinate."""
        points = [np.hstack(list(self.values(point).values())) for point in points_around(u)]
        return np.diagonal(slopes(np.array(points)))

    def layer(self, u: Float[Any, " coordinates"], fixed: Mapping[str, Any], time: Any) -> AbstractLayer:
        """The layer at free coordinates, whose depth-time ends at `time`."""
        free_values = self.values(u)
        values = {
            member: free_values[parameter.name] for parameter in self.free for member in parameter.members
        } | dict(fixed)
        profiles: dict[str, Profile] = {
            member: LinearInterpolation(jnp.linspace(0.0, time, parameter.knots), free_values[parameter.name])
            for parameter in self.free
            for member in parameter.members
            if parameter.knots > 1
        }
        profiles |= {name: fixed[name] for name in self.profiled}
        single = {name: x for name, x in values.items() if name not in profiles}
        declared = self.kind.coordinates.declared
        parameters = _parameters(self.kind, single | {name: START[declared[name].bijection] for name in profiles})
        layer = self.kind.with_parameters(parameters)
        return OverDepth(layer, **profiles) if profiles else layer

    def layer_slopes(
        self, u: Float[np.ndarray, " coordinates"], fixed: Mapping[str, Any], time: float
    ) -> AbstractLayer:
        """Derivatives of the layer by the free coordinates: a layer whose arrays have a leading axis of these."""
        return _layer_slopes(self, jnp.asarray(u, float), dict(fixed), time)


@functools.partial(jax.jit, static_argnums=0)
def _layer_slopes(space: Space, u: Array, fixed: dict[str, Any], time: Array) -> AbstractLayer:
    return jax.vmap(lambda v: jax.jvp(lambda u: space.layer(u, fixed, time), (u,), (v,))[1])(jnp.eye(len(u)))


@functools.partial(jax.jit, static_argnums=0)
def coefficients(
    space: Space,
    u: Float[Array, " coordinates"],
    fixed: dict[str, Any],
    middle: Float[Array, " intervals"],
    time: Float[Array, ""],
) -> tuple[Limit, Limit]:
    """Coefficients of the SDE over unit time, d/n times those of the layer, and their derivatives by u.

    They have the shape (intervals, 1), one value for each midpoint of an interval; derivatives a further axis first.
    """

    def limits(u: Float[Array, " coordinates"]) -> Limit:
        layer = space.layer(u, fixed, time)
        limit = jax.vmap(lambda t: layer.at(t * time).limit())(middle)
        return jax.tree.map(lambda c: c[:, None] * time, limit)

    slopes = jax.vmap(lambda direction: jax.jvp(limits, (u,), (direction,))[1])(jnp.eye(len(u), dtype=u.dtype))
    return limits(u), slopes


def _parameters(kind: AbstractLayer, values: Mapping[str, Any]) -> dict[str, Any]:
    """The layer's parameters from values of parameters and of sampled coordinates."""
    by_name = {}
    for parameters, sampled, rule in kind.coordinates.rules:
        if all(name in values for name in parameters):
            by_name |= {name: values[name] for name in parameters}
        elif rule is SLOPES:
            (plus, minus), (gap, mean) = parameters, sampled
            middle = values.get(mean, 0.0)
            middle = values[plus] - values[gap] / 2 if plus in values else middle
            middle = values[minus] + values[gap] / 2 if minus in values else middle
            by_name |= dict(zip(parameters, SLOPES.from_sampled(values[gap], middle), strict=True))
        elif rule is not None:
            by_name |= dict(zip(parameters, rule.from_sampled(*(values[name] for name in sampled)), strict=True))
    return by_name
