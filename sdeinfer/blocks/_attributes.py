"""Stacks of blocks as text in the attributes of a Dataset. Tests: `tests/blocks/test_of.py`."""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from sdeinfer._files import InputError
from sdeinfer.blocks._attention import SelfAttention
from sdeinfer.blocks._block import Block
from sdeinfer.blocks._experts import Experts
from sdeinfer.blocks._latent import LatentAttention
from sdeinfer.blocks._mlp import MLP
from sdeinfer.blocks._order import BlockOrder
from sdeinfer.blocks._parallel import Parallel
from sdeinfer.covariance import Pattern
from sdeinfer.layers import Stack

BRANCHES = {"attention": SelfAttention, "latent attention": LatentAttention, "mlp": MLP, "experts": Experts}
"""Types of branches by their names in files."""

BLOCKS = "blocks"
"""The attribute of a Dataset of branches that holds its blocks as text."""


def text_of(stack: Stack) -> str:
    """The blocks as JSON, without the attention pattern."""
    blocks = []
    for block in stack.layers:
        assert isinstance(block, Block)
        blocks.append(_fields(block) | {"branch": {"kind": branch_name(block), **_fields(block.branch)}})
    return json.dumps({"beside each other": blocks} if isinstance(stack, Parallel) else blocks)


def attributes_of_blocks(order: BlockOrder) -> dict[str, str]:
    """The blocks as an attribute; none for branches and activations of one's own, which text does not hold."""
    if not all(isinstance(block.branch, tuple(BRANCHES.values())) for block in order.blocks):
        return {}
    try:
        return {BLOCKS: text_of(Stack(order.blocks))}
    except TypeError:
        return {}


def branch_name(block: Block) -> str:
    """The name of the type of a block's branch."""
    return next(name for name, kind in BRANCHES.items() if isinstance(block.branch, kind))


def stack_in(attrs: Mapping[Any, Any]) -> Stack:
    """The blocks of a Dataset's attributes, which hold them, with its attention pattern; an InputError for others."""
    pattern = Pattern.in_attributes(attrs)
    try:
        given = json.loads(str(attrs[BLOCKS]))
        if isinstance(given, dict):
            return Parallel(tuple(_block(block, pattern) for block in given["beside each other"]))
        return Stack(tuple(_block(block, pattern) for block in given))
    except (ValueError, TypeError, KeyError) as error:
        raise InputError(f"blocks: the attribute does not describe blocks ({error})") from error


def _block(given: dict[str, Any], pattern: Pattern) -> Block:
    fields = given["branch"]
    mask = {"pattern": pattern} if "attention" in fields["kind"] else {}
    sizes = {name: value for name, value in fields.items() if name != "kind"}
    branch: Any = BRANCHES[fields["kind"]](**sizes, **mask)
    return Block(branch, **{name: value for name, value in given.items() if name != "branch"})


def _fields(of: Any) -> dict[str, Any]:
    """Fields that JSON can hold; numbers of parameters as floats."""
    values = {field.name: getattr(of, field.name) for field in dataclasses.fields(of)}
    settings = {name: value for name, value in values.items() if name not in ("branch", "pattern")}
    return {name: float(x) if isinstance(x, np.ndarray) or hasattr(x, "dtype") else x for name, x in settings.items()}


def unlike_blocks(declared: Stack, actual: Stack) -> list[str]:
    """Differences of two stacks that no weights change, in words."""
    kinds, other_kinds = (_kinds(stack) for stack in (declared, actual))
    if kinds != other_kinds:
        return [f"its layers are {other_kinds}, those declared {kinds}"]
    lines = []
    for block, other in zip(declared.layers, actual.layers, strict=True):
        assert isinstance(block, Block)
        assert isinstance(other, Block)
        facts, other_facts = _facts(block), _facts(other)
        unlike = (name for name in facts if facts[name] != other_facts[name])
        lines += [f"{block.part_name}: {name} {other_facts[name]}, declared {facts[name]}" for name in unlike]
    return lines


def _kinds(stack: Stack) -> str:
    names = [branch_name(block) for block in stack.layers if isinstance(block, Block)]
    return (" beside " if isinstance(stack, Parallel) else " and ").join(names)


NUMBERS = ("strength", "output_gain", "output_epsilon", "gain", "temperature", "rotated_gain", "router", "bias", "sink")
"""Fields that weights change."""


def _facts(block: Block) -> dict[str, Any]:
    """The fields of a block and its branch that no weights change; a mask by its rows, as it may be of any length."""
    branch = block.branch
    facts = {name: value for name, value in (_fields(block) | _fields(branch)).items() if name not in NUMBERS}
    for name in facts.keys() & {"skip", "expansion", "shared", "scale"}:
        facts[name] = round(facts[name], 3)
    if isinstance(branch, SelfAttention):
        facts |= {
            "key_value_heads": branch.groups,
            "rope": None if branch.rope is None else float(f"{branch.rope:.2g}"),
        }
        facts.pop("head_size")
    if isinstance(branch, SelfAttention | LatentAttention):
        facts["mask"] = branch.pattern.rows or ("causal" if branch.pattern.causal else None)
    return facts
