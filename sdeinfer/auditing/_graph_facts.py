"""Facts of the graph that need no recipe: norms, softmax, what queries and keys read, zeros on the way.

Tests: `tests/auditing/test_kinds.py`.
"""

import itertools
import math
from collections.abc import Iterator, Mapping

import numpy as np

from sdeinfer.auditing._law import Law
from sdeinfer.auditing._tests import Test, failed, first_names
from sdeinfer.passes._account import Account
from sdeinfer.passes._operations import is_a
from sdeinfer.passes._places import is_across_heads
from sdeinfer.passes._readings import Reading, is_even, tensor_name
from sdeinfer.passes._record import Node


def facts_of_graph(account: Account, laws: Mapping[str, Law], readings: list[Reading]) -> list[Test]:
    """Mistakes in what is computed from what."""
    return [
        *_inverse_norms(account),
        *_uneven_norms(readings),
        *_attentions(account),
        *_queries(account, readings),
        *_dead(account, laws, readings),
    ]


def parameter_near(account: Account, number: int) -> str:
    """The place of a tensor in a pass, named by the parameter that was used before it, or after it."""
    users = [node for node in account.graph.record.nodes if node.parameters and not node.fixed]
    before = [node for node in users if node.number < number]
    if before:
        return f"after {before[-1].parameters[0]}"
    return f"before {users[0].parameters[0]}" if users else "at the input"


def _inverse_norms(account: Account) -> Iterator[Test]:
    """Norms by another power of the mean square: log of that out against in has the slope 0, not 2 or −1."""
    graph = account.graph
    wrong: dict[str, list[Node]] = {}
    for node in graph.record.nodes:
        written_out = node.kind == "norm" and not is_a(node.operation, "norm")
        if not written_out or node.rows is None or node.rows.size < 4:
            continue
        tensor = node.inputs[0]
        while tensor.kind in ("view", "scale"):
            tensor = tensor.inputs[0]
        before = None if tensor.kind == "softmax" else graph.term(node.inputs[0]).origin.rows
        if before is None or before.shape != node.rows.shape or not (before > 0).all() or not (node.rows > 0).all():
            continue
        x, y = np.log(before), np.log(node.rows)
        slope = np.polyfit(x, y, 1)[0] if x.std() > 0.01 else 0.0
        if slope > 1.5 and node.about.get("inverse"):
            wrong.setdefault("a norm multiplies by what it should divide by", []).append(node)
        elif abs(slope + 1) < 0.2:
            wrong.setdefault("a norm divides by the mean square, not by its root", []).append(node)
    for says, nodes in wrong.items():
        name = nodes[0].parameters[0] if nodes[0].parameters else parameter_near(account, nodes[0].number)
        yield failed("norm", name, f"{says} ({name}, {len(nodes)} in all)")


def _uneven_norms(readings: list[Reading]) -> Iterator[Test]:
    wrong = [reading for reading in readings if reading.normed and not reading.even]
    if wrong:
        says = f"the norm that {wrong[0].role} reads is not over the features of a token: its mean squares differ"
        yield failed("norm", wrong[0].name, f"{says} ({first_names([reading.name for reading in wrong])})")


def _attentions(account: Account) -> Iterator[Test]:
    over = [logits for logits in account.logits if logits.over not in ("keys", "")]
    if over:
        says = f"softmax runs over {over[0].over}, not over keys (layer {over[0].layer}, {len(over)} in all)"
        yield failed("softmax", f"layer {over[0].layer}", says)
    record = account.graph.record
    uneven = [
        logits
        for logits in account.logits
        if any(is_across_heads(record, norm) or not is_even(norm) for norm in logits.norms)
    ]
    if uneven:
        says = f"norms of queries or keys are not over the features of a head (layer {uneven[0].layer})"
        yield failed("norm", f"layer {uneven[0].layer}", says)
    torn = [logits for logits in account.logits if logits.torn]
    if torn:
        says = f"heads are {torn[0].torn} across tokens, not token by token (layer {torn[0].layer}, {len(torn)} in all)"
        yield failed("heads", f"layer {torn[0].layer}", says)
    turned = [logits for logits in account.logits if logits.turned]
    if turned:
        first = turned[0]
        says = f"{first.turned} alone are rotated by positions (layer {first.layer}, {len(turned)} in all)"
        yield failed("rotations", f"layer {first.layer}", says)
    wrong = [logits for logits in account.logits if not math.isclose(logits.after, 1.0, rel_tol=1e-3) and logits.after]
    if wrong:
        first = wrong[0]
        size = "1/√d_k" if math.isclose(first.after, first.head_size**-0.5, rel_tol=1e-2) else f"{first.after:.4g}"
        width = " = 1/√n" if math.isclose(first.after, max(account.width, 1) ** -0.5, rel_tol=1e-2) else ""
        says = f"probabilities of attention are multiplied by {size}{width} after softmax; logits by {first.factor:.4g}"
        yield failed("probabilities", f"layer {first.layer}", says)


