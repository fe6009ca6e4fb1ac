"""Blocks as the graph of a pass shows them, and branches that are none. Tests: `tests/blocks/test_of.py`."""

import dataclasses
import math
from typing import Any, Literal, NamedTuple

from sdeinfer._files import InputError
from sdeinfer.covariance import Pattern
from sdeinfer.passes._account import Account
from sdeinfer.passes._record import Node
from sdeinfer.passes._taps import Branch

ROLES = {
    "attention": ("query", "key", "value", "attention output"),
    "latent attention": ("reads", "query", "key", "value", "attention output"),
    "mlp": ("gate", "up", "mlp output"),
    "experts": ("router", "gate", "up", "mlp output"),
}
"""Roles of the matrices of a branch by its family; the last is that of its last matrix."""


class NormGain(NamedTuple):
    """The gain of a norm, as it is used.

    Attributes:
        value: what the norm itself multiplies by; of an increment with all later factors, 1 + w where it is so.
        names: the parameters that it is multiplied by.
    """

    value: float
    names: tuple[str, ...]


@dataclasses.dataclass(eq=False)
class BranchFacts:
    """A branch as a block.

    Attributes:
        branch: the branch.
        position: where its norm is, before the branch or after the sum.
        norms: the kinds that its norm may be, by its values.
        output_norms: the kinds that a norm of its increment may be; None without one.
        shape: sizes and kinds that all layers have in common.
        factors: numbers of the pass.
        gains: the gains of norms inside of the branch: "increment", "queries" and "keys".
        activations: the activations that its values allow, with their errors.
        pattern: which tokens each token attends to.
    """

    branch: Branch
    position: Literal["pre", "post"] | None
    norms: set[str] = dataclasses.field(default_factory=lambda: {"layer", "rms"})
    output_norms: set[str] | None = None
    shape: dict[str, Any] = dataclasses.field(default_factory=dict)
    factors: dict[str, float] = dataclasses.field(default_factory=dict)
    gains: dict[str, NormGain] = dataclasses.field(default_factory=dict)
    activations: dict[str, float] = dataclasses.field(default_factory=dict)
    pattern: Pattern = dataclasses.field(default_factory=Pattern)

    @property
    def common(self) -> dict[str, Any]:
        """The facts that all layers must have in common, by their names in messages."""
        return {"place of the norm": self.position, "mask": self.pattern, **self.shape}

    @property
    def family(self) -> Literal["attention", "latent attention", "mlp", "experts"]:
        """The type of the block's branch."""
        matrices = self.branch.matrices
        if self.branch.kind == "mlp":
            return "experts" if "router" in matrices else "mlp"
        return "latent attention" if "reads" in matrices or len(matrices.get("key", ())) > 1 else "attention"


def branch_facts(branch: Branch, *, last: bool) -> BranchFacts:
    """The facts of the graph; an InputError for a branch that no block is. `last` is for those of the last sum."""
    if branch.kind not in ("attention", "mlp"):
        raise InputError(f"model: {branch.where}: blocks have attention and MLPs, no {branch.kind}")
    branch.require_one_reading()
    if branch.norms.back > 0 and not branch.beside:
        raise InputError(f"model: {branch.where}: reads the stream before the branch before it")
    facts = BranchFacts(branch, _place_of_norm(branch, last=last))
    if unknown := sorted({*branch.matrices} - {*ROLES[facts.family]}):
        name = branch.matrices[unknown[0]][0][0].name
        raise InputError(f"model: {branch.where}: {name} ({unknown[0]}) is no matrix of a block")
    if facts.family in ("attention", "mlp"):
        _require_one_matrix_a_role(facts)
    if facts.family != "experts" and len(branch.writers) != 1:
        raise InputError(f"model: {branch.where}: adds the sum of {len(branch.writers)} matrices")
    if branch.norm is None and (branch.norms.of_branch or any(writer.normed for writer in branch.writers)):
        raise InputError(f"model: {branch.where}: has a norm of what it adds that is followed by another operation")
    if facts.family != "experts" and branch.writers[0].gated:
        raise InputError(f"model: {branch.where}: has a gate of what it adds")
    return facts


def _require_one_matrix_a_role(facts: BranchFacts) -> None:
    branch = facts.branch
    for matrices in branch.matrices.values():
        matrix, node = matrices[0]
        if len(matrices) > 1:
            names = ", ".join(matrix.name for matrix, _ in matrices[:2])
            raise InputError(f"model: {branch.where}: has several matrices of {matrix.role} ({names})")
        if matrix.roles or node.kind != "product":
            raise InputError(f"model: {branch.where}: the layout of {matrix.name} is not that of one matrix")
    needed = [role for role in ROLES[facts.family] if role != "gate"]
    if missing := [role for role in needed if role not in branch.matrices]:
        raise InputError(f"model: {branch.where}: has no matrix of {missing[0]}")


def _place_of_norm(branch: Branch, *, last: bool) -> Literal["pre", "post"] | None:
    """Before the branch ("pre"), after the sum ("post"), or None without a norm."""
    before = bool(branch.norms.reads_normed)
    # The norm after the last sum may be that of the whole network.
    after = branch.norms.after_sum and not (last and branch.place and not branch.link.normed)
    if before and (branch.link.normed or (after and not last)):
        raise InputError(f"model: {branch.where}: has norms before the branch and after the sum")
    if before:
        return "pre"
    return "post" if after else None


def gain_of(account: Account, norm: Node) -> NormGain:
    """The gain that a norm has itself, and the parameters that multiply it, there or later."""
    readers, names, node = account.graph.record.readers, [*norm.parameters[:1]], norm
    gain = math.prod(account.gains[name][0][0] for name in names if name in account.gains)
    while len(following := readers[node.number]) == 1 and following[0].kind in ("scale", "view"):
        (node,) = following
        names += [name for name in node.parameters if node.kind == "scale"]
    return NormGain(gain, tuple(names))
