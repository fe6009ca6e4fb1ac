"""Facts of the graph that need no recipe: norms, softmax, sums of the stream, zeros on the way.

Tests: `tests/auditing/test_kinds.py`.
"""

import itertools
import math
import re
from collections.abc import Iterator, Mapping

import numpy as np

from sdeinfer.auditing._account import Account
from sdeinfer.auditing._law import Law
from sdeinfer.auditing._operations import is_a
from sdeinfer.auditing._readings import BranchNorms, Reading, is_even, name_of
from sdeinfer.auditing._record import Node
from sdeinfer.auditing._stream import logits_of
from sdeinfer.auditing._tests import Test, pattern_of, some


def facts_of_graph(
    account: Account, laws: Mapping[str, Law], readings: list[Reading], norms: list[BranchNorms]
) -> list[Test]:
    """Mistakes in what is computed from what."""
    return [
        *_inverse_norms(account),
        *_uneven_norms(readings),
        *_attentions(account),
        *_queries(readings),
        *_series(account),
        *_dead(account, laws, readings),
        *_unlike_norms(norms),
    ]


def failed(topic: str, what: str, says: str, *names: str) -> Test:
    """A mistake."""
    return Test(topic, what, passed=False, says=says, names=names)


def parameter_near(account: Account, number: int) -> str:
    """Where in a pass a tensor is, by the parameters that were used around it."""
    names = [
        (node.number < number, node.parameters[0])
        for node in account.graph.record.nodes
        if node.parameters and not node.fixed
    ]
    before = [name for is_before, name in names if is_before]
    after = [name for is_before, name in names if not is_before]
    return f"after {before[-1]}" if before else f"before {after[0]}" if after else "at the input"


def _inverse_norms(account: Account) -> Iterator[Test]:
    """Norms by another power of the mean square: log of that out against in has the slope 0, not 2 or −1."""
    graph = account.graph
    powers = {
        "a norm multiplies by what it should divide by": [],
        "a norm divides by the mean square, not by its root": [],
    }
    multiplies, divides = powers.values()
    for node in graph.record.nodes:
        if node.kind != "norm" or node.rows is None or node.rows.size < 4:
            continue
        before = graph.term(node.inputs[0]).origin.rows
        if before is None or before.shape != node.rows.shape or not (before > 0).all() or not (node.rows > 0).all():
            continue
        x, y = np.log(before), np.log(node.rows)
        if x.std() > 0.01:
            slope = ((x - x.mean()) @ (y - y.mean())) / ((x - x.mean()) ** 2).sum()
            wrong = multiplies if slope > 1.5 and node.about.get("inverse") else divides
            if slope > 1.5 and wrong is multiplies or abs(slope + 1) < 0.2:
                wrong.append(node)
    for says, wrong in powers.items():
        if wrong:
            name = wrong[0].parameters[0] if wrong[0].parameters else parameter_near(account, wrong[0].number)
            yield failed("norm", name, f"{says} ({name}, {len(wrong)} in all)")


def _uneven_norms(readings: list[Reading]) -> Iterator[Test]:
    wrong = [each for each in readings if each.normed and not each.even]
    if wrong:
        says = f"the norm that {wrong[0].role} reads is not over the features of a token: its mean squares differ"
        yield failed("norm", wrong[0].name, f"{says} ({some([each.name for each in wrong])})")


def _attentions(account: Account) -> Iterator[Test]:
    over = [each for each in account.logits if each.over not in ("keys", "")]
    if over:
        says = f"softmax runs over {over[0].over}, not over keys (layer {over[0].layer}, {len(over)} in all)"
        yield failed("softmax", f"layer {over[0].layer}", says)
    uneven = [each for each in account.logits if not all(is_even(norm) for norm in each.norms)]
    if uneven:
        says = f"norms of queries or keys are not over the features of a head (layer {uneven[0].layer})"
        yield failed("norm", f"layer {uneven[0].layer}", says)
    wrong = [each for each in account.logits if not math.isclose(each.after, 1.0, rel_tol=1e-3) and each.after]
    if wrong:
        first = wrong[0]
        size = "1/√d_k" if math.isclose(first.after, first.head_size**-0.5, rel_tol=1e-2) else f"{first.after:.4g}"
        width = " = 1/√n" if math.isclose(first.after, max(account.width, 1) ** -0.5, rel_tol=1e-2) else ""
        says = f"probabilities of attention are multiplied by {size}{width} after softmax; logits by {first.factor:.4g}"
        yield failed("probabilities", f"layer {first.layer}", says)


