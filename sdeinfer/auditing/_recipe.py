"""What a recipe of initialisation declares, and the blocks that follow from it."""

import dataclasses
from collections.abc import Callable
from typing import Literal

from sdeinfer.layers import Stack

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


def _zero(matrix: Matrix) -> float:
    del matrix
    return 0.0


def _one(size: int) -> float:
    del size
    return 1.0


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
    """

    name: str
    source: str
    sd: Callable[[Matrix], float]
    bias_sd: Callable[[Matrix], float] = _zero
    multiplier: Callable[[int], float] = _one
    skip: Callable[[int], float] = _one
    temperature: Callable[[int], float] = _one


def declared(architecture: Stack, recipe: Recipe, *, width: int, layers: int) -> Stack:
    """The blocks of an architecture with the strengths, gains, temperatures and biases of a recipe.

    Arguments:
        architecture: the blocks of one layer; only its structure counts.
        recipe: the recipe.
        width: n.
        layers: L.

    Raises:
        InputError: if the recipe gives a standard deviation that is not positive, and for a width that a block does not
            support.
    """
    raise NotImplementedError
