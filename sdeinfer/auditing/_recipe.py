"""Recipes of initialisation, and the blocks that they declare."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Literal

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np

from sdeinfer._arguments import shown
from sdeinfer._files import InputError
from sdeinfer.blocks import MLP, Block, SelfAttention
from sdeinfer.layers import AbstractLayer, Stack

Role = Literal["query", "key", "value", "attention output", "gate", "up", "mlp output"]


@dataclasses.dataclass(frozen=True)
class Matrix:
    """A weight matrix as a recipe sees it.

    Attributes:
        role: its place in the branch.
        fan_in: number of its inputs.
        fan_out: number of its outputs.
        width: n, the width of the residual stream.
        layers: L, the number of Transformer layers, each of an attention and an MLP branch.
    """

    role: Role
    fan_in: int
    fan_out: int
    width: int
    layers: int

    @property
    def last(self) -> bool:
        """Whether it is the last matrix of its branch."""
        return self.role in ("attention output", "mlp output")


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A rule that gives the weights of a Transformer their standard deviations.

    Attributes:
        name: its name in sentences.
        source: where it is defined: a paper with its equation or table, or a file of a library.
        sd: standard deviation of the entries of a matrix.
        bias_sd: standard deviation of the entries of the bias that is added after a matrix.
        multiplier: the factor of every branch in the forward pass, a function of L.
        skip: the factor of the residual stream in every sum, a function of L.
        temperature: the softmax temperature over √d_k, a function of d_k: √d_k for logits that are divided by d_k.
        factors: by name, factors of the standard deviation of a matrix and, for a last matrix, of the multiplier: those
            that an implementation may miss.
    """

    name: str
    source: str
    sd: Callable[[Matrix], float]
    bias_sd: Callable[[Matrix], float] = lambda matrix: 0.0
    multiplier: Callable[[int], float] = lambda layers: 1.0
    skip: Callable[[int], float] = lambda layers: 1.0
    temperature: Callable[[int], float] = lambda size: 1.0
    factors: Callable[[Matrix], Mapping[str, float]] = lambda matrix: {}


def declared(architecture: Stack, recipe: Recipe, *, width: int, layers: int) -> Stack:
    """The blocks of an architecture with the strengths, gains, temperatures and biases of a recipe.

    A branch has one gain. In attention it is that of the values; other variances of queries and keys are a factor of
    the temperature. In a gated MLP it is that of the gate, the argument of the activation; another variance of what the
    gate multiplies is a factor of the strength.

    Arguments:
        architecture: the blocks of one layer; only its structure counts.
        recipe: the recipe.
        width: n.
        layers: L.

    Raises:
        InputError: if the recipe gives a standard deviation that is not positive, biases of the first matrices of a
            branch that are not in proportion to their weights, or another branch than `SelfAttention` and `MLP`; and
            for a width that a block does not support.
    """
    architecture.check_width(width)
    blocks = [_require_block(layer) for layer in architecture.layers]
    return Stack(tuple(_declared_block(block, recipe, width, layers) for block in blocks))


