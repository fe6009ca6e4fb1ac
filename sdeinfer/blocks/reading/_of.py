"""A model as a stack of blocks, read from one pass. Tests: `tests/blocks/test_of.py`."""

import dataclasses
import math
from typing import Any

import numpy as np
from jaxtyping import Float

from sdeinfer._files import InputError
from sdeinfer.blocks._parallel import Parallel
from sdeinfer.blocks.reading._reader import StackReader
from sdeinfer.blocks.reading._sizes import Variance, block_of
from sdeinfer.layers import Stack
from sdeinfer.passes._account import Account, Matrix
from sdeinfer.passes._models import made
from sdeinfer.passes._passes import Passes
from sdeinfer.passes._taps import branches_of


def of(model: Any, inputs: Any = None, *, recipe: Any = None, stream: str | None = None, seed: int = 0) -> Stack:
    """A model as the blocks of one of its layers, read from one forward pass and its weights.

    Strengths, gains and temperatures are those of the weights as they are, pooled over layers; by a recipe those that
    it declares. A factor of a branch, a gain of a norm and a LayerScale count as factors of the weights.

    Arguments:
        model: a module of PyTorch, Flax or Equinox, or a function that makes one, as `si.audit` takes it.
        inputs: the model's input, see `si.audit`; None for tokens, images or vectors that fit.
        recipe: a recipe of `si.audit`, or its name, for the standard deviations that are declared.
        stream: a glob of parameter names that finds the stream in a model with several, as "decoder.*".
        seed: seed of the weights, if `model` is a function.

    Returns:
        The `Stack`, for `si.tune`, `si.fit(si.models.branches, …)` and `si.sample_branches`.

    Raises:
        InputError: for what no block has, with layer and module.
    """
    return network_of(model, inputs, recipe=recipe, stream=stream, seed=seed).stack


@dataclasses.dataclass(frozen=True, eq=False)
class NetworkOfBlocks:
    """A model as the blocks of one layer, with the covariances of the tokens before the first."""

    stack: Stack
    depth: int
    width: int
    V0: Float[np.ndarray, "prompts m m"]


def network_of(
    model: Any, inputs: Any = None, *, recipe: Any = None, stream: str | None = None, seed: int = 0
) -> NetworkOfBlocks:
    """A model as blocks, with its sizes and the tokens before its first layer; see `of`."""
    network = made(model, seed)
    reader = reader_of(network, inputs, stream)
    stack, X = stack_from(reader, variance_of(reader.account, network, recipe)), reader.start
    assert X is not None
    prompts = X.reshape(-1, *X.shape[-2:])[: None if inputs is not None else 1]
    return NetworkOfBlocks(stack, reader.branches[-1].link.layer + 1, reader.width, prompts @ prompts.mT / reader.width)


def reader_of(network: Any, inputs: Any = None, stream: str | None = None) -> StackReader:
    """The reader of a network's blocks, after the pass whose values it takes."""
    return Passes(inputs).show(network, lambda account: StackReader(account, branches_of(account, stream)))


def stack_from(reader: StackReader, variance: Variance) -> Stack:
    """The blocks of one layer, with the numbers of all layers together."""
    layers = reader.layers()
    blocks = tuple(block_of(reader.account, [*column], variance) for column in zip(*layers, strict=True))
    beside = [facts.branch.beside for facts in layers[0]]
    if not any(beside):
        return Stack(blocks)
    if not all(beside[1:]):
        raise InputError("model: some of the branches of a layer are beside each other, others are not")
    return Parallel(blocks)


def variance_of(account: Account, network: Any = None, recipe: Any = None) -> Variance:
    """The mean square of a matrix's entries, or the variance that a recipe declares."""
    rule = None
    if recipe is not None:
        from sdeinfer.auditing._audit import recipe_of

        rule = recipe_of(recipe, network)

    def variance(matrix: Matrix) -> float:
        if rule is not None:
            named = rule.declared_by_name(matrix.array)
            sd = rule.sd(matrix) if named is None else math.hypot(named.mean, named.sd)
            if sd is not None:
                return sd**2
        return float(np.square(account.parameters[matrix.name].entries()).mean())

    return variance