def _queries(readings: list[Reading]) -> Iterator[Test]:
    """Keys that read the stream where queries read its norm, and values of another tensor than keys."""
    by_layer: dict[int, dict[str, list[Reading]]] = {}
    for each in readings:
        if each.layer is not None and each.role in ("query", "key", "value"):
            by_layer.setdefault(each.layer, {}).setdefault(each.role, []).append(each)
    for layer, own in by_layer.items():
        normed = [each.read for each in own.get("query", ()) if each.normed]
        plain = [role for role in ("key", "value") if any(each.origin in normed for each in own.get(role, ()))]
        if plain:
            says = f"{' and '.join(plain)} read the stream itself, where query reads its norm (layer {layer})"
            yield failed("queries", plain[0], says)
            return
        of_keys = [node for each in own.get("key", ()) for node in (each.read, each.origin)]
        other = [
            each for each in own.get("value", ()) if of_keys and each.read not in of_keys and each.origin not in of_keys
        ]
        if other and len({each.product for each in own["key"]}) == len({each.product for each in own["value"]}) == 1:
            says = f"value {other[0].name} reads another tensor than key (layer {layer})"
            yield failed("queries", other[0].name, says)
            return


def _series(account: Account) -> Iterator[Test]:
    """One stream a stack, each sum after the other: no sum left out, no sum of a thing with itself, no difference."""
    graph, record = account.graph, account.graph.record
    links = [link for chain in account.streams for link in chain]
    inner = [node for node in record.nodes if node.kind == "sum" and len(node.inputs) == 2 and not node.fixed]
    numbers = {link.sum.number for link in links}
    for link in links:
        start, branch = link.skip.origin, link.branch.origin
        for node in inner:
            if node.number in numbers or not graph.has(branch, node) or graph.has(start, node):
                continue
            one, other = (graph.term(side).origin for side in node.inputs)
            if start in (one, other) and graph.depends(one if other is start else other, start):
                says = f"the {link.kind} of layer {link.layer} is added to the input of the sum before it, not to it"
                yield failed("series", f"layer {link.layer}", says)
                return
            if start in (one, other) and graph.depends(start, one if other is start else other):
                says = f"the {link.kind} of layer {link.layer} is added to the branch before it, not to the stream"
                yield failed("series", f"layer {link.layer}", says)
                return
    for node in inner:
        (one, by_one), (other, by_other) = (_itself(*pair) for pair in zip(node.inputs, node.factors, strict=True))
        if one is other and by_one == by_other and any(_alike(node, chain[-1].sum) for chain in account.streams):
            yield failed("series", "itself", f"a tensor is added to itself ({parameter_near(account, node.number)})")
            return
    for link in links:
        if link.again:
            says = f"{link.again} is added to the stream once more (layer {link.layer})"
            yield failed("series", f"layer {link.layer}", says)
            return
    gated = {graph.term(side).origin.number for node in record.nodes if node.kind == "gate" for side in node.inputs}
    for link in links:
        if link.branch.factor * link.skip.factor < 0 and link.sum.number not in gated:
            yield failed("series", f"layer {link.layer}", f"the {link.kind} of layer {link.layer} is subtracted")
            return
    yield from _not_added(account)


