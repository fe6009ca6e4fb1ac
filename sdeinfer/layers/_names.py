"""The names by which files and the command line know the architectures, and their sizes beside the width."""

import dataclasses
import math
from collections.abc import Hashable, Mapping
from typing import Any

from jaxtyping import ArrayLike

from sdeinfer._files import InputError
from sdeinfer.layers._attention import ShapedAttention
from sdeinfer.layers._base import AbstractLayer
from sdeinfer.layers._feedforward import ResidualFeedForward
from sdeinfer.layers._mlp import ShapedMLP
from sdeinfer.layers._stack import ShapedTransformer

ARCHITECTURES: dict[str, type[AbstractLayer]] = {
    "transformer": ShapedTransformer,
    "attention": ShapedAttention,
    "feedforward": ResidualFeedForward,
    "mlp": ShapedMLP,
}

SIZES = ("heads", "output_projection", "expansion", "causal")
"""What a layer's limit depends on beside its parameters; an architecture has some of them."""


@dataclasses.dataclass(frozen=True)
class Architecture:
    """A kind of layer whose parameters are not known.

    Attributes:
        name: "transformer", "attention", "feedforward" or "mlp".
        heads: number H of attention heads.
        output_projection: whether a Gaussian matrix mixes the heads.
        expansion: hidden width r of the feed-forward branch, as a multiple of n.
        causal: whether attention has a causal mask; an architecture without attention has none.
    """

    name: str
    heads: int = 1
    output_projection: bool = False
    expansion: float = 1
    causal: bool = False

    def __post_init__(self):
        architecture_named(self.name)
        if int(self.heads) != self.heads or self.heads < 1:
            raise InputError(f"heads: a whole number of at least 1 is needed, got {self.heads}")
        if not 0 < self.expansion < math.inf:
            raise InputError(f"expansion: must be positive and finite, got {self.expansion:g}")
        if self.causal and "causal" not in self.sizes:
            raise InputError(f"causal: {self.name} has no attention to be masked")

    def layer(self, **parameters: ArrayLike) -> AbstractLayer:
        """The layer with given parameters; those that the architecture does not have are not used."""
        own = {name: value for name, value in parameters.items() if name in self.parameters}
        return ARCHITECTURES[self.name](**own, **{name: getattr(self, name) for name in self.sizes})

    @property
    def parameters(self) -> tuple[str, ...]:
        """The names of its parameters."""
        fields = ARCHITECTURES[self.name].__dataclass_fields__
        return tuple(name for name in ("gamma", "tau0", "c_plus", "c_minus") if name in fields)

    @property
    def sizes(self) -> tuple[str, ...]:
        """The names of its sizes, of those in `SIZES`."""
        return tuple(name for name in SIZES if name in ARCHITECTURES[self.name].__dataclass_fields__)

    @property
    def skewness(self) -> float:
        """C, where a layer of small γ makes V_ii skewed by c times its relative standard deviation.

        Of λx + γ w with w normal given x it is 3/2; the random branch of a feed-forward layer is itself a sample of
        r n hidden units, and an MLP's layer nothing but a sample. Two factors of like variance have (c₁ + c₂ + 6)/4.
        """
        attention, feedforward = 3 / 2, 3 / 2 * (1 + 1 / self.expansion)
        by_name = {"attention": attention, "feedforward": feedforward, "mlp": 2.0}
        return by_name.get(self.name, (attention + feedforward + 6) / 4)

    def attributes(self) -> dict[str, Any]:
        """What files say of it: its name, and its sizes where they are not 1."""
        default = {field.name: field.default for field in dataclasses.fields(self)}
        sizes = {name: getattr(self, name) for name in SIZES if getattr(self, name) != default[name]}
        return {"architecture": self.name, **{name: float(size) for name, size in sizes.items()}}


def architecture_in(attributes: Mapping[Hashable, Any]) -> Architecture | None:
    """The architecture that the attributes of a file name, None where they do not.

    Raises:
        InputError: for a name or a size that cannot be.
    """
    name = attributes.get("architecture")
    if name is None:
        return None
    try:
        heads, expansion = float(attributes.get("heads", 1)), float(attributes.get("expansion", 1))
        projection, causal = (bool(float(attributes.get(name, 0))) for name in ("output_projection", "causal"))
    except (TypeError, ValueError) as error:
        raise InputError(f"{', '.join(SIZES)}: numbers are needed ({error})") from error
    if heads != int(heads):
        raise InputError(f"heads: a whole number of at least 1 is needed, got {heads:g}")
    expansion = int(expansion) if expansion == int(expansion) else expansion
    return Architecture(str(name), int(heads), projection, expansion, causal)


def architecture_of_layer(layer: AbstractLayer) -> Architecture | None:
    """The architecture of a layer, None where it has no name, or parameters beside those of its architecture."""
    name = next((name for name, kind in ARCHITECTURES.items() if type(layer) is kind), None)
    if name is None or set(layer.parameters()) != set(Architecture(name).parameters):
        return None
    return Architecture(name, **{size: getattr(layer, size) for size in SIZES if size in layer.__dataclass_fields__})


def architecture_named(name: str) -> type[AbstractLayer]:
    """The architecture of a name.

    Raises:
        InputError: for a name that is none of `ARCHITECTURES`.
    """
    if name not in ARCHITECTURES:
        raise InputError(f"architecture: must be one of {', '.join(ARCHITECTURES)}, got {name!r}")
    return ARCHITECTURES[name]