def _queries(account: Account, readings: list[Reading]) -> Iterator[Test]:
    """Keys that read the stream where queries read its norm, and values of another tensor than keys."""
    apart = [logits for logits in account.logits if logits.apart]
    if apart:
        says = f"values are of another tensor than keys (layer {apart[0].layer}, {len(apart)} in all)"
        yield failed("queries", f"layer {apart[0].layer}", says)
    by_layer: dict[int, dict[str, list[Reading]]] = {}
    for reading in readings:
        if reading.layer is not None and reading.role in ("query", "key", "value"):
            by_layer.setdefault(reading.layer, {}).setdefault(reading.role, []).append(reading)
    for layer, by_role in by_layer.items():
        normed = [reading.read for reading in by_role.get("query", ()) if reading.normed]
        plain = [
            role for role in ("key", "value") if any(reading.origin in normed for reading in by_role.get(role, ()))
        ]
        if plain:
            says = f"{' and '.join(plain)} read the stream itself, where query reads its norm (layer {layer})"
            yield failed("queries", plain[0], says)
            return


def _dead(account: Account, laws: Mapping[str, Law], readings: list[Reading]) -> Iterator[Test]:
    """Matrices that read zeros, by a factor of 0 or behind zeros, and branches whose factor is a buffer of zeros."""
    by_factor = [reading for reading in readings if reading.square == 0 and reading.zeros]
    if by_factor:
        names = [reading.name for reading in by_factor]
        says = f"what {first_names(names)} reads is multiplied by 0 ({by_factor[0].zeros[0]})"
        yield failed("dead", names[0], says, *names)
    for node in account.graph.record.nodes:
        if node.kind == "scale" and not node.fixed and node.factors[0] == 0 and node.about.get("by") is not None:
            name = tensor_name(node.about["by"])
            if name in account.graph.record.buffers:
                yield failed("dead", name, f"{name} is 0, and multiplies activations", name)
                break
    if embeddings := [n for n, m in account.matrices.items() if m.role == "embedding" and laws[n].name == "zeros"]:
        yield failed("dead", embeddings[0], f"{first_names(embeddings)} is 0", *embeddings)
    for link in account.links:
        if any(source.factor == 0 and not source.scales for source in link.writers):
            yield failed("dead", f"layer {link.layer}", f"the {link.kind} of layer {link.layer} is multiplied by 0")
            return
    for node in account.graph.record.nodes:
        if names := _zeros_of_zeros(node, laws):
            are = " and ".join(names[:2]) + (" are both 0" if names[1:] else " is 0, and multiplies zeros")
            yield failed("dead", names[0], f"{are}: no gradient passes", *names)
            return


def _zeros_of_zeros(node: Node, laws: Mapping[str, Law]) -> list[str]:
    """The parameters that make both sides of a product 0, so that neither has a gradient; none for other nodes."""
    weight = _zero_weight(node, laws)
    if node.fixed or not (weight or node.kind in ("gate", "contraction")) or not all(map(_is_zero, node.inputs)):
        return []
    origins = [_made_zero(side, laws) for side in node.inputs]
    return list(dict.fromkeys([*itertools.chain(*origins), *weight])) if all(origins) else []


def _zero_weight(node: Node, laws: Mapping[str, Law]) -> list[str]:
    """The matrix or factor of zeros that a node multiplies by."""
    names = node.parameters[:1] if node.kind in ("product", "scale") else ()
    return [name for name in names if name in laws and laws[name].name == "zeros"]


def _is_zero(node: Node) -> bool:
    while node.rows is None and node.inputs:
        node = node.inputs[0]
    return node.rows is not None and node.rows.size > 0 and not node.rows.any()


def _made_zero(node: Node, laws: Mapping[str, Law]) -> list[str]:
    """The matrix or factor of zeros that makes a tensor 0, which what it multiplies is not."""
    while zero_inputs := [parent for parent in node.inputs if _is_zero(parent)]:
        node = zero_inputs[0]
    return _zero_weight(node, laws)
