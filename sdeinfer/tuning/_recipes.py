"""Recipes of given blocks, and the weights that they declare. Tests: `tests/tuning/test_hand_over.py`."""

import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import jax.random as jr
import pandas as pd

from sdeinfer._arguments import shown
from sdeinfer._files import InputError
from sdeinfer.auditing import Matrix, Recipe
from sdeinfer.blocks import MLP, Block, SelfAttention
from sdeinfer.blocks._order import BlockOrder
from sdeinfer.layers import AbstractLayer, Stack


def recipe_for(blocks: AbstractLayer, *, name: str = "the given architecture", source: str = "the user") -> Recipe:
    """The recipe that declares given blocks, which the forward pass leaves alone.

    Queries and keys have the same standard deviation, which makes the temperature; all other first matrices of a branch
    have that of its gain.

    Arguments:
        blocks: the blocks of one layer, with one branch of each kind.
        name: its name in sentences.
        source: where it is from.

    Raises:
        InputError: for other branches than one `SelfAttention` and one `MLP`, and for skips that differ.
    """
    layers = [_require_block(each) for each in (blocks.layers if isinstance(blocks, Stack) else (blocks,))]
    found: dict[str, tuple[float, float]] = {}
    for block in layers:
        own = _gains_and_biases(block)
        if own.keys() & found.keys() or block.skip != layers[0].skip:
            raise InputError("architecture: a recipe is for one branch of each kind and one factor of the stream")
        found |= own

    def sd(matrix: Matrix) -> float | None:
        return math.sqrt(found[matrix.role][0] / matrix.fan_in) if matrix.role in found else None

    def bias_sd(matrix: Matrix) -> float | None:
        role = matrix.of or matrix.role
        return math.sqrt(found[role][1]) if role in found else None

    attention = next((each.branch for each in layers if isinstance(each.branch, SelfAttention)), None)
    causal = None if attention is None else attention.pattern.causal
    return Recipe(name, source, sd, bias_sd, skip=lambda count: layers[0].skip, gain=lambda matrix: None, causal=causal)


def standard_deviations(architecture: AbstractLayer, recipes: Sequence[Recipe], *, width: int) -> pd.DataFrame:
    """The weights of a network, for those who draw them elsewhere: one row for each matrix, and layer if these differ.

    Arguments:
        architecture: the blocks of one layer.
        recipes: a recipe for each layer.
        width: n.

    Returns:
        A table with the columns layer, matrix, fan_in, fan_out, sd and, where there are any, bias_sd.
    """
    blocks = architecture if isinstance(architecture, Stack) else Stack((architecture,))
    layers = len(recipes)
    rows = [
        {
            "layer": number,
            "matrix": role,
            "fan_in": matrix.fan_in,
            "fan_out": matrix.fan_out,
            "sd": recipe.sd(matrix),
            "bias_sd": recipe.bias_sd(matrix),
        }
        for number, recipe in enumerate(recipes)
        for own in _matrices(blocks, width=width, layers=layers).values()
        for role, matrix in own.items()
    ]
    table = pd.DataFrame(rows)
    if len(dict.fromkeys(recipes)) == 1:
        table = table[table["layer"] == 0].assign(layer="all")
    return table if table["bias_sd"].to_numpy(float).any() else table.drop(columns="bias_sd")


def _matrices(architecture: Stack, *, width: int, layers: int) -> dict[str, dict[str, Matrix]]:
    """The matrices of each kind of branch."""
    return {
        block.branch.kind: matrices(block, width=width, layers=layers)
        for block in BlockOrder.of(architecture, depth=1).blocks
    }


def _gains_and_biases(block: Block) -> dict[str, tuple[float, float]]:
    """The gain of each matrix, that of the last being g², and the variance of its biases."""
    branch, last = block.branch, (float(block.strength) ** 2, block.bias)
    match branch:
        case SelfAttention():
            first, temperature = (float(branch.gain), branch.bias), float(branch.temperature)
            of_logits = (first[0] / temperature, first[1] / temperature)
            return {"query": of_logits, "key": of_logits, "value": first, "attention output": last}
        case MLP():
            first = (float(branch.gain), branch.bias)
            gate: dict[str, tuple[float, float]] = {"gate": first} if branch.gated else {}
            return {**gate, "up": first, "mlp output": last}
    raise _no_block(branch)


def matrices(block: Block, *, width: int, layers: int) -> dict[str, Matrix]:
    """The weight matrices of a block by their roles; the last one is the last of its branch."""
    *first, last = tuple(_gains_and_biases(block))
    branch, tokens = block.branch, 1
    if isinstance(branch, SelfAttention):
        tokens = sum(branch.pattern.prompts) or len(branch.pattern.rows) or 1
    hidden = functools.partial(branch.hidden, key=jr.key(0))
    u = of_keys = jax.eval_shape(hidden, jax.ShapeDtypeStruct((tokens, width), jnp.float32)).shape[1]
    if isinstance(branch, SelfAttention):
        of_keys = u // branch.heads * branch.groups
    sizes: dict[str, tuple[int, int]]
    sizes = {role: (width, of_keys if role in ("key", "value") else u) for role in first}
    sizes[last] = u, width
    return {role: Matrix(role, *size, width=width, layers=layers) for role, size in sizes.items()}


def _require_block(layer: AbstractLayer) -> Block:
    if not isinstance(layer, Block):
        raise _no_block(layer)
    return layer


def _no_block(given: object) -> InputError:
    return InputError(f"architecture: a recipe is for blocks of SelfAttention and MLP, got {shown(given)}")
