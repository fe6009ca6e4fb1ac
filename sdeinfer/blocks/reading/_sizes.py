"""Gains, strengths and temperatures of blocks, of all layers together. Tests: `tests/blocks/test_of.py`."""

import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from sdeinfer._files import InputError
from sdeinfer.blocks._attention import SelfAttention
from sdeinfer.blocks._block import Block
from sdeinfer.blocks._experts import Experts
from sdeinfer.blocks._latent import LatentAttention
from sdeinfer.blocks._mlp import MLP
from sdeinfer.blocks.reading._facts import ROLES, BranchFacts
from sdeinfer.blocks.reading._latent import latent_matrices
from sdeinfer.blocks.reading._pass_values import with_bias
from sdeinfer.passes._account import Account, Matrix
from sdeinfer.passes._taps import Branch

type Variance = Callable[[Matrix], float]
"""The variance of a matrix's entries."""


def block_of(account: Account, layers: list[BranchFacts], variance: Variance) -> Block:
    """The block of a branch, from that of each layer, with mean squares over layers."""
    first = layers[0]
    where = first.branch.where
    sizes = Sizes(account, layers, variance)
    match first.family:
        case "attention":
            branch, of_linear = _attention(sizes)
        case "latent attention":
            branch, of_linear = _latent_attention(sizes)
        case "mlp":
            branch, of_linear = _mlp(sizes)
        case "experts":
            branch, of_linear = _experts(sizes)
    output_norms = [facts.output_norms for facts in layers if facts.output_norms is not None]
    after: dict[str, Any] = {}
    if output_norms:
        gains = (facts.gains["increment"].value for facts in layers)
        after = {"output_norm": _common_norm(output_norms, where), "output_gain": _mean(gains)}
        # Layers whose increments are large do not show it.
        after["output_epsilon"] = max(facts.factors["epsilon"] for facts in layers)
    return Block(
        branch,
        math.sqrt(sizes.last_square * of_linear / float(branch.gain)),
        norm=None if first.position is None else _common_norm([facts.norms for facts in layers], where),
        position=first.position or "pre",
        skip=_skip(layers),
        bias=sizes.last_bias,
        **after,
    )


class Sizes:
    """Mean squares of the weights of a branch over layers, as gains.

    Attributes:
        layers: the facts of the branch in each layer.
        width: n.
        last_square: u σ² of the last matrix, with the factor of the branch in the sum.
        last_bias: the variance of its biases, likewise.
    """

    def __init__(self, account: Account, layers: list[BranchFacts], variance: Variance):
        self.account, self.layers, self.variance = account, layers, variance
        self.branches = [facts.branch for facts in layers]
        self.width = self.branches[0].link.sum.shape[-1]
        self._read = _mean(_gain_of_norm(branch) ** 2 for branch in self.branches)
        last = ROLES[layers[0].family][-1]
        factors = [_factor_of_last(branch) ** 2 for branch in self.branches]
        squares = zip(self.branches, factors, strict=True)
        self.last_square = _mean(self.square(b, last) * _units(b, last) * c for b, c in squares)
        self.last_bias = _mean(self._bias(b, last) * c for b, c in zip(self.branches, factors, strict=True))

    def square(self, branch: Branch, role: str) -> float:
        """The mean square of the entries of the matrices of a role."""
        return _mean(self.variance(matrix) for matrix, _ in branch.matrices[role])

    def gain(self, role: str) -> float:
        """The gain w = n σ² of the matrices of a role that read the tokens, with that of the norm before them."""
        return self.gain_of(_mean(self.square(branch, role) for branch in self.branches))

    def gain_of(self, square: float) -> float:
        """The gain w = n σ² of entries with a mean square σ²."""
        return self.width * self._read * square

    def bias(self, *roles: str) -> float:
        """The variance of the biases of first matrices, which has to be the same for all roles."""
        where = self.branches[0].where
        known = [role for role in roles if role in self.branches[0].matrices]
        biases = [_mean(self._bias(branch, role) for branch in self.branches) for role in known]
        if max(biases) - min(biases) > 0.05 * max(biases):
            raise InputError(f"model: {where}: biases of its first matrices have several variances")
        return _mean(biases)

    def factor(self, name: str) -> float:
        """The mean of a number of the pass over layers."""
        return _mean(facts.factors[name] for facts in self.layers)

    def _bias(self, branch: Branch, role: str) -> float:
        """The mean square of the biases after a matrix."""
        matrix, product = branch.matrices[role][0]
        names = {*with_bias(self.account, product).parameters} - {matrix.array}
        biases = [bias for bias in self.account.matrices.values() if bias.array in names and bias.of in (role, "")]
        return _mean(self.variance(bias) for bias in biases) if biases else 0.0


