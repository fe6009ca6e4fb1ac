"""The parameters that tuning chooses: their coordinates on the real line, and the coefficients of the SDE at them."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from diffrax import LinearInterpolation
from jaxtyping import Array, Bool, Float

from sdeinfer.layers import AbstractLayer, Architecture, Limit, OverDepth, Profile
from sdeinfer.parameters import BIJECTIONS, SLOPES

DEPTH = "depth"
"""Name of the depth, where it is chosen as well."""

BOX = {"logit": (0.005, 0.999), "log": (0.02, 50.0), "identity": (-10.0, 10.0)}
"""Smallest and largest value of a free parameter, by its bijection."""

BOX_OF_STRENGTH = (1e-4, 50.0)
"""That of a strength of blocks: it compares with the size of the stream, that of embeddings, 0.02 in many models."""

END = 1e-6
"""Distance from an end of its box, over the width of the box, at which a coordinate is at this end."""

START = {"logit": 0.3, "log": 1.0, "identity": 0.0}
"""Value at which a free parameter starts, by its bijection."""


@dataclasses.dataclass(frozen=True)
class Free:
    """A free coordinate.

    Attributes:
        name: name of the sampled coordinate, `gamma`, `tau0`, `c_gap`, …, or `depth`; or a name without that of its
            part, as `strength`, of several coordinates with one value.
        members: the coordinates; none for the depth.
        bijection: name of its map to the real line.
        low: smallest value.
        high: largest value.
        start: value at which the search starts.
        knots: 1, or the number of values over depth, equally spaced from 0 to the end and linear in between.
    """

    name: str
    members: tuple[str, ...]
    bijection: str
    low: float
    high: float
    start: float
    knots: int = 1

    def from_real(self, u: Any) -> Any:
        """The value at a coordinate."""
        return BIJECTIONS[self.bijection].from_real(jnp if isinstance(u, jax.Array) else np, u)

    def to_real(self, value: float) -> float:
        """The coordinate of a value."""
        return float(BIJECTIONS[self.bijection].to_real(np, np.float64(value)))


@dataclasses.dataclass(frozen=True)
class Space:
    """The free coordinates of a layer, and which of the others are fixed; hashable, for compiled programs.

    Attributes:
        kind: the kind of layer.
        free: the free coordinates.
        drawn: names of fixed parameters that have one value per posterior draw.
        profiled: names of fixed parameters that are functions of depth-time.
    """

    kind: Architecture
    free: tuple[Free, ...]
    drawn: tuple[str, ...] = ()
    profiled: tuple[str, ...] = ()

    @property
    def names(self) -> list[str]:
        """One name per coordinate, with the knot's number where there are several."""
        return [
            each.name if each.knots == 1 else f"{each.name}[{knot}]" for each in self.free for knot in range(each.knots)
        ]

    @property
    def over_depth(self) -> bool:
        """Whether a parameter changes with depth."""
        return bool(self.profiled) or any(each.knots > 1 for each in self.free)

    def bounds(self) -> Float[np.ndarray, "coordinates 2"]:
        """Lowest and highest coordinate."""
        ends = [(each.to_real(each.low), each.to_real(each.high)) for each in self.free for _ in range(each.knots)]
        return np.array(ends).reshape(-1, 2)

    def at_end(self, u: Float[np.ndarray, " coordinates"]) -> Bool[np.ndarray, " coordinates"]:
        """Whether each coordinate is at an end of its box."""
        low, high = self.bounds().T
        return np.minimum(u - low, high - u) < END * (high - low)

    def start(self) -> Float[np.ndarray, " coordinates"]:
        """The coordinates at which the search starts."""
        return np.array([each.to_real(each.start) for each in self.free for _ in range(each.knots)])

    def values(self, u: Float[Any, " coordinates"]) -> dict[str, Any]:
        """The free values by name: a scalar, or one value per knot."""
        found, first = {}, 0
        for each in self.free:
            own = each.from_real(u[first : first + each.knots])
            found[each.name] = own[0] if each.knots == 1 else own
            first += each.knots
        return found

    def mean_of(self, name: str) -> Float[np.ndarray, " coordinates"]:
        """Weights of the free values in the mean over depth of one of them."""
        weights = []
        for each in self.free:
            own = np.ones(each.knots)
            own[[0, -1]] = 0.5 if each.knots > 1 else 1.0
            weights.append(own / own.sum() * (each.name == name))
        return np.concatenate(weights)

    def slopes(self, u: Float[np.ndarray, " coordinates"]) -> Float[np.ndarray, " coordinates"]:
        """Derivative of each free value by its coordinate."""
        spread = 1e-6
        high, low = (np.concatenate([np.atleast_1d(x) for x in self.values(u + s).values()]) for s in (spread, -spread))
        return (high - low) / (2 * spread)

    def layer(self, u: Float[Any, " coordinates"], fixed: Mapping[str, Any], time: Any) -> AbstractLayer:
        """The layer at free coordinates, whose depth-time ends at `time`."""
        own = self.values(u)
        values = {member: own[each.name] for each in self.free for member in each.members} | dict(fixed)
        profiles: dict[str, Profile] = {
            member: LinearInterpolation(jnp.linspace(0.0, time, each.knots), own[each.name])
            for each in self.free
            for member in each.members
            if each.knots > 1
        }
        profiles |= {name: fixed[name] for name in self.profiled}
        single = {name: x for name, x in values.items() if name not in profiles}
        declared = self.kind.coordinates.declared
        parameters = _parameters(self.kind, single | {name: START[declared[name].bijection] for name in profiles})
        layer = self.kind.layer(**parameters)
        return OverDepth(layer, **profiles) if profiles else layer

    def layer_slopes(
        self, u: Float[np.ndarray, " coordinates"], fixed: Mapping[str, Any], time: float
    ) -> AbstractLayer:
        """Derivatives of the layer by the free coordinates: a layer whose arrays have a leading axis of these."""
        return _layer_slopes(self, jnp.asarray(u, float), dict(fixed), time)

    def time(self, u: Float[Any, " coordinates"], depth: Any, width: Any) -> Any:
        """Depth-time d/n."""
        return self.values(u).get(DEPTH, depth) / width


