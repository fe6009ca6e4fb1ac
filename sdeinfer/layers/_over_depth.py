"""Layers whose parameters change with depth."""

import inspect
import types
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, ArrayLike, Float, Int

from sdeinfer._arguments import checked
from sdeinfer._files import InputError
from sdeinfer.layers._base import AbstractLayer, parameter_cell, raise_if_out_of_range, value_text
from sdeinfer.layers._stack import AbstractStack
from sdeinfer.parameters import Parameter

type Profile = Callable[[Any], Any] | eqx.Module
"""A function of depth-time t, or a path of Diffrax, such as `diffrax.LinearInterpolation(ts, ys)`."""


def is_profile(value: Any) -> bool:
    """Whether a value is a function of depth-time, or a path of Diffrax."""
    return callable(value) or hasattr(value, "evaluate")


class FunctionModule(eqx.Module):
    """A function as a module whose leaves are arrays; programs are compiled for the rest of it."""

    arrays: Any
    static: Any = eqx.field(static=True)

    def __call__(self, time: Any) -> Any:
        """The function's value at a depth-time, or another argument."""
        profile = eqx.combine(self.arrays, self.static)
        return profile.evaluate(time) if hasattr(profile, "evaluate") else profile(time)


def as_module(profile: Profile) -> FunctionModule:
    """A profile, or any other function of one argument, as a module whose leaves are arrays."""
    if isinstance(profile, FunctionModule):
        return profile
    if inspect.isfunction(profile) and any(isinstance(x, Tracer) for x in jax.tree.leaves(_closed_over(profile))):
        profile = _Closure(_closed_over(profile), _with_cells(profile, [None] * len(_closed_over(profile))))
    arrays, static = eqx.partition(profile, eqx.is_array)
    return FunctionModule(arrays, static)


class _Closure(eqx.Module):
    """A function that closes over traced values, which are leaves here: without them it would pass for a constant."""

    values: tuple[Any, ...]
    function: Any = eqx.field(static=True)

    def __call__(self, time: Any) -> Any:
        return _with_cells(self.function, self.values)(time)


def _closed_over(function: types.FunctionType) -> tuple[Any, ...]:
    return tuple(cell.cell_contents for cell in function.__closure__ or ())


def _with_cells(function: types.FunctionType, values: Sequence[Any]) -> types.FunctionType:
    """A copy of a function that closes over other values."""
    name, defaults, cells = function.__name__, function.__defaults__, tuple(map(types.CellType, values))
    return types.FunctionType(function.__code__, function.__globals__, name, defaults, cells)


def _at_a_time_only(method: str) -> Callable[..., Any]:
    """A method that is defined for the layer at a depth-time only."""

    def refuse(self: Any, *_: Any, **__: Any) -> Any:
        raise InputError(f"layer: its parameters change with depth; layer.at(t).{method} is defined at each depth-time")

    return refuse


class OverDepth(AbstractStack):
    """A layer with parameters that are functions of depth-time: `OverDepth(layer, gamma=profile)`.

    Layer ℓ of a network of width n, counted from 0, has the parameters at t = (ℓ + ½)/n; so has a step of the solver at
    its midpoint. Profiles that are Equinox modules are differentiable in their arrays. There is no single law of such a
    layer: it is simulated, sampled and tuned, not fitted.

    Attributes:
        layer: the layer, with the parameters that do not change.
        profiles: the other parameters by name, as functions of depth-time.
    """

    layer: AbstractLayer
    profiles: dict[str, FunctionModule]

    @checked
    def __init__(self, layer: AbstractLayer, **profiles: Profile):
        for name, profile in profiles.items():
            if name not in layer.parameters():
                has = ", ".join(layer.parameters())
                raise InputError(f"{name}: the layer has no such parameter; it has {has}")
            if not is_profile(profile):
                raise InputError(f"{name}: a function of depth-time is needed, got {profile!r}")
        self.layer = layer
        self.profiles = {name: as_module(profile) for name, profile in profiles.items()}

    def at(self, time: ArrayLike) -> AbstractLayer:
        """The layer at a depth-time; for an array of depth-times, with arrays of parameters."""
        return self.layer.with_parameters({name: profile(time) for name, profile in self.profiles.items()})

    def declared(self) -> dict[str, Parameter]:
        """The parameters that do not change with depth."""
        return {name: parameter for name, parameter in self.layer.declared().items() if name not in self.profiles}

    def parameters(self) -> dict[str, Any]:
        """Values of the parameters that do not change with depth."""
        return {name: value for name, value in self.layer.parameters().items() if name not in self.profiles}

    def with_parameters(self, values: Any) -> "OverDepth":
        """A copy with other values of parameters that do not change with depth."""
        return OverDepth(self.layer.with_parameters(values), **self.profiles)

    def check_range(self, times: Float[np.ndarray, " times"]) -> None:
        """Raise an InputError for a profile that is out of its parameter's range at one of some depth-times."""
        for name, values in self._values(times).items():
            self.layer.declared()[name].checked(values)

    def raise_if_out_of_range[T](self, tree: T, times: Float[np.ndarray, " times"]) -> T:
        """Arrays, with an error at run time for a traced profile that is out of range at one of some depth-times."""
        return raise_if_out_of_range(tree, self.layer.declared(), self._values(times))

    def _values(self, times: Float[np.ndarray, " times"]) -> dict[str, Float[Array, " times"]]:
        """The profiles at some depth-times."""
        values = jax.vmap(lambda time: self.at(time).parameters())(jnp.asarray(times, float))
        return {name: values[name] for name in self.profiles}

    @property
    def parts(self) -> tuple[AbstractLayer, ...]:
        """The one layer, whose blocks of columns, widths and chain it has."""
        return (self.layer,)

    forward, limit, finite_width, forward_covariance = map(
        _at_a_time_only, ("forward", "limit", "finite_width", "forward_covariance")
    )

    def _repr_html_(self) -> str:
        values = {name: value_text(value) for name, value in self.parameters().items()}
        values |= dict.fromkeys(self.profiles, "over depth")
        title = f"OverDepth, {type(self.layer).__name__}"
        return parameter_cell(title, self.layer, self.layer.declared(), values)


def layer_time(number: Int[Any, ""], width: Int[Array, ""] | int, dtype: jnp.dtype) -> Float[Any, ""]:
    """Depth-time of the middle of a layer, counted from 0."""
    return (number.astype(dtype) + 0.5) / width