def _attention(sizes: Sizes) -> tuple[SelfAttention, float]:
    """The branch, and the gain of its values."""
    shape, facts = dict(sizes.layers[0].shape), sizes.layers[0]
    values = sizes.gain("value")
    gain = values if shape["qk_norm"] else math.sqrt(sizes.gain("query") * sizes.gain("key"))
    if shape.pop("sink"):
        shape["sink"] = float(f"{sizes.factor('sink'):.3g}")
    if shape["key_value_heads"] == shape["heads"]:
        del shape["key_value_heads"]
    if shape["head_size"] * shape["heads"] == sizes.width:
        del shape["head_size"]
    bias = sizes.bias("query", "key", "value")
    return SelfAttention(1 / sizes.factor("logits"), gain, pattern=facts.pattern, bias=bias, **shape), values


def _latent_attention(sizes: Sizes) -> tuple[LatentAttention, float]:
    """The branch, and the gain of its values."""
    facts = sizes.layers[0]
    squares = {name: [] for name in ("queries", "compressed keys", "keys and values")}
    for layer in sizes.layers:
        for name, (matrix, _) in latent_matrices(layer).items():
            if name in squares:
                squares[name].append(sizes.variance(matrix))
    of_queries, of_shared, of_keys = (_mean(values) for values in squares.values())
    rank = facts.shape["query_rank"] or sizes.width
    queries = rank * of_queries * sizes.factor("read by query")
    keys = facts.shape["key_rank"] * of_keys * sizes.factor("read by key")
    gain = math.sqrt(queries * keys)
    shared = sizes.gain_of(of_shared) * queries / gain
    branch = LatentAttention(1 / sizes.factor("logits"), gain, shared, pattern=facts.pattern, **facts.shape)
    return branch, keys


def _mlp(sizes: Sizes) -> tuple[MLP, float]:
    """The branch, and the gain of its linear side."""
    shape, up = sizes.layers[0].shape, sizes.gain("up")
    gain = sizes.gain("gate") if shape["gated"] else up
    return MLP(gain, _activation(sizes.layers), bias=sizes.bias("gate", "up"), **shape), up


def _experts(sizes: Sizes) -> tuple[Experts, float]:
    """The branch, and the gain of the linear side of its experts."""
    shape, up = sizes.layers[0].shape, sizes.gain("up")
    gain = sizes.gain("gate") if "gate" in sizes.branches[0].matrices else up
    router = sizes.gain("router")
    return Experts(gain, router=router, activation=_activation(sizes.layers), **shape), up


def _activation(layers: list[BranchFacts]) -> str:
    """The activation of all layers, the nearest if their inputs are too small to tell several apart."""
    common = set.intersection(*({*facts.activations} for facts in layers))
    if not common:
        raise InputError(f"model: {layers[0].branch.where}: layers have several activations")
    return min(sorted(common), key=lambda name: sum(facts.activations[name] for facts in layers))


def _common_norm(norms: list[set[str]], where: str) -> Any:
    """The norm of all layers, "layer" or "rms"."""
    common = set.intersection(*norms)
    if not common:
        raise InputError(f"model: {where}: layers have several norms")
    return "layer" if "layer" in common else "rms"


def _gain_of_norm(branch: Branch) -> float:
    factor = branch.readings[0].factor
    return factor if math.isfinite(factor) and branch.norms.reads_normed else 1.0


def _units(branch: Branch, role: str) -> int:
    """The number of features that the matrices of a role read; those of experts are more than a shared one."""
    sizes = [matrix.fan_in for matrix, _ in branch.matrices[role]]
    return max(sizes, key=sizes.count)


def _factor_of_last(branch: Branch) -> float:
    """The factor of the last matrix in the sum, which no norm takes away."""
    return 1.0 if branch.norm is not None else branch.writers[-1].factor


def _skip(layers: list[BranchFacts]) -> float:
    # The first sum of a stream may also have the factor of an embedding.
    branches = [facts.branch for facts in layers if facts.branch.link.before] or [facts.branch for facts in layers]
    skips = {round(branch.link.skip.factor, 6) for branch in branches}
    if len(skips) > 1:
        raise InputError(f"model: {layers[0].branch.where}: factors of the stream differ between layers")
    return skips.pop()


def _mean(values: Iterable[float]) -> float:
    return float(np.mean([*values]))
