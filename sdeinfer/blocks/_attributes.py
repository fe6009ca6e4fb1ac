"""Stacks of blocks as text in the attributes of a Dataset. Tests: `tests/blocks/test_of.py`."""

import dataclasses
import json
from typing import Any

import numpy as np

from sdeinfer._files import InputError
from sdeinfer.blocks._attention import SelfAttention
from sdeinfer.blocks._block import Block
from sdeinfer.blocks._mlp import MLP
from sdeinfer.covariance import Pattern
from sdeinfer.layers import Stack

BRANCHES = {"attention": SelfAttention, "mlp": MLP}
"""Types of branches by their kinds."""


def text_of(stack: Stack) -> str:
    """The blocks as JSON, without the attention pattern."""
    blocks = []
    for block in stack.layers:
        assert isinstance(block, Block)
        own = _fields(block) | {"branch": {"kind": block.branch.kind, **_fields(block.branch)}}
        blocks.append(own)
    return json.dumps(blocks)


def stack_of(text: str, pattern: Pattern) -> Stack:
    """The blocks of JSON, with an attention pattern.

    Raises:
        InputError: for other text.
    """
    try:
        return Stack(tuple(_block(each, pattern) for each in json.loads(text)))
    except (ValueError, TypeError, KeyError) as error:
        raise InputError(f"blocks: the attribute does not describe blocks ({error})") from error


def _block(given: dict[str, Any], pattern: Pattern) -> Block:
    own = given["branch"]
    more = {"pattern": pattern} if own["kind"] == "attention" else {}
    sizes = {name: value for name, value in own.items() if name != "kind"}
    branch: Any = BRANCHES[own["kind"]](**sizes, **more)
    return Block(branch, **{name: value for name, value in given.items() if name != "branch"})


def _fields(of: Any) -> dict[str, Any]:
    """Fields that JSON can hold; numbers of parameters as floats."""
    values = {each.name: getattr(of, each.name) for each in dataclasses.fields(of)}
    own = {name: value for name, value in values.items() if name not in ("branch", "pattern")}
    return {name: float(x) if isinstance(x, np.ndarray) or hasattr(x, "dtype") else x for name, x in own.items()}


def unlike_blocks(declared: Stack, found: Stack) -> list[str]:
    """Differences of two stacks that no weights change, in words."""
    kinds, others = ([block.part_name for block in stack.layers] for stack in (declared, found))
    if kinds != others:
        return [f"its layers are {' and '.join(others)}, those declared {' and '.join(kinds)}"]
    lines = []
    for own, other in zip(declared.layers, found.layers, strict=True):
        assert isinstance(own, Block)
        assert isinstance(other, Block)
        one, two = _facts(own), _facts(other)
        unlike = (name for name in one if one[name] != two[name])
        lines += [f"{own.part_name}: {name} {two[name]}, declared {one[name]}" for name in unlike]
    return lines


def _facts(block: Block) -> dict[str, Any]:
    branch = block.branch
    found: dict[str, Any] = {"norm": block.norm, "position": block.position, "skip": round(block.skip, 3)}
    match branch:
        case SelfAttention():
            rope = None if branch.rope is None else float(f"{branch.rope:.2g}")
            found |= {"heads": branch.heads, "key_value_heads": branch.groups, "rope": rope}
            found |= {"mask": branch.pattern.rows or ("causal" if branch.pattern.causal else None)}
        case MLP():
            found |= {"activation": branch.activation, "gated": branch.gated, "expansion": round(branch.expansion, 3)}
    return found
