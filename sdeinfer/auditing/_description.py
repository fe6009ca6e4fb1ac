"""A model as an audit knows it before it runs."""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

from sdeinfer.layers import Stack

Library = Literal["torch", "flax", "equinox"]


@dataclasses.dataclass(frozen=True, eq=False)
class Description:
    """A model's residual branches and the structure of its blocks.

    Attributes:
        library: the library of the model.
        branches: returns (kind, reader, writer) for each branch of such a model, in the order of their calls; see
            `observe_branches.torch`.
        layers: returns the modules whose input and output are the residual stream, one for each Transformer layer; none
            if they are not known.
        architecture: the blocks of one layer with everything but sizes of weights: heads, activation, norms, masks.
            Strengths, gains and biases are those of a recipe.
        sd: standard deviation of weights in the model's configuration, as `initializer_range`; None if it has none.
        name: what the model is, for sentences: "GPT2Model".
    """

    library: Library
    branches: Callable[[Any], list[tuple[str, Any, Any]]]
    layers: Callable[[Any], list[Any]]
    architecture: Stack
    sd: float | None
    name: str
