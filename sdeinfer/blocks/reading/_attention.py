"""Attention as the values of a pass show it. Tests: `tests/blocks/test_of.py`."""

import dataclasses
import math
from typing import Any

import numpy as np

from sdeinfer._files import InputError
from sdeinfer.blocks.reading._facts import BranchFacts, gain_of
from sdeinfer.blocks.reading._pass_values import float_array, with_bias
from sdeinfer.blocks.reading._values import factor_of_logits, norms_of_values, pattern_of_mask, rotation_of, sink_of
from sdeinfer.passes._account import Account, Matrix
from sdeinfer.passes._attention import Logits, attended, attention_of, score_product_of, softmaxes_in
from sdeinfer.passes._graph import Graph
from sdeinfer.passes._operations import is_a
from sdeinfer.passes._record import Node
from sdeinfer.passes._taps import Taps


@dataclasses.dataclass(frozen=True)
class Heads:
    """The attention of a branch in the graph: its softmax, the products q kᵀ, and the tanh of capped logits between."""

    softmax: Node
    products: Node
    logits: Logits
    capped: Node | None


def heads_of(account: Account, facts: BranchFacts) -> Heads:
    """The attention of a branch; an InputError for one that no block has."""
    branch, graph = facts.branch, account.graph
    softmaxes = softmaxes_in(graph, branch.nodes)
    if len(softmaxes) != 1:
        raise InputError(f"model: {branch.where}: has {len(softmaxes)} softmaxes of queries and keys")
    (softmax,) = softmaxes
    pair = score_product_of(graph, softmax)
    assert pair is not None
    logits, _ = attention_of(graph, softmax, pair, branch.link.layer, branch.nodes)
    if logits.normed and not logits.both:
        raise InputError(f"model: {branch.where}: has a norm of queries or of keys alone")
    if logits.over != "keys":
        raise InputError(f"model: {branch.where}: its probabilities are not those of keys alone")
    weighted = graph.term(branch.matrices["attention output"][0][1].inputs[0]).origin
    if weighted.kind != "contraction" or softmax not in [_beside_a_sink(graph, side) for side in weighted.inputs]:
        raise InputError(f"model: {branch.where}: its last matrix does not read the weighted values alone")
    capped = [node for node in branch.nodes if node.operation == "tanh" and graph.has(softmax, node)]
    capped = [node for node in capped if graph.has(node, pair[0])]
    return Heads(softmax, pair[0], logits, capped[0] if capped else None)


def _beside_a_sink(graph: Graph, node: Node) -> Node:
    """The origin of a tensor, or of the tensor that it is a piece of, as of probabilities beside that of a sink."""
    whole = graph.whole(node)
    return graph.term(whole.inputs[0]).origin if is_a(whole.operation, "piece") else whole


def tap_attention(account: Account, facts: BranchFacts, taps: Taps, faults: list[str]) -> None:
    """Read heads, mask, norms and rotations of queries and keys, cap and sink."""
    branch, heads = facts.branch, heads_of(account, facts)
    size = heads.logits.head_size
    (query, product), (key, _), (value, _) = (branch.matrices[role][0] for role in ("query", "key", "value"))
    count, groups = query.fan_out // size, key.fan_out // size
    if value.fan_out != groups * size:
        raise InputError(f"model: {branch.where}: values have {value.fan_out // groups} features a head, keys {size}")
    facts.shape = {"heads": count, "key_value_heads": groups, "head_size": size}
    facts.shape |= {"qk_norm": None, "rope": None, "rope_size": None}
    facts.factors = {"logits": heads.logits.factor * math.sqrt(size)}
    if heads.logits.normed:
        for side, norm in zip(("queries", "keys"), heads.logits.norms, strict=True):
            facts.gains[side] = gain_of(account, norm)
            facts.factors["logits"] *= facts.gains[side].value
    turned, before = _rotation(account, heads.products.inputs[0], with_bias(account, product))
    between = [*account.graph.nodes(account.graph.between(heads.products, product))]

    def take(values: dict[str, Any]) -> None:
        mask = read_softmax(facts, heads, values, faults)
        if mask is None:
            return
        if turned is not None:
            after, sizes = float_array(values["turned"]), {node.shape[-1] for node in between} | {size}
            rotations = (rotation_of(float_array(values[str(x.number)]), after, len(mask), sizes) for x in before)
            rotation = next((candidate for candidate in rotations if candidate is not None), None)
            if rotation is None:
                faults.append(f"{branch.where}: queries are changed in another way than by rotations")
                return
            facts.shape["rope"] = rotation[0]
            facts.shape["rope_size"] = None if rotation[1] == size else rotation[1]

    nodes = nodes_of_softmax(heads) | {str(x.number): x for x in before}
    nodes |= {} if turned is None else {"turned": turned}
    taps.see(f"{branch.where}: its logits", nodes, take)
    if heads.logits.normed:
        _tap_norms(facts, heads, (query, key), taps, faults)


