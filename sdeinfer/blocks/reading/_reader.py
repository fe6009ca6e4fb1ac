"""Blocks as the values of a pass show them. Tests: `tests/blocks/test_of.py`."""

from typing import Any

import numpy as np

from sdeinfer._files import InputError
from sdeinfer.blocks.reading._attention import tap_attention
from sdeinfer.blocks.reading._facts import BranchFacts, branch_facts, gain_of
from sdeinfer.blocks.reading._latent import tap_latent_attention
from sdeinfer.blocks.reading._mlp import tap_experts, tap_mlp
from sdeinfer.blocks.reading._pass_values import float_array
from sdeinfer.blocks.reading._values import epsilon_of_norm, norms_of_values
from sdeinfer.passes._account import Account
from sdeinfer.passes._record import Node
from sdeinfer.passes._taps import Branch, Taps, in_rows, states_of

READERS = {
    "attention": tap_attention,
    "latent attention": tap_latent_attention,
    "mlp": tap_mlp,
    "experts": tap_experts,
}
"""Functions of an account, the facts of a branch, taps and faults that read a branch, by its family."""


class StackReader:
    """Reads the blocks of a stream: first the graph, then values of a second pass.

    Attributes:
        facts: of each branch, in order.
        taps: the values that the second pass has to show.
        start: tokens before the first layer, after that pass.
        faults: values that no block has, in words.
    """

    def __init__(self, account: Account, branches: list[Branch]):
        self.account, self.graph, self.branches = account, account.graph, branches
        self.width = branches[0].link.sum.shape[-1]
        self.facts = [branch_facts(branch, last=branch.link is branches[-1].link) for branch in branches]
        self.faults: list[str] = []
        self.taps = Taps()
        self.start: np.ndarray | None = None
        placed = in_rows(account, branches)

        def keep(values: dict[str, Any]) -> None:
            self.start = float_array(placed(values["X"]))

        self.taps.see("the tokens before its first layer", {"X": states_of(self.branches)[0]}, keep)
        for facts in self.facts:
            self._tap_norms(facts)
            READERS[facts.family](account, facts, self.taps, self.faults)

    def layers(self) -> list[list[BranchFacts]]:
        """The facts of each layer, whose kinds and shapes are those of the first."""
        self.taps.require_seen()
        if self.faults:
            raise InputError(f"model: {self.faults[0]}")
        by_layer: dict[int, list[BranchFacts]] = {}
        for facts in self.facts:
            by_layer.setdefault(facts.branch.link.layer, []).append(facts)
        first, *others = by_layer.values()
        for layer in others:
            _require_alike(first, layer)
        return [first, *others]

    def _tap_norms(self, facts: BranchFacts) -> None:
        """See the norm before a branch or after its sum, and that of its increment."""
        branch = facts.branch
        norm = None
        if facts.position == "pre":
            norm = branch.readings[0].origin
        elif facts.position == "post":
            following = (node for node in self.graph.record.nodes[branch.link.sum.number :] if node.kind == "norm")
            norm = next(node for node in following if self.graph.term(node.inputs[0]).origin is branch.link.sum)
        if norm is not None:
            self._tap_norm(facts, norm, "norms")
        if branch.norm is not None:
            gain = gain_of(self.account, branch.norm)
            facts.gains["increment"] = gain._replace(value=gain.value * abs(branch.norm_factor))
            self._tap_norm(facts, branch.norm, "output_norms")

    def _tap_norm(self, facts: BranchFacts, norm: Node, name: str) -> None:
        where = facts.branch.where

        def take(values: dict[str, Any]) -> None:
            x, y = (float_array(values[side]) for side in ("x", "y"))
            kinds = norms_of_values(x, y)
            if not kinds:
                self.faults.append(f"{where}: its norm is neither a LayerNorm nor an RMSNorm of its tokens")
            setattr(facts, name, kinds)
            if norm is facts.branch.norm:
                facts.factors["epsilon"] = epsilon_of_norm(x, y, gain_of(self.account, norm).value)

        self.taps.see(f"{where}: its norm", {"x": norm.inputs[0], "y": norm}, take)


def _require_alike(first: list[BranchFacts], layer: list[BranchFacts]) -> None:
    """Raise an InputError for a layer of other blocks than the first."""
    kinds, others = ([facts.branch.kind for facts in part] for part in (layer, first))
    if kinds != others:
        number = layer[0].branch.link.layer
        raise InputError(f"model: layer {number} is {' and '.join(kinds)}, layer 0 {' and '.join(others)}")
    for facts, other in zip(layer, first, strict=True):
        if facts.family != other.family:
            raise InputError(f"model: {facts.branch.where}: is {facts.family}, where layer 0 has {other.family}")
        for name, value in facts.common.items():
            if value != other.common[name]:
                raise InputError(f"model: {facts.branch.where}: {name} {value}, where layer 0 has {other.common[name]}")