def _itself(node: Node, factor: float) -> tuple[Node, float]:
    """The tensor that another one is, with its entries in their places, and a factor."""
    while True:
        if node.kind == "view" and is_a(node.operation, "move"):
            if any(is_a(node.operation, kind) for kind in ("piece", "turn", "transpose")):
                return node, factor
        elif node.kind == "scale" and node.about.get("uniform"):
            factor *= node.factors[0]
        else:
            return node, factor
        node = node.inputs[0]


def _not_added(account: Account) -> Iterator[Test]:
    """Matrices that write to the stream in some layers and not in others, and attentions that no stream has."""
    layers = layers_by_name(account)
    written = {in_layer(name, layers)[1] for name in account.writers} - {""}
    uses = [name for name, nodes in account.uses.items() if nodes[0].kind == "product"]
    left = [name for name in uses if in_layer(name, layers)[1] in written and name not in account.writers]
    if left:
        says = f"what {some(left)} returns is not added to the stream, as it is in other layers"
        yield failed("series", left[0], says, *left)
        return
    graph, record = account.graph, account.graph.record
    softmax = [n for n in record.nodes if n.kind == "softmax" and logits_of(graph, n)]
    outside = [node for node in softmax if not _in_a_branch(account, node)]
    ends = [chain[-1].sum for chain in account.streams]
    starts = [chain[0].skip.origin for chain in account.streams]
    series = [
        node
        for node in outside
        if any(graph.depends(node, end) for end in ends)
        and any(graph.depends(start, node) and _alike(start, ends[0]) for start in starts)
    ]
    if not account.streams and len(outside) > 1 and graph.depends(outside[1], outside[0]):
        yield failed("series", "stream", "no residual stream: what the branches return is not added to what they read")
    elif series and len(account.streams) > 2:
        yield failed("series", "attention", f"{len(series)} attentions are not added to the stream: it starts anew")
    elif account.logits and len(account.streams) > 2:
        yield from _broken(account)


def _alike(node: Node, other: Node) -> bool:
    """Whether two tensors have the same tokens and width."""
    return node.shape[-1:] == other.shape[-1:] and math.prod(node.shape) == math.prod(other.shape)


def _in_a_branch(account: Account, node: Node) -> bool:
    graph = account.graph
    return any(
        graph.between(link.branch.origin, link.skip.origin) >> node.number & 1
        for chain in account.streams
        for link in chain
    )


def _broken(account: Account) -> Iterator[Test]:
    """Streams of one shape in series, each of which starts with what a matrix of one name returns."""
    graph = account.graph
    first = account.streams[0]
    starts = {}
    for before, chain in zip(account.streams, account.streams[1:], strict=False):
        start, end = chain[0].skip.origin, before[-1].sum
        if not (graph.depends(start, end) and _alike(start, end) and _alike(start, first[-1].sum)):
            continue
        products = [source.node for source in graph.sources(start) if source.node.parameters]
        # A product of a tensor beside which the stream is goes on with it.
        joined = any(graph.term(node.inputs[0]).origin.kind == "join" for node in products)
        if products and not joined:
            name = products[0].parameters[0]
            starts.setdefault(pattern_of(name), []).append(name)
    for names in starts.values():
        if len(names) > 1:
            says = f"what {some(names)} returns is not added to the stream: each layer starts anew"
            yield failed("series", names[0], says, *names)
            return


def _unlike_norms(norms: list[BranchNorms]) -> Iterator[Test]:
    """Branches that read the stream itself, or sums that are normed, unlike those of other layers."""
    by_kind: dict[tuple, list[BranchNorms]] = {}
    for each in norms:
        by_kind.setdefault((each.link.kind, each.link.sum.shape), []).append(each)
    words = {True: "reads the norm of the stream", False: "reads the stream without a norm"}
    after = {True: "follows a norm of the stream itself", False: "follows no norm of the stream itself"}
    for (kind, _), own in by_kind.items():
        reads = [(each.before, each) for each in own if each.before is not None]
        reads = reads[1:] if own[0].link.before is None and own[0].before is False else reads
        follows = [(each.link.normed, each) for each in own if each.link.before is not None]
        for pairs, says in ((reads, words), (follows, after)):
            for value, text in says.items():
                odd = [each for found, each in pairs if found is value]
                if 0 < len(odd) <= len(pairs) // 3:
                    layer = odd[0].link.layer
                    yield failed(
                        "unlike", f"layer {layer}", f"{kind} of layer {layer} {text}, unlike that of other layers"
                    )


