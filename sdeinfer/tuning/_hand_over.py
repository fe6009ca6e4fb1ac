"""From tuned blocks to a network: recipes of its weights, and a model that is initialised by them."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from sdeinfer._files import InputError
from sdeinfer.auditing import Initialised, Recipe
from sdeinfer.auditing._initialise import initialise
from sdeinfer.auditing._recipe import Declared
from sdeinfer.blocks import Block, LatentAttention, SelfAttention
from sdeinfer.blocks._attributes import unlike_blocks
from sdeinfer.blocks.reading._facts import BranchFacts, NormGain
from sdeinfer.blocks.reading._of import reader_of, stack_from, variance_of
from sdeinfer.blocks.reading._reader import StackReader
from sdeinfer.layers import AbstractLayer, OverDepth, Stack
from sdeinfer.passes._account import Account
from sdeinfer.passes._models import made
from sdeinfer.tuning._recipes import recipe_for


def recipes_of(
    layer: AbstractLayer, *, width: int, depth: int, named: Mapping[str, Declared] | None = None
) -> list[Recipe]:
    """The recipe of each layer, one object if all are alike; with what is declared of parameters by their names."""
    by_name = named or {}

    def recipe(number: int) -> Recipe:
        blocks = blocks_of(layer.at((number + 0.5) / width))
        rule = recipe_for(blocks, name="the tuned network", source="si.tune")
        return dataclasses.replace(rule, entries=lambda matrix: by_name.get(matrix.name))

    return [recipe(number) for number in range(depth)] if isinstance(layer, OverDepth) else [recipe(0)] * depth


def blocks_of(layer: AbstractLayer) -> Stack:
    """The blocks of one layer, the first if they change with depth; an InputError for other layers."""
    first_layer = layer.at(0.0)
    stack = first_layer if isinstance(first_layer, Stack) else Stack((first_layer,))
    if not all(isinstance(block, Block) for block in stack.layers):
        raise InputError(
            "layer: recipes are for blocks; networks of shaped layers are made by ShapedTransformer.of of "
            "sdeinfer.modules.torch and .flax"
        )
    return stack


def initialised(
    layer: AbstractLayer, model: Any, inputs: Any, *, width: int, depth: int, **settings: Any
) -> Initialised:
    """A model with the weights of tuned blocks, which are checked before; see `initialise`."""
    blocks, gains = blocks_of(layer), None
    network = made(model, settings.get("seed", 0))
    if settings.get("audited", True) or any(map(_has_gains, blocks.layers)):
        reader = reader_of(network, inputs)
        if unlike := unlike_blocks(blocks, stack_from(reader, variance_of(reader.account))):
            raise InputError(f"model: is not of the tuned blocks: {'; '.join(unlike)}")
        gains = gains_by_name(layer, reader, width=width)
    recipes = recipes_of(layer, width=width, depth=depth, named=gains)
    return initialise(
        network,
        recipes if len({*map(id, recipes)}) > 1 else recipes[0],
        inputs,
        width=width,
        layers=depth,
        head_size=_head_size(blocks, width),
        **settings,
    )


def _head_size(blocks: Stack, width: int) -> int | None:
    """d_k of the product of queries and keys."""
    for block in blocks.layers:
        match block.branch if isinstance(block, Block) else None:
            case SelfAttention() as branch:
                return branch.head_size or width // branch.heads
            case LatentAttention() as branch:
                return branch.head_size + branch.rotated_size
    return None


def _has_gains(block: AbstractLayer) -> bool:
    """Whether norms inside of a branch have gains that are tuned."""
    return isinstance(block, Block) and (block.output_norm or getattr(block.branch, "qk_norm", None)) is not None


def gains_by_name(layer: AbstractLayer, reader: StackReader, *, width: int) -> dict[str, Declared]:
    """The gains of norms inside of branches that tuned blocks declare, by the names of a model's parameters."""
    declared: dict[str, Declared] = {}
    for number, branches in enumerate(reader.layers()):
        for block, facts in zip(blocks_of(layer.at((number + 0.5) / width)).layers, branches, strict=True):
            assert isinstance(block, Block)
            if block.output_norm is not None:
                gain = facts.gains["increment"]
                declared |= _declared(reader.account, gain, float(block.output_gain) / gain.value, facts)
            for gain in (facts.gains[side] for side in ("queries", "keys") if side in facts.gains):
                # The temperature as it is, over that which is needed.
                ratio = 1 / (facts.factors["logits"] * float(block.parameters()["temperature"]))
                declared |= _declared(reader.account, gain, math.sqrt(ratio), facts)
    return declared


def _declared(account: Account, gain: NormGain, ratio: float, facts: BranchFacts) -> dict[str, Declared]:
    """The entries of the first parameter of a gain that multiply it by a ratio; a norm may multiply by 1 + w."""
    if not gain.names or gain.names[0] not in account.gains:
        raise InputError(f"model: {facts.branch.where}: its norm has no gain, which the tuned blocks need")
    name = gain.names[0]
    used, stored = account.gains[name][0][0], float(account.parameters[name].entries().mean())
    return {name: Declared(stored + (ratio - 1) * used, 0.0)}