def recipe_for(blocks: AbstractLayer, *, name: str = "the given architecture", source: str = "the user") -> Recipe:
    """The recipe that declares given blocks, which the forward pass leaves alone: the inverse of `declared`.

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
    found: dict[Role, tuple[float, float]] = {}
    for block in layers:
        own = _gains_and_biases(block)
        if own.keys() & found.keys() or block.skip != layers[0].skip:
            raise InputError("architecture: a recipe is for one branch of each kind and one factor of the stream")
        found |= own

    def of(matrix: Matrix) -> tuple[float, float]:
        if matrix.role not in found:
            raise InputError(f"recipe: {name} has no {matrix.role}")
        return found[matrix.role]

    return Recipe(
        name,
        source,
        lambda matrix: math.sqrt(of(matrix)[0] / matrix.fan_in),
        lambda matrix: math.sqrt(of(matrix)[1]),
        skip=lambda count: layers[0].skip,
    )


def roles_of(block: Block) -> tuple[Role, ...]:
    """The matrices of a block, the last of its branch at the end."""
    return tuple(_gains_and_biases(block))


def _gains_and_biases(block: Block) -> dict[Role, tuple[float, float]]:
    """The gain of each matrix, that of the last being g², and the variance of its biases."""
    branch, last = block.branch, (float(block.strength) ** 2, block.bias)
    match branch:
        case SelfAttention():
            first, temperature = (float(branch.gain), branch.bias), float(branch.temperature)
            of_logits = (first[0] / temperature, first[1] / temperature)
            return {"query": of_logits, "key": of_logits, "value": first, "attention output": last}
        case MLP():
            first = (float(branch.gain), branch.bias)
            gate: dict[Role, tuple[float, float]] = {"gate": first} if branch.gated else {}
            return {**gate, "up": first, "mlp output": last}
    raise _no_block(branch)


def matrices(block: Block, *, width: int, layers: int) -> dict[Role, Matrix]:
    """The weight matrices of a block by their roles; the last one is the last of its branch."""
    *first, last = roles_of(block)
    branch, tokens = block.branch, 1
    if isinstance(branch, SelfAttention):
        tokens = sum(branch.pattern.prompts) or len(branch.pattern.rows) or 1
    hidden = functools.partial(branch.hidden, key=jr.key(0))
    u = of_keys = jax.eval_shape(hidden, jax.ShapeDtypeStruct((tokens, width), jnp.float32)).shape[1]
    if isinstance(branch, SelfAttention):
        of_keys = u // branch.heads * branch.groups
    sizes: dict[Role, tuple[int, int]]
    sizes = {role: (width, of_keys if role in ("key", "value") else u) for role in first}
    sizes[last] = u, width
    return {role: Matrix(role, *size, width=width, layers=layers) for role, size in sizes.items()}


def _require_block(layer: AbstractLayer) -> Block:
    if not isinstance(layer, Block):
        raise _no_block(layer)
    return layer


def _no_block(given: object) -> InputError:
    return InputError(f"architecture: a recipe is for blocks of SelfAttention and MLP, got {shown(given)}")


def _declared_block(block: Block, recipe: Recipe, width: int, layers: int) -> Block:
    of_role = matrices(block, width=width, layers=layers)
    # Gains, that of the last matrix being g², and variances of biases.
    gain, bias = {}, {}
    for role, matrix in of_role.items():
        gain[role], bias[role] = _gain_and_bias(matrix, recipe)
    *first, last = of_role
    # One variance of biases serves all first matrices if each has the same ratio to its weights.
    ratios = [bias[role] / gain[role] for role in first]
    if not np.allclose(ratios, ratios[0], rtol=1e-6, atol=0.0):
        raise InputError(
            f"recipe: {recipe.name} has biases of first matrices of a branch that are not in proportion to their"
            " weights: no block has those"
        )
    multiplier = _positive(recipe.multiplier(layers), "multiplier", recipe)
    strength, branch = multiplier * math.sqrt(gain[last]), block.branch
    if isinstance(branch, SelfAttention):
        temperature = _positive(recipe.temperature(of_role[last].fan_in // branch.heads), "temperature", recipe)
        temperature *= gain["value"] / math.sqrt(gain["query"] * gain["key"])
        branch = dataclasses.replace(branch, gain=gain["value"], bias=bias["value"], temperature=temperature)
    else:
        strength *= math.sqrt(gain["up"] / gain[first[0]])
        branch = dataclasses.replace(branch, gain=gain[first[0]], bias=bias[first[0]])
    skip = _positive(recipe.skip(layers), "skip", recipe)
    return dataclasses.replace(block, branch=branch, strength=strength, skip=skip, bias=multiplier**2 * bias[last])


def _gain_and_bias(matrix: Matrix, recipe: Recipe) -> tuple[float, float]:
    sd = _positive(recipe.sd(matrix), f"standard deviation of the {matrix.role}", recipe)
    bias = recipe.bias_sd(matrix)
    if not 0 <= bias < math.inf:
        raise InputError(f"recipe: the biases of the {matrix.role} have the standard deviation {bias} in {recipe.name}")
    return matrix.fan_in * sd**2, bias**2


def _positive(value: float, name: str, recipe: Recipe) -> float:
    if not 0 < value < math.inf:
        raise InputError(f"recipe: the {name} must be positive, and is {value} in {recipe.name}")
    return float(value)
