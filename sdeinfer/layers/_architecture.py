"""Architectures: layers without the values of their parameters."""

import dataclasses
import functools
from collections.abc import Hashable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import ArrayLike, Float

from sdeinfer._arguments import shown
from sdeinfer._files import InputError
from sdeinfer.covariance import Pattern
from sdeinfer.layers._attention import ShapedAttention
from sdeinfer.layers._base import AbstractLayer, has_gains, limit_of, limit_on_host
from sdeinfer.layers._cells import parameter_cell, prior_text
from sdeinfer.layers._feedforward import ResidualFeedForward
from sdeinfer.layers._mlp import ShapedMLP
from sdeinfer.layers._over_depth import OverDepth
from sdeinfer.layers._sizes import sizes_of
from sdeinfer.layers._stack import ShapedTransformer
from sdeinfer.parameters import Coordinates
from sdeinfer.terms import AbstractTerm, Limit

ARCHITECTURES: dict[str, type[AbstractLayer]] = {
    str(kind.architecture): kind for kind in (ShapedTransformer, ShapedAttention, ResidualFeedForward, ShapedMLP)
}
"""Types of layers by the names that files and the command line know."""

SIZES = tuple(dict.fromkeys(size for kind in ARCHITECTURES.values() for size in sizes_of(kind)))
"""Names of the sizes that some of these types have."""