@functools.partial(jax.jit, static_argnums=0)
def _layer_slopes(space: Space, u: Array, fixed: dict[str, Any], time: Array) -> AbstractLayer:
    return jax.vmap(lambda v: jax.jvp(lambda u: space.layer(u, fixed, time), (u,), (v,))[1])(jnp.eye(len(u)))


def _parameters(kind: Architecture, values: Mapping[str, Any]) -> dict[str, Any]:
    """The layer's parameters from values of parameters and of sampled coordinates."""
    found = {}
    for parameters, sampled, rule in kind.coordinates.rules:
        if all(name in values for name in parameters):
            found |= {name: values[name] for name in parameters}
        elif rule is SLOPES:
            (plus, minus), (gap, mean) = parameters, sampled
            middle = values.get(mean, 0.0)
            middle = values[plus] - values[gap] / 2 if plus in values else middle
            middle = values[minus] + values[gap] / 2 if minus in values else middle
            found |= dict(zip(parameters, SLOPES.from_sampled(values[gap], middle), strict=True))
        elif rule is not None:
            found |= dict(zip(parameters, rule.from_sampled(*(values[name] for name in sampled)), strict=True))
    return found


@functools.partial(jax.jit, static_argnums=0)
def coefficients(
    space: Space,
    u: Float[Array, " coordinates"],
    fixed: dict[str, Any],
    middle: Float[Array, " intervals"],
    depth: Array,
    width: Array,
) -> tuple[Limit, Limit]:
    """Coefficients of the SDE over unit time, T = d/n times those of the layer, and their derivatives by u.

    Arguments:
        space: the free coordinates.
        u: their values.
        fixed: values of the other parameters: numbers, functions of depth-time, or one value per posterior draw.
        middle: midpoints of intervals of unit time; one interval for layers that do not change with depth.
        depth: d, where it is not free.
        width: n.

    Returns:
        a `Limit` with coefficients of shape (intervals, draws), and one with a leading axis of coordinates.
    """
    drawn = {name: fixed[name] for name in space.drawn}
    others = {name: value for name, value in fixed.items() if name not in drawn}

    def limits(u: Float[Array, " coordinates"]) -> Limit:
        time = space.time(u, depth, width)

        def of_draw(own: dict[str, Any]) -> Limit:
            layer = space.layer(u, others | own, time)
            return jax.vmap(lambda t: layer.at(t * time).limit())(middle)

        found = jax.vmap(of_draw, out_axes=1)(drawn) if drawn else jax.tree.map(lambda c: c[:, None], of_draw({}))
        return jax.tree.map(lambda c: c * time, found)

    slopes = jax.vmap(lambda direction: jax.jvp(limits, (u,), (direction,))[1])(jnp.eye(len(u), dtype=u.dtype))
    return limits(u), slopes
