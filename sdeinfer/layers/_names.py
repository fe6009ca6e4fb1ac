"""Kinds of layers: the architectures named in files and on the command line, and the kind of any other layer."""

import abc
import dataclasses
import functools
import math
from collections.abc import Hashable, Mapping
from typing import Any

import jax
import numpy as np
from jaxtyping import ArrayLike, Float

from sdeinfer._arguments import shown, whole_number
from sdeinfer._files import InputError
from sdeinfer.covariance import EVERY_TOKEN, Pattern
from sdeinfer.layers._attention import ShapedAttention
from sdeinfer.layers._base import AbstractLayer, has_gains, limit_of, limit_on_host
from sdeinfer.layers._cells import parameter_cell, prior_text
from sdeinfer.layers._feedforward import ResidualFeedForward
from sdeinfer.layers._mlp import ShapedMLP
from sdeinfer.layers._over_depth import OverDepth
from sdeinfer.layers._stack import ShapedTransformer
from sdeinfer.parameters import Coordinates

ARCHITECTURES: dict[str, type[AbstractLayer]] = {
    "transformer": ShapedTransformer,
    "attention": ShapedAttention,
    "feedforward": ResidualFeedForward,
    "mlp": ShapedMLP,
}

SIZES = ("heads", "output_projection", "expansion", "pattern")
"""Settings, besides the parameters, on which the limit of a layer depends; an architecture has some of them."""


@functools.lru_cache(maxsize=256)
def _template(kind: "AbstractArchitecture", x64: bool) -> AbstractLayer:  # noqa: FBT001
    del x64  # the precision of the arrays
    return kind.make_template()


class AbstractArchitecture(abc.ABC):
    """A kind of layer with unspecified parameters; hashable, compared by value.

    Attributes:
        name: name in files and messages.
    """

    name: str

    @property
    def template(self) -> AbstractLayer:
        """A layer of this kind with arbitrary parameters, in the precision of JAX's configuration."""
        return _template(self, bool(jax.config.jax_enable_x64))

    @abc.abstractmethod
    def make_template(self) -> AbstractLayer:
        """Make `template`."""

    @abc.abstractmethod
    def attributes(self) -> dict[str, Any]:
        """Dataset attributes that describe this kind."""

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
        return self.template.coordinates

    @property
    def pattern(self) -> Pattern:
        """Which tokens each token attends to."""
        return jax.eval_shape(lambda layer: layer.limit(), self.template).pattern

    def _repr_html_(self) -> str:
        sampled = self.coordinates.sampled
        priors = {name: prior_text(parameter) for name, parameter in sampled.items()}
        return parameter_cell(self.name, self.template, sampled, prior=priors)


EXAMPLE = {"gamma": 0.5, "tau0": 1.0, "c_plus": 0.5, "c_minus": -0.5}
"""Parameters of the template of a named architecture."""


@dataclasses.dataclass(frozen=True)
class LayerKind(AbstractArchitecture):
    """The kind of any layer, such as a `Stack` or a custom layer.

    Attributes:
        structure: tree structure of the layer as a pytree; its leaves are the parameters.
        name: name of the layer's type.
    """

    structure: Any
    name: str

    @classmethod
    def of(cls, layer: AbstractLayer) -> "LayerKind":
        """The kind of a layer.

        Raises:
            InputError: if the layer has arrays that are not declared as parameters, or no valid limit.
        """
        leaves, structure = jax.tree.flatten(layer)
        if len(leaves) != len(layer.declared()):
            raise InputError(
                f"architecture: {type(layer).__name__} has {len(leaves)} arrays, of which {len(layer.declared())} are "
                "parameters; make each a field by `Parameter.field`, or static"
            )
        kind = cls(structure, type(layer).__name__)
        jax.eval_shape(limit_of, kind.template)
        # A gain has a limit at 1 only, and the template's coordinates are 0.
        if not has_gains(layer):
            limit_on_host(kind.template)
        return kind

    def make_template(self) -> AbstractLayer:
        """A layer of this kind with coordinates 0."""
        blank = jax.tree.unflatten(self.structure, range(self.structure.num_leaves))
        coordinates = blank.coordinates
        return blank.with_parameters(coordinates.constrained(np.zeros(len(coordinates))))

    def attributes(self) -> dict[str, Any]:
        """Dataset attributes: the name of the layer's type."""
        return {"architecture": self.name}