@dataclasses.dataclass(frozen=True, init=False, repr=False)
class Architecture:
    """A layer without the values of its parameters; hashable, compared by value.

    `Architecture("transformer", heads=4)` has a name that files know; `Architecture.of(layer)` is that of any layer.

    Attributes:
        structure: the layer's structure as a pytree: its type and settings.
        constants: values of all arrays, for a layer that has others than its parameters; those of parameters are at
            coordinates 0.
    """

    structure: Any
    constants: tuple[float, ...] = ()

    def __init__(self, name: str, **sizes: Any):
        kind = architecture_named(name)
        for size in sizes:
            if size not in sizes_of(kind):
                what = "no attention to be masked" if size == "pattern" else "no such size"
                raise InputError(f"{size}: {name} has {what}")
        object.__setattr__(self, "structure", jax.tree.structure(_at_zero(kind, sizes)))

    @classmethod
    def of(cls, layer: AbstractLayer, *, limit: bool = True) -> "Architecture":
        """The architecture of a layer.

        Arguments:
            layer: the layer.
            limit: whether it needs a limit; one without may have numbers beside its parameters, such as known gains.

        Raises:
            InputError: if the layer has arrays that are not declared as parameters, or no limit.
        """
        known = architecture_of_layer(layer)
        if known is not None:
            return known
        leaves, structure = jax.tree.flatten(layer)
        others = len(leaves) != len(layer.declared())
        if others and (limit or any(np.ndim(each) for each in leaves)):
            raise InputError(
                f"architecture: {type(layer).__name__} has {len(leaves)} arrays, of which {len(layer.declared())} are "
                "parameters; make each a field by `Parameter.field`, or static"
            )
        kind = object.__new__(cls)
        object.__setattr__(kind, "structure", structure)
        if others:
            zeros = np.zeros(len(layer.coordinates))
            known = layer.with_parameters(layer.coordinates.constrained(zeros))
            object.__setattr__(kind, "constants", tuple(map(float, jax.tree.leaves(known))))
        if not limit:
            return kind
        jax.eval_shape(limit_of, kind.template)
        # A gain has a limit at 1 only, and the template's coordinates are 0.
        if not has_gains(layer):
            limit_on_host(kind.template)
        return kind

    @property
    def template(self) -> AbstractLayer:
        """The layer at coordinates 0, in the precision of JAX's configuration."""
        return _template(self.structure, self.constants, bool(jax.config.jax_enable_x64))

    @property
    def name(self) -> str:
        """The name in files; that of the type for a layer without one."""
        return self.template.architecture or type(self.template).__name__

    @property
    def sizes(self) -> dict[str, Any]:
        """The sizes by name."""
        return {name: getattr(self.template, name) for name in sizes_of(self.template)}

    @property
    def is_named(self) -> bool:
        """Whether files know it."""
        return architecture_of_layer(self.template) is not None

    def own_sizes(self) -> dict[str, Any]:
        """The sizes that differ from their defaults, by name."""
        fields = sizes_of(self.template)
        return {name: value for name, value in self.sizes.items() if value != fields[name].default}

    def with_sizes(self, **sizes: Any) -> "Architecture":
        """The architecture with other sizes; of those that it does not have, only an attention pattern is ignored."""
        known = {name: value for name, value in sizes.items() if name in self.sizes or name != "pattern"}
        return Architecture(self.name, **(self.sizes | known))

    def layer(self, **parameters: ArrayLike) -> AbstractLayer:
        """The layer with the given parameters; parameters that the architecture does not have are ignored."""
        return self.template.with_parameters({name: parameters[name] for name in self.parameters})

    def layer_at(self, u: Float[Any, " coordinates"]) -> AbstractLayer:
        """The layer at real coordinates, see `Coordinates.constrained`."""
        return self.layer(**self.coordinates.constrained(u))

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of the parameters."""
        return tuple(self.coordinates.declared)

    @property
    def coordinates(self) -> Coordinates:
        """The coordinates in which the parameters are sampled."""
        return _coordinates(self.structure, self.constants, bool(jax.config.jax_enable_x64))

    @property
    def pattern(self) -> Pattern:
        """Which tokens each token attends to."""
        own = self.sizes.get("pattern")
        return self._limit.pattern if own is None else own

    @property
    def other_terms(self) -> tuple[AbstractTerm, ...]:
        """The terms of the layer's limit beside the package's."""
        return tuple(self._limit.others)

    @property
    def _limit(self) -> Limit:
        return jax.eval_shape(lambda layer: layer.limit(), self.template)

    def attributes(self) -> dict[str, Any]:
        """Dataset attributes: the name, and the sizes that differ from their defaults, if files know the name."""
        if not self.is_named:
            return {"architecture": self.name}
        sizes = {name: float(value) for name, value in self.own_sizes().items() if name != "pattern"}
        return {"architecture": self.name, **sizes, **self.pattern.attributes()}

    def in_words(self, size: str) -> str:
        """A size in words, such as "4 heads" or "no output projection"."""
        return sizes_of(self.template)[size].metadata["in_words"](self.sizes[size])

    def __str__(self) -> str:
        """The name, and the sizes that are not the default, such as "attention, 4 heads"."""
        return ", ".join([self.name, *map(self.in_words, self.own_sizes())])

    def __repr__(self) -> str:
        """The call that makes it."""
        if not self.is_named:
            return f"Architecture.of({self.template!r})"
        sizes = (f"{name}={value!r}" for name, value in self.own_sizes().items())
        return f"Architecture({', '.join([repr(self.name), *sizes])})"

    def _repr_html_(self) -> str:
        sampled = self.coordinates.sampled
        priors = {name: prior_text(parameter) for name, parameter in sampled.items()}
        return parameter_cell(self.name, self.template, sampled, prior=priors)


@functools.lru_cache(maxsize=256)
def _template(structure: Any, constants: tuple[float, ...], x64: bool) -> AbstractLayer:  # noqa: FBT001
    del x64  # the precision of the arrays
    blank = jax.tree.unflatten(structure, map(jnp.asarray, constants) if constants else range(structure.num_leaves))
    coordinates = blank.coordinates
    return blank.with_parameters(coordinates.constrained(np.zeros(len(coordinates))))


@functools.lru_cache(maxsize=256)
def _coordinates(structure: Any, constants: tuple[float, ...], x64: bool) -> Coordinates:  # noqa: FBT001
    return _template(structure, constants, x64).coordinates


def _at_zero(kind: type[AbstractLayer], sizes: Mapping[str, Any]) -> AbstractLayer:
    """A layer of a type at coordinates 0.

    Raises:
        InputError: if the type needs arguments besides its parameters.
    """
    declared = {
        field.name: field.metadata["parameter"]
        for field in dataclasses.fields(kind)
        if "parameter" in field.metadata and field.default is dataclasses.MISSING
    }
    coordinates = Coordinates(declared)
    try:
        return kind(**coordinates.constrained(np.zeros(len(coordinates))), **sizes)
    except TypeError as error:
        raise InputError(f"architecture: give a layer, not its type: {error}") from error


def architecture_in(attributes: Mapping[Hashable, Any]) -> Architecture | None:
    """The architecture named by the attributes of a Dataset; None if they name none.

    Raises:
        InputError: for an unknown name or an invalid size.
    """
    name = attributes.get("architecture")
    if name is None:
        return None
    known = sizes_of(architecture_named(str(name)))
    sizes = {}
    for size in known.keys() & set(attributes):
        try:
            number = float(attributes[size])
        except (TypeError, ValueError) as error:
            raise InputError(f"{size}: a number is needed ({error})") from error
        sizes[size] = bool(number) if known[size].default is False else int(number) if number % 1 == 0 else number
    pattern = {"pattern": Pattern.in_attributes(attributes)} if "pattern" in known else {}
    return Architecture(str(name), **sizes, **pattern)


def kind_of(layer: str | Architecture | AbstractLayer | type[AbstractLayer], *, limit: bool = True) -> Architecture:
    """The architecture of a name, of a layer or of a type of layer; see `Architecture.of`.

    Raises:
        InputError: for an unknown name, for what is no layer, and for a layer whose parameters change with depth.
    """
    match layer:
        case Architecture():
            return layer
        case str():
            return Architecture(layer)
        case type() if issubclass(layer, AbstractLayer):
            return Architecture.of(_at_zero(layer, {}), limit=limit)
        case OverDepth():
            raise InputError("architecture: the layer's parameters change with depth; give the layer within it")
        case AbstractLayer():
            return Architecture.of(layer, limit=limit)
    raise InputError(f"architecture: a name, an Architecture, a layer or its type is needed, got {shown(layer)}")


def architecture_of_layer(layer: AbstractLayer) -> Architecture | None:
    """The architecture of a layer that files know; None for other types, and with parameters that files do not know."""
    known = ARCHITECTURES.get(layer.architecture or "")
    if type(layer) is not known:
        return None
    kind = Architecture(str(layer.architecture), **{size: getattr(layer, size) for size in sizes_of(layer)})
    return kind if set(layer.parameters()) == set(kind.parameters) else None


def architecture_named(name: str) -> type[AbstractLayer]:
    """The layer type of a named architecture.

    Raises:
        InputError: for a name that is not in `ARCHITECTURES`.
    """
    if name not in ARCHITECTURES:
        raise InputError(f"architecture: must be one of {', '.join(ARCHITECTURES)}, got {name!r}")
    return ARCHITECTURES[name]