def nodes_of_softmax(heads: Heads) -> dict[str, Node]:
    """The nodes whose values `read_softmax` takes."""
    return {"probabilities": heads.softmax, "logits": heads.products if heads.capped is None else heads.capped}


def read_softmax(facts: BranchFacts, heads: Heads, values: dict[str, Any], faults: list[str]) -> np.ndarray | None:
    """The mask; sets the pattern, the cap and the sink of a branch. None with a fault for another function."""
    P, Y = (float_array(values[name]) for name in ("probabilities", "logits"))
    mask = attended(P)
    factor = None if mask is None else factor_of_logits(P[..., : len(mask)], Y, mask)
    if factor is None:
        faults.append(f"{facts.branch.where}: its logits are not qkᵀ times a factor under a mask")
        return None
    assert mask is not None
    facts.pattern = pattern_of_mask(mask)
    facts.shape["cap"] = None if heads.capped is None else float(f"{factor:.4g}")
    facts.shape["sink"] = P.shape[-1] > len(mask)
    if facts.shape["sink"]:
        sink = sink_of(P, factor * Y, mask)
        if sink is None:
            faults.append(f"{facts.branch.where}: a logit beside those of the keys differs between tokens")
            return None
        facts.factors["sink"] = sink
    return mask


def _tap_norms(
    facts: BranchFacts, heads: Heads, matrices: tuple[Matrix, Matrix], taps: Taps, faults: list[str]
) -> None:
    """See the norms of queries and keys, over a head or all heads."""
    branch, size = facts.branch, heads.logits.head_size
    queries, keys = heads.logits.norms

    def take(values: dict[str, Any]) -> None:
        places = set()
        for norm, matrix in zip((queries, keys), matrices, strict=True):
            x, y = (float_array(values[f"{side} {norm.number}"]) for side in ("before", "after"))
            if "rms" not in norms_of_values(x, y):
                faults.append(f"{branch.where}: norms of queries and keys are no RMSNorms")
                return
            places.add({size: "head", matrix.fan_out: "all"}.get(x.shape[-1], "other"))
        if len(places) > 1 or "other" in places:
            faults.append(f"{branch.where}: norms of queries and keys are over other features than heads")
            return
        facts.shape["qk_norm"] = places.pop()

    nodes = {f"before {norm.number}": norm.inputs[0] for norm in (queries, keys)}
    nodes |= {f"after {norm.number}": norm for norm in (queries, keys)}
    taps.see(f"{branch.where}: norms of its queries and keys", nodes, take)


def _rotation(account: Account, node: Node, product: Node) -> tuple[Node | None, list[Node]]:
    """The node of queries that are more than moved, scaled and normed, and those of its shape before; or None."""
    plain = ("view", "norm")
    while node is not product and (node.kind in plain or node.about.get("uniform")) and node.inputs:
        node = node.inputs[0]
    if node is product:
        return None, []
    numbers_before, stack = set(), [*node.inputs]
    while stack:
        earlier = stack.pop()
        if earlier.number not in numbers_before and earlier.number > product.number:
            numbers_before.add(earlier.number)
            stack += earlier.inputs
    before = [account.graph.record.nodes[number] for number in sorted(numbers_before)]
    return node, [earlier for earlier in before if earlier.shape == node.shape and not earlier.fixed]
