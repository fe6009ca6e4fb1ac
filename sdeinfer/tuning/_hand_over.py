"""From tuned blocks to a network: recipes of its weights, and a model that is initialised by them."""

from typing import Any

from sdeinfer._files import InputError
from sdeinfer.auditing import Initialised, Recipe
from sdeinfer.auditing._initialise import initialise
from sdeinfer.blocks import Block, SelfAttention, of
from sdeinfer.blocks._attributes import unlike_blocks
from sdeinfer.layers import AbstractLayer, OverDepth, Stack
from sdeinfer.tuning._recipes import recipe_for


def recipes_of(layer: AbstractLayer, *, width: int, depth: int) -> list[Recipe]:
    """The recipe of each layer, one object if all are alike."""

    def recipe(number: int) -> Recipe:
        return recipe_for(blocks_of(layer.at((number + 0.5) / width)), name="the tuned network", source="si.tune")

    return [recipe(number) for number in range(depth)] if isinstance(layer, OverDepth) else [recipe(0)] * depth


def blocks_of(layer: AbstractLayer) -> Stack:
    """The blocks of one layer, the first if they change with depth; an InputError for other layers."""
    first = layer.at(0.0)
    layers = first.layers if isinstance(first, Stack) else (first,)
    if not all(isinstance(each, Block) for each in layers):
        raise InputError(
            "layer: recipes are for blocks; networks of shaped layers are made by ShapedTransformer.of of "
            "sdeinfer.modules.torch and .flax"
        )
    return Stack(tuple(layers))


def initialised(
    layer: AbstractLayer, model: Any, inputs: Any, *, width: int, depth: int, **settings: Any
) -> Initialised:
    """A model with the weights of tuned blocks, which are checked before; see `initialise`."""
    recipes, head_size = recipes_of(layer, width=width, depth=depth), None
    if settings.get("audited", True):
        _require_blocks(blocks_of(layer), model, inputs)
    own = recipes if len(set(map(id, recipes))) > 1 else recipes[0]
    for block in blocks_of(layer).layers:
        if isinstance(block, Block) and isinstance(block.branch, SelfAttention):
            head_size = block.branch.head_size or width // block.branch.heads
    return initialise(model, own, inputs, width=width, layers=depth, head_size=head_size, **settings)


def _require_blocks(declared: Stack, model: Any, inputs: Any) -> None:
    """Check that a model is made of the tuned blocks, which no weights make of others."""
    unlike = unlike_blocks(declared, of(model, inputs))
    if unlike:
        raise InputError(f"model: is not of the tuned blocks: {'; '.join(unlike)}")
