"""Blocks as the graph of a pass shows them, and branches that are none. Tests: `tests/blocks/test_of.py`."""

import dataclasses
from typing import Any, Literal

from sdeinfer._files import InputError
from sdeinfer.covariance import Pattern
from sdeinfer.passes._taps import Branch

OF_ATTENTION = ("query", "key", "value", "attention output")
OF_MLP = ("gate", "up", "mlp output")
"""Roles of the matrices of a branch; the last is that of its last matrix."""

type Position = Literal["pre", "post"] | None
"""The place of a norm: before the branch, after the sum, or nowhere."""


@dataclasses.dataclass(eq=False)
class BranchFacts:
    """A branch as a block.

    Attributes:
        branch: the branch.
        position: where its norm is.
        norms: the kinds that its norm may be, by its values.
        shape: sizes and kinds that all layers have in common.
        factors: numbers of the pass.
        activations: the activations that its values allow, with their errors.
        pattern: which tokens each token attends to.
    """

    branch: Branch
    position: Position
    norms: set[str] = dataclasses.field(default_factory=lambda: {"layer", "rms"})
    shape: dict[str, Any] = dataclasses.field(default_factory=dict)
    factors: dict[str, float] = dataclasses.field(default_factory=dict)
    activations: dict[str, float] = dataclasses.field(default_factory=dict)
    pattern: Pattern = dataclasses.field(default_factory=Pattern)

    @property
    def common(self) -> dict[str, Any]:
        """The facts that all layers must have in common, by their names in messages."""
        return {"place of the norm": self.position, "mask": self.pattern, **self.shape}


def facts_of(branch: Branch, count: int) -> BranchFacts:
    """The facts of the graph; an InputError for a branch that no block is."""
    link, roles = branch.link, {*branch.matrices}
    if link.kind not in ("attention", "mlp"):
        raise InputError(f"model: {branch.where}: blocks have attention and MLPs, no {link.kind}")
    branch.require_one_reading()
    known = OF_ATTENTION if link.kind == "attention" else OF_MLP
    if left := sorted(roles - {*known}):
        name = branch.matrices[left[0]][0][0].name
        raise InputError(f"model: {branch.where}: {name} ({left[0]}) is no matrix of a block")
    for role in roles:
        if len(branch.matrices[role]) > 1:
            names = ", ".join(matrix.name for matrix, _ in branch.matrices[role][:2])
            raise InputError(f"model: {branch.where}: has several matrices of {role} ({names})")
        matrix, node = branch.matrices[role][0]
        if matrix.roles or node.kind != "product":
            raise InputError(f"model: {branch.where}: the layout of {matrix.name} is not that of one matrix")
    needed = OF_ATTENTION if link.kind == "attention" else OF_MLP[1:]
    if missing := [role for role in needed if role not in roles]:
        raise InputError(f"model: {branch.where}: has no matrix of {missing[0]}")
    if len(link.writers) != 1:
        raise InputError(f"model: {branch.where}: adds the sum of {len(link.writers)} matrices")
    writer = link.writers[0]
    if branch.norms.of_branch or writer.normed:
        raise InputError(f"model: {branch.where}: has a norm of what it adds")
    if writer.gated:
        raise InputError(f"model: {branch.where}: has a gate of what it adds")
    if branch.norms.back > 0:
        raise InputError(f"model: {branch.where}: reads the stream before the branch beside it")
    return BranchFacts(branch, _place_of_norm(branch, count))


def _place_of_norm(branch: Branch, count: int) -> Position:
    """Before the branch ("pre"), after the sum ("post"), or None without a norm."""
    before = bool(branch.norms.before)
    last = branch.place + 1 == count  # the norm after it may be that of the whole network
    after = branch.norms.after_sum and not (last and count > 1 and not branch.link.normed)
    if before and (branch.link.normed or (after and not last)):
        raise InputError(f"model: {branch.where}: has norms before the branch and after the sum")
    if before:
        return "pre"
    return "post" if after else None
