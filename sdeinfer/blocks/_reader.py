"""Blocks as the values of a pass show them. Tests: `tests/blocks/test_of.py`."""

import math
from typing import Any

import numpy as np

from sdeinfer._files import InputError
from sdeinfer.blocks._facts import OF_ATTENTION, BranchFacts, facts_of
from sdeinfer.blocks._values import activations_of_values, base_of_rotations, is_softmax, norms_of_values, pattern_of
from sdeinfer.passes._account import Account, Matrix
from sdeinfer.passes._attention import attended, attention_of, logits_of, softmaxes_in
from sdeinfer.passes._record import Node
from sdeinfer.passes._taps import Branch, Taps, in_rows, states_of


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
        self.facts = [facts_of(branch, len(branches)) for branch in branches]
        self.faults: list[str] = []
        self.taps = Taps()
        self.start: np.ndarray | None = None
        placed = in_rows(account, branches)

        def keep(values: dict[str, Any]) -> None:
            self.start = _numbers(placed(values["X"]))

        self.taps.see("the tokens before its first layer", {"X": states_of(self.branches)[0]}, keep)
        for facts in self.facts:
            if facts.position is not None:
                self._tap_norm(facts)
            (self._tap_attention if facts.branch.link.kind == "attention" else self._tap_mlp)(facts)

    def layers(self) -> list[list[BranchFacts]]:
        """The facts of each layer, whose kinds and shapes are those of the first."""
        self.taps.require_seen()
        if self.faults:
            raise InputError(f"model: {self.faults[0]}")
        found: dict[int, list[BranchFacts]] = {}
        for facts in self.facts:
            found.setdefault(facts.branch.link.layer, []).append(facts)
        first, *others = found.values()
        for layer in others:
            _require_alike(first, layer)
        return [first, *others]

    def _tap_norm(self, facts: BranchFacts) -> None:
        branch = facts.branch
        if facts.position == "pre":
            norm = branch.readings[0].origin
        else:
            following = (node for node in self.graph.record.nodes[branch.link.sum.number :] if node.kind == "norm")
            norm = next(each for each in following if self.graph.term(each.inputs[0]).origin is branch.link.sum)

        def take(values: dict[str, Any]) -> None:
            facts.norms = norms_of_values(*(_numbers(values[name]) for name in ("x", "y")))
            if not facts.norms:
                self.faults.append(f"{branch.where}: its norm is neither a LayerNorm nor an RMSNorm of its tokens")

        self.taps.see(f"{branch.where}: its norm", {"x": norm.inputs[0], "y": norm}, take)

    def _tap_mlp(self, facts: BranchFacts) -> None:
        branch = facts.branch
        gated = "gate" in branch.matrices
        matrix, up = branch.matrices["gate" if gated else "up"][0]
        other, right = branch.matrices["up"][0]
        (last, down), units = branch.matrices["mlp output"][0], branch.matrices["mlp output"][0][0].fan_in
        facts.shape = {"gated": gated, "expansion": units / self.width}

        def take(values: dict[str, Any]) -> None:
            h = _numbers(values["h"]).reshape(-1, units)
            z = _columns(values["z"], matrix)
            if gated:
                linear = _columns(values["right"], other)
                seen = np.abs(linear) > 0.1 * np.abs(linear).mean()
                h, z = h[seen] / linear[seen], z[seen]
            if h.shape != z.shape:
                self.faults.append(f"{branch.where}: {last.name} reads other units than {matrix.name} makes")
                return
            facts.activations = activations_of_values(z, h)
            if not facts.activations:
                self.faults.append(f"{branch.where}: its activation is none of si.blocks.ACTIVATIONS")

        nodes = {"z": with_bias(self.account, up), "right": with_bias(self.account, right), "h": down.inputs[0]}
        self.taps.see(f"{branch.where}: its activation", nodes, take)

    def _tap_attention(self, facts: BranchFacts) -> None:
        branch, graph = facts.branch, self.graph
        softmaxes = softmaxes_in(graph, branch.nodes)
        if len(softmaxes) != 1:
            raise InputError(f"model: {branch.where}: has {len(softmaxes)} softmaxes of queries and keys")
        (softmax,) = softmaxes
        pair = logits_of(graph, softmax)
        assert pair is not None
        logits, _ = attention_of(graph, softmax, pair, branch.link.layer, branch.nodes)
        if logits.normed:
            raise InputError(f"model: {branch.where}: has norms of queries or keys")
        if logits.over != "keys":
            raise InputError(f"model: {branch.where}: its probabilities are not those of keys alone")
        weighted = graph.term(branch.matrices["attention output"][0][1].inputs[0]).origin
        if weighted.kind != "contraction" or softmax not in [graph.term(x).origin for x in weighted.inputs]:
            raise InputError(f"model: {branch.where}: its last matrix does not read the weighted values alone")
        size = logits.head_size
        (query, product), (key, _), (value, _) = (branch.matrices[role][0] for role in OF_ATTENTION[:3])
        heads, groups = query.fan_out // size, key.fan_out // size
        if value.fan_out != groups * size:
            raise InputError(
                f"model: {branch.where}: values have {value.fan_out // groups} features a head, keys {size}"
            )
        facts.shape = {"heads": heads, "key_value_heads": groups, "head_size": size}
        facts.factors = {"logits": logits.factor * math.sqrt(size)}

        def take(values: dict[str, Any]) -> None:
            P, Y = (_numbers(values[name]) for name in ("probabilities", "logits"))
            mask = attended(P)
            if mask is None or not is_softmax(P, Y, mask):
                self.faults.append(f"{branch.where}: its logits are not qkᵀ times a factor under a mask")
                return
            facts.pattern = pattern_of(mask)
            after = _numbers(values.get("turned"))
            bases = (base_of_rotations(_numbers(values[str(x.number)]), after, len(mask)) for x in before)
            facts.shape["rope"] = next((base for base in bases if base is not None), None)
            if turned is not None and facts.shape["rope"] is None:
                self.faults.append(f"{branch.where}: queries are changed in another way than by rotations")

        turned, before = self._rotation(pair[0].inputs[0], with_bias(self.account, product))
        nodes = {"probabilities": softmax, "logits": pair[0]} | {str(x.number): x for x in before}
        nodes |= {} if turned is None else {"turned": turned}
        self.taps.see(f"{branch.where}: its logits", nodes, take)

    def _rotation(self, node: Node, product: Node) -> tuple[Node | None, list[Node]]:
        """The node of queries that are more than moved and scaled, and those of its shape before; or None."""
        while node is not product and (node.kind == "view" or node.about.get("uniform")) and node.inputs:
            node = node.inputs[0]
        if node is product:
            return None, []
        found, stack = set(), [*node.inputs]
        while stack:
            each = stack.pop()
            if each.number not in found and each.number > product.number:
                found.add(each.number)
                stack += each.inputs
        before = [self.graph.record.nodes[number] for number in sorted(found)]
        return node, [each for each in before if each.shape == node.shape and not each.fixed]


