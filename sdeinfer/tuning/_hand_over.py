"""From tuned blocks to a network: recipes of its weights, and a model that is initialised by them."""

import dataclasses
from typing import Any

from sdeinfer._files import InputError
from sdeinfer.auditing import Initialised, Recipe, describe, recipe_for
from sdeinfer.auditing._initialise import initialise
from sdeinfer.blocks import Block
from sdeinfer.blocks._order import BlockOrder
from sdeinfer.layers import AbstractLayer, OverDepth, Stack


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
    """A model with the weights of tuned blocks; see `initialise`."""
    blocks, recipes = blocks_of(layer), recipes_of(layer, width=width, depth=depth)
    _require_same(blocks, model, **{name: settings[name] for name in ("branches", "pattern") if name in settings})
    return initialise(model, recipes, inputs, architecture=blocks, width=width, **settings)


def _require_same(blocks: Stack, model: Any, branches: Any = None, pattern: Any = None) -> None:
    """Check that a model which tells its blocks has those that were tuned."""
    try:
        described = describe(model, patterns=branches, pattern=pattern)
    except InputError:
        return  # it does not tell; another fault is one for `initialise`
    both = (map(_settings, BlockOrder.of(each, depth=1).blocks) for each in (blocks, described.architecture))
    for tuned, found in zip(*both, strict=False):
        for name, value in tuned.items():
            if value != found.get(name):
                raise InputError(
                    f"model: {described.name} has {name}={found.get(name)!r}, where blocks with {value!r} were tuned; "
                    "si.audit(model).architecture has the blocks of a model"
                )


def _settings(block: Block) -> dict[str, Any]:
    """The settings of a block and of its branch that a model tells."""
    return {
        field.name: getattr(each, field.name)
        for each in (block, block.branch)
        for field in dataclasses.fields(each)
        if field.metadata.get("static") and field.name not in ("bias", "skip", "dropout")
    }
