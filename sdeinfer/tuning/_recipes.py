"""Recipes of given blocks, and the weights that they declare. Tests: `tests/tuning/test_hand_over.py`."""

import dataclasses
import math
from collections.abc import Sequence

import pandas as pd

from sdeinfer._arguments import shown
from sdeinfer._files import InputError
from sdeinfer.auditing import Matrix, Recipe
from sdeinfer.blocks import MLP, Block, Experts, LatentAttention, SelfAttention
from sdeinfer.blocks._order import ATTENTIONS, BlockOrder
from sdeinfer.layers import AbstractLayer, Stack


def recipe_for(blocks: AbstractLayer, *, name: str = "the given architecture", source: str = "the user") -> Recipe:
    """The recipe that declares given blocks, which the forward pass leaves alone.

    Queries and keys have the same standard deviation, which makes the temperature; all other first matrices of a branch
    have that of its gain. Where queries and keys are normed, or increments, the gains of these norms make temperature
    and output gain: `Tuned.initialise` sets them.

    Arguments:
        blocks: the blocks of one layer, with one branch of each kind.
        name: its name in sentences.
        source: where it is from.

    Raises:
        InputError: for other branches than one attention and one MLP or mixture of experts, and for skips that differ.
    """
    layers = [_require_block(block) for block in (blocks.layers if isinstance(blocks, Stack) else (blocks,))]
    declared: dict[str, Weights] = {}
    for block in layers:
        weights = weights_of(block)
        if weights.keys() & declared.keys() or block.skip != layers[0].skip:
            raise InputError("architecture: a recipe is for one branch of each kind and one factor of the stream")
        declared |= weights

    def sd(matrix: Matrix) -> float | None:
        return declared[matrix.role].sd(matrix) if matrix.role in declared else None

    def bias_sd(matrix: Matrix) -> float | None:
        role = matrix.of or matrix.role
        return math.sqrt(declared[role].bias) if role in declared else None

    attention = next((block.branch for block in layers if isinstance(block.branch, ATTENTIONS)), None)
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
    matrices = [
        Matrix(role, *size, width=width, layers=len(recipes))
        for block in BlockOrder.of(architecture, depth=1).blocks
        for role, size in _sizes(block, width).items()
    ]
    rows = [
        {
            "layer": number,
            "matrix": matrix.role,
            "fan_in": matrix.fan_in,
            "fan_out": matrix.fan_out,
            "sd": recipe.sd(matrix),
            "bias_sd": recipe.bias_sd(matrix),
        }
        for number, recipe in enumerate(recipes)
        for matrix in matrices
    ]
    table = pd.DataFrame(rows)
    if len(dict.fromkeys(recipes)) == 1:
        table = table[table["layer"] == 0].assign(layer="all")
    return table if table["bias_sd"].to_numpy(float).any() else table.drop(columns="bias_sd")


@dataclasses.dataclass(frozen=True)
class Weights:
    """The law of the matrices of a role, as gains fan-in × σ².

    Attributes:
        gain: the gain; g² of last matrices.
        bias: the variance of the biases after them.
        units: number of inputs whose σ all matrices of the role have, as a share of n; None for their own.
        of_tokens: the gain of those with n inputs, where it is another one.
    """

    gain: float
    bias: float = 0.0
    units: float | None = None
    of_tokens: float | None = None

    def sd(self, matrix: Matrix) -> float:
        """σ of a matrix."""
        if self.of_tokens is not None and matrix.fan_in == matrix.width:
            return math.sqrt(self.of_tokens / matrix.fan_in)
        return math.sqrt(self.gain / (matrix.fan_in if self.units is None else round(self.units * matrix.width)))


def weights_of(block: Block) -> dict[str, Weights]:
    """The weights that a block declares by the roles of its matrices; the last one is the last of its branch."""
    branch, last = block.branch, Weights(float(block.strength) ** 2, block.bias)
    match branch:
        case SelfAttention():
            first = Weights(float(branch.gain), branch.bias)
            # Norms of queries and keys take their gain away.
            scale = 1.0 if branch.qk_norm else 1 / float(branch.temperature)
            of_logits = Weights(scale * first.gain, scale * first.bias)
            return {"query": of_logits, "key": of_logits, "value": first, "attention output": last}
        case LatentAttention():
            gain, temperature = float(branch.gain), float(branch.temperature)
            queries = Weights(gain / temperature**2)
            keys = Weights(gain, of_tokens=float(branch.rotated_gain))
            reads = {} if branch.query_rank is None else {"reads": Weights(1.0)}
            return {**reads, "query": queries, "key": keys, "value": keys, "attention output": last}
        case MLP():
            first = Weights(float(branch.gain), branch.bias)
            return {**({"gate": first} if branch.gated else {}), "up": first, "mlp output": last}
        case Experts():
            first, last = Weights(float(branch.gain)), dataclasses.replace(last, units=branch.expansion)
            gate = {"gate": first} if branch.gated else {}
            return {"router": Weights(branch.router), **gate, "up": first, "mlp output": last}
    raise _no_block(branch)


def _sizes(block: Block, width: int) -> dict[str, tuple[int, int]]:
    """Numbers of inputs and outputs of the matrices of a block, of experts those of one."""
    branch = block.branch
    match branch:
        case SelfAttention():
            size = width // branch.heads if branch.head_size is None else branch.head_size
            queries, keys = branch.heads * size, branch.groups * size
            first = {"query": (width, queries), "key": (width, keys), "value": (width, keys)}
            return first | {"attention output": (queries, width)}
        case LatentAttention():
            query_rank, values = branch.query_rank or width, branch.value_size or branch.head_size
            reads = {} if branch.query_rank is None else {"reads": (width, query_rank)}
            queries = (query_rank, branch.heads * (branch.head_size + branch.rotated_size))
            keys = (branch.key_rank, branch.heads * (branch.head_size + values))
            return {**reads, "query": queries, "key": keys, "attention output": (branch.heads * values, width)}
        case MLP() | Experts():
            mlp = branch.expert if isinstance(branch, Experts) else branch
            roles = [role for role in weights_of(block) if role in ("gate", "up")]
            router = {"router": (width, branch.experts)} if isinstance(branch, Experts) else {}
            units = mlp.units(width)
            return {**router, **dict.fromkeys(roles, (width, units)), "mlp output": (units, width)}
    raise _no_block(branch)


def _require_block(layer: AbstractLayer) -> Block:
    if not isinstance(layer, Block):
        raise _no_block(layer)
    return layer


def _no_block(given: object) -> InputError:
    return InputError(f"architecture: a recipe is for blocks of attention, MLPs and experts, got {shown(given)}")
