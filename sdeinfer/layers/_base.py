"""The interface of a layer: a finite-width map with random weights, and the limit of its covariance.

Tests: `tests/layers/test_forward.py`.
"""

import abc
import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import equinox as eqx
import equinox.internal as eqxi
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float, Int, PRNGKeyArray

from sdeinfer._files import InputError
from sdeinfer._html import render
from sdeinfer.covariance import Pattern
from sdeinfer.covariance._matrix import engine, is_concrete
from sdeinfer.layers._finite_width import FiniteWidth
from sdeinfer.layers._wishart import Keys
from sdeinfer.parameters import BIJECTIONS, Coordinates, Parameter
from sdeinfer.terms import AbstractTerm
from sdeinfer.terms._limit import Limit


class AbstractLayer(eqx.Module):
    """One layer of a shaped network: a Markov kernel on representations, and the SDE of its covariance in the limit.

    A custom layer subclasses this, defines `forward`, and declares its parameters as fields by `Parameter.field`. Its
    networks can then be sampled with their weights. Defining `limit` lets it be simulated, and fitted with the limit's
    law; `finite_width` adds the finite-width law; `forward_covariance` samples networks without weights.

    Attributes:
        architecture: name of the type in files and on the command line; None for a type without one.
        on_host: whether `forward_covariance` maps NumPy arrays to NumPy arrays, so that sampling compiles nothing; the
            parameters are scalars, or arrays with one value a network.
        has_tangents: whether `forward_covariance` takes `tangents=True`, for the joint covariance of tokens and their
            tangents: the first half of the rows of V are tokens, the others the tangent of each.
    """

    architecture: ClassVar[str | None] = None
    on_host: ClassVar[bool] = False
    has_tangents: ClassVar[bool] = False

    @abc.abstractmethod
    def forward(self, X: Float[Array, "m n"], *, key: PRNGKeyArray) -> Float[Array, "m n"]:
        """Apply one layer with fresh N(0, 1) weights to the representations X of m tokens at width n."""

    def limit(self) -> Limit:
        """Coefficients of the covariance SDE; one layer advances depth-time by 1/n.

        Raises:
            InputError: for a layer that has none.
        """
        raise InputError(
            f"layer: {type(self).__name__} has no limit; its networks can be sampled, observed and compared, not "
            "simulated or fitted"
        )

    def finite_width(self, width: ArrayLike) -> FiniteWidth:
        """Coefficients of the law of one layer of width n, to the next order in 1/n; n may be traced.

        Raises:
            InputError: for a layer that does not define it.
        """
        raise InputError(f"law: {type(self).__name__} has no law of finite width; use law='limit'")

    def forward_covariance(
        self, V: Float[Any, "m m blocks networks"], *, width: Int[Any, ""] | int, keys: Keys
    ) -> Float[Any, "m m blocks networks"]:
        """Draw the covariances of the outputs of `forward` for many networks, without drawing weights.

        The law of X′ depends on X only through V, up to a rotation of the columns within each block.

        Arguments:
            V: X_b X_bᵀ/n for every block b of columns, with n the full width. The number of blocks is a multiple of
                `column_blocks`; each block has at least 2m columns.
            width: n, accepted by `check_width`; may be traced.
            keys: one key per network.

        Raises:
            InputError: for a layer that does not define it.
        """
        raise InputError(f"method: {type(self).__name__} has no forward_covariance; use method='weights'")

    @property
    def has_chain(self) -> bool:
        """Whether networks of the layer can be sampled without weights, by `forward_covariance`."""
        return type(self).forward_covariance is not AbstractLayer.forward_covariance

    def at(self, time: ArrayLike) -> "AbstractLayer":
        """The layer at a depth-time: itself, unless its parameters change with depth (`OverDepth`)."""
        del time
        return self

    @property
    def name(self) -> str:
        """The name in files and messages; that of the type for a layer without one."""
        return self.architecture or type(self).__name__

    @property
    def sizes(self) -> dict[str, Any]:
        """The sizes by name: settings, beside the parameters, on which the limit depends."""
        return {name: getattr(self, name) for name in sizes_of(self)}

    @property
    def pattern(self) -> Pattern:
        """Which tokens each token attends to, by the limit; a field of layers that declare it."""
        return jax.eval_shape(limit_of, self).pattern

    @property
    def other_terms(self) -> tuple[AbstractTerm, ...]:
        """The terms of the limit beside the package's."""
        return tuple(jax.eval_shape(limit_of, self).others)

    @property
    def part_name(self) -> str:
        """The name in a `Stack`, a prefix of the layer's parameters there."""
        return self.architecture or type(self).__name__.lower()

    @property
    def column_blocks(self) -> int:
        """Number of equal column blocks of X that the layer treats differently: 1, or the number of heads."""
        return 1

    @property
    def skewness(self) -> float:
        """Skewness of V_ii after one layer of small γ, divided by its relative standard deviation."""
        return 3 / 2

    def check_width(self, width: int) -> None:
        """Raise an InputError for a width that the layer does not support."""

    def declared(self) -> dict[str, Parameter]:
        """The layer's parameters by public name; fields that are None are left out."""
        return {
            field.name: field.metadata["parameter"]
            for field in dataclasses.fields(self)
            if "parameter" in field.metadata and getattr(self, field.name) is not None
        }

    def parameters(self) -> dict[str, Any]:
        """Values of the layer's parameters by public name."""
        return {name: getattr(self, name) for name in self.declared()}

    def with_parameters(self, values: Mapping[str, ArrayLike]) -> "AbstractLayer":
        """A copy of the layer with some parameters replaced."""
        return dataclasses.replace(self, **values)

    @property
    def coordinates(self) -> Coordinates:
        """The coordinates in which the layer's parameters are sampled."""
        return Coordinates(self.declared())

    def with_coordinates(self, u: Float[Any, "coordinates ..."]) -> "AbstractLayer":
        """A copy of the layer with the parameters at real coordinates, see `Coordinates.constrained`."""
        return self.with_parameters(self.coordinates.constrained(u))

    def __str__(self) -> str:
        """The parameters with their values, and the sizes that are not the default."""
        values = {name: value_text(value) for name, value in self.parameters().items()}
        values |= own_sizes(self)
        return f"{type(self).__name__}({', '.join(f'{name}={value}' for name, value in values.items())})"

    def _repr_html_(self) -> str:
        values = {name: value_text(value) for name, value in self.parameters().items()}
        return parameter_cell(type(self).__name__, self, self.declared(), values)


