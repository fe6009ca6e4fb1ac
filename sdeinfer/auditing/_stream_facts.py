"""Facts of the residual stream that need no recipe: one stream a stack, its sums in series, layers that are alike.

Tests: `tests/auditing/test_kinds.py`.
"""

import itertools
import math
import re
from collections.abc import Iterator

from sdeinfer.auditing._graph_facts import parameter_near
from sdeinfer.auditing._tests import Test, failed, first_names
from sdeinfer.passes._account import Account
from sdeinfer.passes._attention import softmaxes_in
from sdeinfer.passes._operations import is_a
from sdeinfer.passes._readings import BranchNorms
from sdeinfer.passes._record import Node


def facts_of_streams(account: Account, norms: list[BranchNorms]) -> list[Test]:
    """Mistakes in what is added to what: the first one, and layers that are unlike the others."""
    findings = itertools.chain(_not_in_series(account), _twice(account), _subtracted(account), _not_added(account))
    return [*itertools.islice(findings, 1), *_unlike_norms(norms)]


def _sums(account: Account) -> list[Node]:
    return [node for node in account.graph.record.nodes if node.is_sum_of_two]


def _not_in_series(account: Account) -> Iterator[Test]:
    """Sums that go on with the input, or with the branch, of the sum before them."""
    graph, sums = account.graph, _sums(account)
    numbers = {link.sum.number for link in account.links}
    for link in account.links:
        start, branch = link.skip.origin, link.branch.origin
        for node in sums:
            sides = [graph.whole(side) for side in node.inputs]
            inside = graph.has(branch, node) and not graph.has(start, node)
            if node.number in numbers or not inside or start not in sides:
                continue
            opposite = sides[sides[0] is start]
            before = "input of the sum" if graph.depends(opposite, start) else "branch"
            if before == "branch" and not graph.depends(start, opposite):
                continue
            says = f"the {link.kind} of layer {link.layer} is added to the {before} before it, not to it"
            yield failed("series", f"layer {link.layer}", says)


def _twice(account: Account) -> Iterator[Test]:
    for node in _sums(account):
        (left, by_left), (right, by_right) = (_itself(*pair) for pair in zip(node.inputs, node.factors, strict=True))
        doubled = by_left == by_right and not math.isclose(by_left + by_right, 1.0)  # and no mean of equal tensors
        if left is right and doubled and any(_alike(node, chain[-1].sum) for chain in account.streams):
            yield failed("series", "itself", f"a tensor is added to itself ({parameter_near(account, node.number)})")
    for link in account.links:
        if link.again:
            yield failed("series", f"layer {link.layer}", f"{link.again} (layer {link.layer})")


def _subtracted(account: Account) -> Iterator[Test]:
    graph = account.graph
    gates = [node for node in graph.record.nodes if node.kind == "gate"]
    gated = {graph.term(side).origin.number for node in gates for side in node.inputs}
    for link in account.links:
        if link.writers and link.branch.factor * link.skip.factor < 0 and link.sum.number not in gated:
            yield failed("series", f"layer {link.layer}", f"the {link.kind} of layer {link.layer} is subtracted")


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
    layers = account.layer_names
    written = {in_layer(name, layers)[1] for name in account.writers} - {""}
    uses = [name for name, nodes in account.uses.items() if nodes[0].kind == "product"]
    missing = [name for name in uses if in_layer(name, layers)[1] in written and name not in account.writers]
    added = {*_added_elsewhere(account)} if missing else {}
    missing = [name for name in missing if name not in added]
    if missing:
        says = f"what {first_names(missing)} returns is not added to the stream, as it is in other layers"
        yield failed("series", missing[0], says, *missing)
        return
    graph, record = account.graph, account.graph.record
    softmax = softmaxes_in(graph, record.nodes)
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


def _added_elsewhere(account: Account) -> Iterator[str]:
    """Matrices whose outputs are added to what does not follow from them, as to a shortcut, or to class tokens."""
    graph = account.graph
    for node in graph.record.nodes:
        if node.kind == "sum" and not node.fixed:
            latents = [fixed for fixed in node.about.get("fixed", ()) if _alike(node, fixed)]
            for side, opposite in zip(node.inputs, [*node.inputs[:0:-1], *node.inputs[:1]], strict=False):
                for source in graph.sources(side) if latents or opposite is not side else ():
                    if opposite is side or not graph.has(graph.term(opposite).origin, source.node):
                        yield from source.node.parameters[:1]


def _alike(node: Node, peer: Node) -> bool:
    """Whether two tensors have the same tokens and width."""
    return node.shape[-1:] == peer.shape[-1:] and math.prod(node.shape) == math.prod(peer.shape)


def _in_a_branch(account: Account, node: Node) -> bool:
    return any(link.inside(account.graph) >> node.number & 1 for link in account.links)


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
            starts.setdefault(re.sub(r"\d+", "#", name), []).append(name)
    for names in starts.values():
        if len(names) > 1:
            says = f"what {first_names(names)} returns is not added to the stream: each layer starts anew"
            yield failed("series", names[0], says, *names)
            return


def _unlike_norms(norms: list[BranchNorms]) -> Iterator[Test]:
    """Branches that read the stream itself, or sums that are normed, unlike those of other layers."""
    by_kind: dict[tuple, list[BranchNorms]] = {}
    for branch in norms:
        by_kind.setdefault((branch.link.kind, branch.link.sum.shape), []).append(branch)
    words = {True: "reads the norm of the stream", False: "reads the stream without a norm"}
    after = {True: "follows a norm of the stream itself", False: "follows no norm of the stream itself"}
    for (kind, _), branches in by_kind.items():
        reads = [(branch.reads_normed, branch) for branch in branches if branch.reads_normed is not None]
        reads = reads[1:] if branches[0].link.before is None and branches[0].reads_normed is False else reads
        follows = [(branch.link.normed, branch) for branch in branches if branch.link.before is not None]
        backs = [branch.back for branch in branches]
        usual = max(backs, key=backs.count)
        states = [(branch.back == usual, branch) for branch in branches]
        for pairs, says in ((reads, words), (follows, after), (states, {False: "reads another state of the stream"})):
            for value, text in says.items():
                odd = [branch for flag, branch in pairs if flag is value]
                if 0 < len(odd) <= len(pairs) // 3:
                    place = f"layer {odd[0].link.layer}"
                    yield failed("unlike", place, f"{kind} of {place} {text}, unlike that of other layers")


def in_layer(name: str, layers: re.Pattern[str] | None) -> tuple[str, str]:
    """The beginning that the parameters of a layer have in common, and the name in it; "" outside of layers."""
    if layers is not None and (beginning := layers.match(name)):
        return beginning[0], name[beginning.end() :]
    return "", re.sub(r"\[\d+\]$", "", name) if name.endswith("]") else ""