def _columns(values: Any, matrix: Matrix) -> np.ndarray:
    """The outputs of a matrix, of the product in which it is used; shape (tokens, outputs)."""
    found = _numbers(values)
    if matrix.places is not None:
        return found.reshape(-1, matrix.places.outputs)[:, matrix.places.columns]
    return found.reshape(-1, matrix.fan_out)


def with_bias(account: Account, product: Node) -> Node:
    """A product with the bias that is added to it."""
    nodes = account.graph.record.nodes[product.number + 1 :]
    own = (node for node in nodes if node.kind == "sum" and len(node.inputs) == 1 and node.parameters)
    return next((node for node in own if account.graph.term(node.inputs[0]).origin is product), product)


def _require_alike(first: list[BranchFacts], layer: list[BranchFacts]) -> None:
    """Raise an InputError for a layer of other blocks than the first."""
    kinds, others = ([each.branch.link.kind for each in part] for part in (layer, first))
    if kinds != others:
        number = layer[0].branch.link.layer
        raise InputError(f"model: layer {number} is {' and '.join(kinds)}, layer 0 {' and '.join(others)}")
    for facts, other in zip(layer, first, strict=True):
        for name, value in facts.common.items():
            if value != other.common[name]:
                raise InputError(f"model: {facts.branch.where}: {name} {value}, where layer 0 has {other.common[name]}")


def _numbers(values: Any) -> np.ndarray:
    """A tensor or array in double precision."""
    if hasattr(values, "cpu"):
        values = values.cpu().double() if values.is_floating_point() else values.cpu()
    found = np.asarray(values)
    return (found.view(found.real.dtype) if np.iscomplexobj(found) else found).astype(np.float64)