@dataclasses.dataclass(frozen=True)
class Architecture(AbstractArchitecture):
    """A named kind of layer.

    Attributes:
        name: "transformer", "attention", "feedforward" or "mlp".
        heads: number H of attention heads.
        output_projection: whether a Gaussian matrix mixes the heads.
        expansion: hidden width r of the feed-forward branch, as a multiple of n.
        pattern: which tokens each token attends to; `EVERY_TOKEN` for architectures without attention.
    """

    name: str
    heads: int = 1
    output_projection: bool = False
    expansion: float = 1
    pattern: Pattern = EVERY_TOKEN  # pyright: ignore[reportIncompatibleMethodOverride]

    def __post_init__(self):
        architecture_named(self.name)
        if not whole_number(self.heads) or self.heads < 1:
            raise InputError(f"heads: a whole number of at least 1 is needed, got {shown(self.heads)}")
        if not 0 < self.expansion < math.inf:
            raise InputError(f"expansion: must be positive and finite, got {self.expansion:g}")
        if not self.pattern.everything and "pattern" not in self.sizes:
            raise InputError(f"pattern: {self.name} has no attention to be masked")

    def make_template(self) -> AbstractLayer:
        """A layer of this kind."""
        kind = ARCHITECTURES[self.name]
        own = {name: value for name, value in EXAMPLE.items() if name in kind.__dataclass_fields__}
        return kind(**own, **{name: getattr(self, name) for name in self.sizes})

    @property
    def sizes(self) -> tuple[str, ...]:
        """Names from `SIZES` that this architecture has."""
        return tuple(name for name in SIZES if name in ARCHITECTURES[self.name].__dataclass_fields__)

    def attributes(self) -> dict[str, Any]:
        """Dataset attributes: the name, and the sizes that differ from their defaults."""
        sizes = {name: float(size) for name, size in self.own_sizes().items() if name != "pattern"}
        return {"architecture": self.name, **sizes, **self.pattern.attributes()}

    def own_sizes(self) -> dict[str, Any]:
        """The sizes that differ from their defaults."""
        default = {field.name: field.default for field in dataclasses.fields(self)}
        return {name: getattr(self, name) for name in SIZES if getattr(self, name) != default[name]}


def with_attention_pattern(kind: Architecture, pattern: Pattern) -> Architecture:
    """The architecture with an attention pattern; itself if it has no attention."""
    return dataclasses.replace(kind, pattern=pattern) if "pattern" in kind.sizes else kind


def described(kind: AbstractArchitecture) -> str:
    """The name of an architecture, and its sizes that are not the default, such as "attention, 4 heads"."""
    if not isinstance(kind, Architecture):
        return kind.name
    return ", ".join([kind.name, *(named_size(kind, size) for size in kind.own_sizes() if size in kind.sizes)])


def constructor(kind: Architecture) -> str:
    """The call that makes an architecture, with the sizes that are not the default."""
    sizes = (f"{size}={value!r}" for size, value in kind.own_sizes().items())
    return f"Architecture({', '.join([repr(kind.name), *sizes])})"


def named_size(kind: Architecture, size: str) -> str:
    """A size in words, such as "4 heads" or "no output projection"."""
    match size, getattr(kind, size):
        case "heads", value:
            return f"{value} head{'s' if value > 1 else ''}"
        case "expansion", value:
            return f"expansion {value:g}"
        case "pattern", value:
            return str(value)
        case _, value:
            return "an output projection" if value else "no output projection"


def architecture_in(attributes: Mapping[Hashable, Any]) -> Architecture | None:
    """The architecture named by the attributes of a Dataset; None if they name none.

    Raises:
        InputError: for an unknown name or an invalid size.
    """
    name = attributes.get("architecture")
    if name is None:
        return None
    try:
        heads, expansion = float(attributes.get("heads", 1)), float(attributes.get("expansion", 1))
        projection = bool(float(attributes.get("output_projection", 0)))
    except (TypeError, ValueError) as error:
        raise InputError(f"{', '.join(SIZES[:-1])}: numbers are needed ({error})") from error
    if heads != int(heads):
        raise InputError(f"heads: a whole number of at least 1 is needed, got {heads:g}")
    expansion = int(expansion) if expansion == int(expansion) else expansion
    return Architecture(str(name), int(heads), projection, expansion, Pattern.in_attributes(attributes))


def example_of(kind: type[AbstractLayer]) -> AbstractLayer:
    """A layer of the given type with default sizes.

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
        return kind(**coordinates.constrained(np.zeros(len(coordinates))))
    except TypeError as error:
        raise InputError(f"architecture: give a layer, not its type: {error}") from error


def kind_of(layer: str | AbstractArchitecture | AbstractLayer | type[AbstractLayer]) -> AbstractArchitecture:
    """The architecture of a name, of a layer or of a type of layer; the `LayerKind` of a layer that has no name.

    Raises:
        InputError: for an unknown name, for what is no layer, and for a layer whose parameters change with depth.
    """
    match layer:
        case AbstractArchitecture():
            return layer
        case str():
            return Architecture(layer)
        case type() if issubclass(layer, AbstractLayer):
            return kind_of(example_of(layer))
        case OverDepth():
            raise InputError("architecture: the layer's parameters change with depth; give the layer within it")
        case AbstractLayer():
            return architecture_of_layer(layer) or LayerKind.of(layer)
    raise InputError(f"architecture: a name, an Architecture, a layer or its type is needed, got {shown(layer)}")


def architecture_of_layer(layer: AbstractLayer) -> Architecture | None:
    """The named architecture of a layer.

    None if its type has no name, or if it has parameters or sizes that the architecture does not have.
    """
    name = next((name for name, kind in ARCHITECTURES.items() if type(layer) is kind), None)
    if name is None or set(layer.parameters()) != set(Architecture(name).parameters):
        return None
    return Architecture(name, **{size: getattr(layer, size) for size in SIZES if size in layer.__dataclass_fields__})


def architecture_named(name: str) -> type[AbstractLayer]:
    """The layer type of a named architecture.

    Raises:
        InputError: for a name that is not in `ARCHITECTURES`.
    """
    if name not in ARCHITECTURES:
        raise InputError(f"architecture: must be one of {', '.join(ARCHITECTURES)}, got {name!r}")
    return ARCHITECTURES[name]
