"""Gains, strengths and temperatures of blocks, of all layers together. Tests: `tests/blocks/test_of.py`."""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from sdeinfer._files import InputError
from sdeinfer.blocks._attention import SelfAttention
from sdeinfer.blocks._block import Block
from sdeinfer.blocks._facts import OF_ATTENTION, OF_MLP, BranchFacts
from sdeinfer.blocks._mlp import MLP
from sdeinfer.blocks._reader import with_bias
from sdeinfer.passes._account import Account, Matrix
from sdeinfer.passes._taps import Branch

type Variance = Callable[[Matrix], float]
"""The variance of a matrix's entries."""


def block_of(account: Account, layers: list[BranchFacts], variance: Variance) -> Block:
    """The block of a branch, from that of each layer, with mean squares over layers."""
    width = layers[0].branch.link.sum.shape[-1]
    first, branches = layers[0], [each.branch for each in layers]
    *roles, last = [role for role in (*OF_ATTENTION, *OF_MLP) if role in first.branch.matrices]
    read = _mean(_gain_of_norm(branch) ** 2 for branch in branches)
    gains = {role: width * read * _mean(variance(x.matrices[role][0][0]) for x in branches) for role in roles}
    biases = {_mean(_bias(account, branch, role, variance) for branch in branches) for role in roles}
    if max(biases) - min(biases) > 0.05 * max(biases):
        raise InputError(f"model: {first.branch.where}: biases of its first matrices have several variances")
    added = [(branch, branch.link.writers[0].factor ** 2) for branch in branches]
    square = _mean(variance(x.matrices[last][0][0]) * x.matrices[last][0][0].fan_in * factor for x, factor in added)
    if first.branch.link.kind == "attention":
        gain, of_linear = math.sqrt(gains["query"] * gains["key"]), gains["value"]
        temperature = 1 / _mean(each.factors["logits"] for each in layers)
        sizes = _without_defaults(first.shape, width)
        branch: Any = SelfAttention(temperature, gain, pattern=first.pattern, bias=_mean(biases), **sizes)
    else:
        gain, of_linear = gains.get("gate", gains["up"]), gains["up"]
        branch = MLP(gain, _activation(layers), bias=_mean(biases), **first.shape)
    norms = set.intersection(*(each.norms for each in layers))
    if not norms:
        raise InputError(f"model: {first.branch.where}: layers have several norms")
    return Block(
        branch,
        math.sqrt(square * of_linear / gain),
        norm=None if first.position is None else "layer" if "layer" in norms else "rms",
        position=first.position or "pre",
        skip=_skip(layers),
        bias=_mean(_bias(account, x, last, variance) * factor for x, factor in added),
    )


def _activation(layers: list[BranchFacts]) -> str:
    """The activation of all layers, the nearest if their inputs are too small to tell several apart."""
    common = set.intersection(*({*each.activations} for each in layers))
    if not common:
        raise InputError(f"model: {layers[0].branch.where}: layers have several activations")
    return min(sorted(common), key=lambda name: sum(each.activations[name] for each in layers))


def _bias(account: Account, branch: Branch, role: str, variance: Variance) -> float:
    """The mean square of the biases after a matrix."""
    matrix, product = branch.matrices[role][0]
    names = {*with_bias(account, product).parameters} - {matrix.array}
    found = [each for each in account.matrices.values() if each.array in names and each.of in (role, "")]
    return _mean(variance(each) for each in found) if found else 0.0


def _gain_of_norm(branch: Branch) -> float:
    factor = branch.readings[0].factor
    return factor if math.isfinite(factor) and branch.norms.before else 1.0


def _skip(layers: list[BranchFacts]) -> float:
    # The first sum of a stream may also have the factor of an embedding.
    own = [each.branch for each in layers if each.branch.place] or [each.branch for each in layers]
    found = {round(branch.link.skip.factor, 6) for branch in own}
    if len(found) > 1:
        raise InputError(f"model: {layers[0].branch.where}: factors of the stream differ between layers")
    return found.pop()


def _mean(values: Iterable[float]) -> float:
    return float(np.mean([*values]))


def _without_defaults(shape: Mapping[str, Any], width: int) -> dict[str, Any]:
    """Sizes of attention as a user would write them."""
    own = dict(shape)
    if own["key_value_heads"] == own["heads"]:
        del own["key_value_heads"]
    if own["head_size"] * own["heads"] == width:
        del own["head_size"]
    return own