def _dead(account: Account, laws: Mapping[str, Law], readings: list[Reading]) -> Iterator[Test]:
    """Matrices that read zeros, by a factor of 0 or behind zeros, and branches whose factor is a buffer of zeros."""
    zero = [each for each in readings if each.square == 0]
    by_factor = [each for each in zero if each.zeros]
    if by_factor:
        first = by_factor[0]
        says = f"what {some([each.name for each in by_factor])} reads is multiplied by 0 ({first.zeros[0]})"
        yield failed("dead", first.name, says, *[each.name for each in by_factor])
    for node in account.graph.record.nodes:
        if node.kind == "scale" and not node.fixed and node.factors[0] == 0 and node.about.get("by") is not None:
            name = name_of(node.about["by"])
            if name in account.graph.record.buffers:
                yield failed("dead", name, f"{name} is 0, and multiplies activations", name)
                break
    if embeddings := [n for n, m in account.matrices.items() if m.role == "embedding" and laws[n].name == "zeros"]:
        yield failed("dead", embeddings[0], f"{some(embeddings)} is 0", *embeddings)
    for chain in account.streams:
        for link in chain:
            for source in link.writers:
                if source.factor == 0 and not source.scales:
                    says = f"the {link.kind} of layer {link.layer} is multiplied by 0"
                    yield failed("dead", f"layer {link.layer}", says)
                    return
    zeros = [name for name, m in account.matrices.items() if m.linear and laws[name].name == "zeros"]
    for pair in _pairs(account, zeros):
        says = f"{' and '.join(pair)} are both 0: no gradient passes"
        yield failed("dead", pair[0], says, *pair)
        return


def _pairs(account: Account, zeros: list[str]) -> Iterator[tuple[str, str]]:
    """Matrices of zeros of one layer that are multiplied with, or follow, each other."""
    by_layer: dict[int | None, dict[str, str]] = {}
    for name in zeros:
        matrix = account.matrices[name]
        by_layer.setdefault(matrix.layer, {}).setdefault(matrix.role, name)
    together = [("query", "key"), ("value", "attention output"), ("up", "mlp output"), ("gate", "mlp output")]
    together += [("gate", "up")]
    for layer, own in by_layer.items():
        for first, second in together:
            if layer is not None and first in own and second in own:
                yield own[first], own[second]


def layers_by_name(account: Account) -> re.Pattern[str] | None:
    """What names of parameters of a layer begin with; None if they have nothing in common."""
    graph, beginnings = account.graph, set()
    for link in (link for chain in account.streams for link in chain):
        own = graph.between(link.branch.origin, link.skip.origin)
        names = [name for node in graph.nodes(own) if not node.fixed for name in node.parameters]
        parts = [name.split(".")[:-1] for name in names]
        common = [column[0] for column in itertools.takewhile(lambda c: len({*c}) == 1, zip(*parts, strict=False))]
        places = [place for place, part in enumerate(common) if any(letter.isdigit() for letter in part)]
        if places:
            beginnings.add(".".join(re.sub(r"\d+", r"\\d+", part) for part in common[: places[-1] + 1]) + r"\.")
    return re.compile("|".join(sorted(beginnings))) if beginnings else None


def in_layer(name: str, layers: re.Pattern[str] | None) -> tuple[str, str]:
    """The beginning that the parameters of a layer have in common, and the name in it; "" outside of layers."""
    if layers is not None and (beginning := layers.match(name)):
        return beginning[0], name[beginning.end() :]
    return "", re.sub(r"\[\d+\]$", "", name) if name.endswith("]") else ""