def check_parameters[T: AbstractLayer](layer: T) -> T:
    """Check that a layer's parameters are in range: concrete values at once, traced ones at run time."""
    declared, values = layer.declared(), layer.parameters()
    for name, value in values.items():
        if jnp.ndim(value):
            raise InputError(f"{name}: one layer at a time, with scalar parameters; got the shape {jnp.shape(value)}")
    if all(map(is_concrete, values.values())):
        for name, value in values.items():
            if np.asarray(declared[name].is_faulty(np.asarray(value))).any():
                raise InputError(_out_of_range(name, declared[name]))
        return layer
    return raise_if_out_of_range(layer, declared, values)


def raise_if_out_of_range[T](tree: T, declared: Mapping[str, Parameter], values: Mapping[str, Any]) -> T:
    """Arrays, with an error at run time that names the first parameter with a traced value out of its range."""
    faulty = jnp.stack([jnp.any(declared[name].is_faulty(jnp.asarray(value))) for name, value in values.items()])
    messages = [
        f"{_out_of_range(name, declared[name])}; an optimiser of u stays in range with layer.with_coordinates(u)"
        for name in values
    ]
    return eqxi.branched_error_if(tree, faulty.any(), jnp.argmax(faulty), messages)


def _out_of_range(name: str, parameter: Parameter) -> str:
    return f"{name}: out of range, or NaN; must be {BIJECTIONS[parameter.bijection].range}"


def limit_on_host(layer: AbstractLayer) -> Limit:
    """The limit of a layer with concrete parameters as NumPy arrays; the package's formulas compile nothing."""
    limit = jax.tree.map(np.asarray, limit_of(jax.tree.map(np.asarray, layer)))
    for name in ("linear_noise", "attention_noise"):
        if not (getattr(limit, name) >= 0).all():
            raise InputError(
                f"layer: {name} of the limit of {type(layer).__name__} must not be negative, got {getattr(limit, name)}"
            )
    return limit


def limits_on_host(kind: AbstractLayer, u: Float[np.ndarray, "*points coordinates"]) -> Limit:
    """The limits of a layer at points of its coordinates, with the axes of the points, by NumPy."""
    limit = limit_of(kind.with_coordinates(u.reshape(-1, u.shape[-1]).T))
    limits = jax.tree.map(lambda c: np.broadcast_to(np.asarray(c), u[..., 0].size), limit)
    return jax.tree.map(lambda c: c.reshape(u.shape[:-1]), limits)


def limit_of(layer: AbstractLayer) -> Limit:
    """The limit of a layer, whose type is checked: a layer may be a user's."""
    limit = layer.limit()
    if not isinstance(limit, Limit):
        raise InputError(
            f"layer: limit of {type(layer).__name__} must return a si.layers.Limit, got a {type(limit).__name__}"
        )
    return limit


def has_limit(layer: AbstractLayer) -> bool:
    """Whether a layer has a limit; a stack may have none."""
    try:
        jax.eval_shape(limit_of, layer)
    except InputError:
        return False
    return True


def shortcut(gamma: Float[Any, "..."]) -> Float[Any, "..."]:
    """Strength of the shortcut, λ = √(1 − γ²)."""
    return engine(gamma).sqrt((1 - gamma) * (1 + gamma))


def size(default: Any) -> Any:
    """A field of a layer for a size, with its default."""
    return eqx.field(default=default, static=True, metadata={"size": True})


def sizes_of(layer: Any) -> dict[str, dataclasses.Field]:
    """The fields of a layer, or of a type of layer, that are sizes, by name."""
    return {field.name: field for field in dataclasses.fields(layer) if "size" in field.metadata}


def own_sizes(layer: AbstractLayer) -> dict[str, Any]:
    """The sizes that differ from their defaults, by name."""
    fields = sizes_of(layer)
    return {name: value for name, value in layer.sizes.items() if value != fields[name].default}


def parameter_cell(title: str, layer: Any, parameters: Mapping[str, Parameter], values: Mapping[str, str]) -> str:
    """A table in HTML with a row for each parameter, and with those settings of the layer that are not None."""
    rows = [
        {
            **{"symbol": parameter.symbol, "name": name, "value": values[name]},
            **{"range": BIJECTIONS[parameter.bijection].range, "meaning": parameter.meaning},
        }
        for name, parameter in parameters.items()
    ]
    fields = (field.name for field in dataclasses.fields(layer) if field.metadata.get("static"))
    settings = {name.replace("_", " "): getattr(layer, name) for name in fields if getattr(layer, name) is not None}
    return render("layer_cell.html.jinja", title=title, settings=settings, rows=rows)


def value_text(value: Any) -> str:
    """A parameter's value, or the range of the values of several networks."""
    if not is_concrete(value):
        return "traced"
    values = np.asarray(value, float)
    if values.ndim == 0:
        return f"{values:.4g}"
    return f"{values.min():.4g} … {values.max():.4g}, {values.size} values"
