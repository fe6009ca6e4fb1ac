"""The names by which files and the command line know the architectures."""

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


def architecture_name(layer: AbstractLayer) -> str | None:
    """The name of a layer's architecture, None where it has none."""
    return next((name for name, kind in ARCHITECTURES.items() if type(layer) is kind), None)


def architecture_named(name: str) -> type[AbstractLayer]:
    """The architecture of a name.

    Raises:
        InputError: for a name that is none of `ARCHITECTURES`.
    """
    if name not in ARCHITECTURES:
        raise InputError(f"architecture: must be one of {', '.join(ARCHITECTURES)}, got {name!r}")
    return ARCHITECTURES[name]
