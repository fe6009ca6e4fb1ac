"""The residual stream, and attentions: the sums that a branch adds to, with factors, from what depends on what.

Tests: `tests/auditing/test_audit.py`.
"""

import dataclasses
from collections.abc import Iterable

from sdeinfer.auditing._graph import Graph, Source, Term
from sdeinfer.auditing._operations import is_a
from sdeinfer.auditing._record import Node


@dataclasses.dataclass(frozen=True)
class Logits:
    """One attention: the factor c of q kᵀ before softmax, d_k, and a factor of the probabilities after it.

    Attributes:
        factor: c.
        head_size: d_k.
        layer: number of its layer.
        normed: whether queries or keys are normed.
        both: whether both are.
        after: the factor of the probabilities.
        over: "keys", or "queries" or "another axis" if the probabilities sum to 1 over it; "" where it was not seen.
        heads: number of heads; 1 where it is not seen.
        norms: the norms of queries and keys.
    """

    factor: float
    head_size: int
    layer: int | None
    normed: bool
    after: float
    both: bool = False
    over: str = ""
    heads: int = 1
    norms: tuple[Node, ...] = dataclasses.field(default=(), repr=False, compare=False)


@dataclasses.dataclass(eq=False)
class Link:
    """A sum of the stream, X′ = αX + Σ_b c_b y_b: the stream before it, what is added, and the products of that.

    `again` says what is added once more: the stream before it, or before the sum before it, or what was added.
    """

    sum: Node
    skip: Term
    branch: Term
    writers: list[Source]
    normed: bool
    before: "Link | None" = dataclasses.field(repr=False)
    kind: str = ""
    layer: int = 0
    again: str = ""

    @property
    def start(self) -> "Link":
        """The first sum of its stream."""
        link = self
        while link.before is not None:
            link = link.before
        return link


def streams_of(graph: Graph) -> list[list[Link]]:
    """The streams of a network, as of an encoder and a decoder, longest first; sums inside of branches are left out."""
    links: list[Link] = []
    by_sum: dict[int, Link] = {}
    added: dict[int, list[Link]] = {}  # states of the streams that are added to later ones
    for node in graph.record.nodes:
        if node.kind == "sum" and len(node.inputs) == 2 and not node.fixed:
            one, other = (graph.term(side).origin for side in node.inputs)
            for late, early in ((one, other), (other, one)):
                if (link := by_sum.get(late.number)) is not None and _has(graph, link, early, by_sum):
                    by_sum[node.number] = link
                    added.setdefault(early.number, []).append(link)
                    break
            else:
                if (link := _link(graph, node, by_sum)) is not None:
                    links.append(link)
                    by_sum[node.number] = link
    for number, (link, *more) in added.items():
        recent = [each for each in (link, link.before) if each is not None]
        if number in [each.branch.origin.number for each in recent]:
            link.again = "what was added to it"
        elif not more and number in [each.skip.origin.number for each in recent]:
            link.again = "the stream"
    followed = {id(link.before) for link in links}
    chains = []
    for link in links:
        if id(link) not in followed:
            chain, at = [], link
            while at is not None:
                chain.append(at)
                at = at.before
            chains.append(chain[::-1])
    chains.sort(key=lambda chain: (len(chain), chain[-1].sum.number), reverse=True)
    kept: list[list[Link]] = []
    for chain in chains:
        own = [link for link in chain if not any(link in other for other in kept)]
        if own and not any(_inside(graph, own, other) for other in kept):
            kept.append(own)
    for chain in kept:
        _number(graph, chain)
    return sorted(kept, key=lambda chain: chain[0].sum.number)


def _has(graph: Graph, link: Link, early: Node, links: dict[int, Link]) -> bool:
    """Whether a sum of a stream has a tensor already: an earlier state of it, or what one of the last two added."""
    if early in [each.branch.origin for each in (link, link.before) if each is not None]:
        return True
    before = links.get(early.number)
    if before is link or not graph.depends(link.sum, early):
        return False
    return link.start.skip.origin is early or (before is not None and before.start is link.start)


def _link(graph: Graph, node: Node, links: dict[int, Link]) -> Link | None:
    terms = [graph.term(each) for each in node.inputs]
    terms = [dataclasses.replace(term, factor=term.factor * c) for term, c in zip(terms, node.factors, strict=True)]
    for skip, branch in (terms, terms[::-1]):
        at, normed = skip.origin, False
        before = links.get(at.number)
        if before is None and at.kind == "norm":
            inner = graph.term(at.inputs[0]).origin
            before, normed = links.get(inner.number), inner.number in links
        starts = [before.start.skip.origin] if before is not None else []
        mask = is_a(at.operation, "truth")
        if mask or graph.has(skip.origin, branch.origin) or branch.origin.number == at.number:
            continue
        if any(graph.depends(branch.origin, each) for each in [at, *starts]):
            stop = graph.reach[at.number]
            writers = graph.sources(branch.origin, stop=stop) or graph.sources(
                branch.origin, stop=stop, activations=True
            )
            writers = [
                dataclasses.replace(each, factor=each.factor * branch.factor, scales=each.scales + branch.scales)
                for each in writers
            ]
            return Link(node, skip, branch, writers, normed, before)
    return None


def _inside(graph: Graph, chain: list[Link], other: list[Link]) -> bool:
    """Whether sums are part of a branch of another stream."""
    first, last = chain[0], chain[-1]
    return any(
        graph.has(link.branch.origin, last.sum)
        and not graph.has(link.skip.origin, last.sum)
        and graph.has(first.skip.origin, link.skip.origin)
        for link in other
    )


def _number(graph: Graph, chain: list[Link]) -> None:
    """Kinds of branches, and layers: a layer ends with its MLP, or where kinds repeat."""
    for link in chain:
        link.kind = _kind(graph, link)
    kinds = [link.kind for link in chain]
    size = len(kinds)
    period = next((p for p in range(1, size + 1) if size % p == 0 and kinds == kinds[:p] * (size // p)), size)
    if "mlp" in kinds[: period - 1] and kinds[0] == "mlp" and period < size:
        for place, link in enumerate(chain):
            link.layer = place // period
        return
    layer, seen = 0, set()
    plain = "mlp" not in " ".join(kinds)
    for link in chain:
        ends = "mlp" in link.kind or plain
        link.layer = layer
        seen.add(link.kind)
        if ends:
            layer, seen = layer + 1, set()


def _kind(graph: Graph, link: Link) -> str:
    own = graph.between(link.branch.origin, link.skip.origin)
    found = set()
    for source in link.writers:
        inside = graph.reach[source.node.number] & own
        found.add(kind_of(graph, graph.nodes(inside)))
    return " and ".join(sorted(found)) or kind_of(graph, graph.nodes(own))


def kind_of(graph: Graph, nodes: Iterable[Node]) -> str:
    """The kind of a branch of these nodes: "attention", "mixer" or "mlp"."""
    kind = "mlp"
    for node in nodes:
        if node.kind == "softmax" and logits_of(graph, node) is not None:
            return "attention"
        if node.kind == "contraction" or (node.kind == "convolution" and node.about.get("groups", 1) > 1):
            kind = "mixer"
    return kind


def logits_of(graph: Graph, softmax: Node) -> tuple[Node, float] | None:
    """The matrix product of activations that softmax reads, and the factor between; through masks, biases and tanh."""
    stack, seen = [(softmax.inputs[0], 1.0)], 0
    while stack and seen < 24:
        node, factor = stack.pop()
        seen += 1
        term = graph.term(node)
        at, factor = term.origin, factor * term.factor
        if at.kind == "contraction":
            return at, factor * at.factors[0]
        if at.kind in ("sum", "join") or at.operation == "tanh":
            stack += zip(at.inputs, [factor * c for c in at.factors or (1.0,) * len(at.inputs)], strict=False)
        elif at.kind == "other" and len(at.inputs) == 1 and "mask" in at.operation:
            stack.append((at.inputs[0], factor))
    return None


def attention_of(
    graph: Graph, softmax: Node, pair: tuple[Node, float], layer: int, nodes: list[Node]
) -> tuple[Logits, list[Node]]:
    """The attention of a softmax of a product of activations, and what its probabilities weigh."""
    product, factor = pair
    query, key = (graph.term(side) for side in product.inputs)
    after, over, values = 1.0, "", []
    for node in nodes:
        if node.kind != "contraction" or node is product:
            continue
        for place, side in enumerate(node.inputs):
            term = graph.term(side)
            if softmax in (
                term.origin,
                graph.term(term.origin.inputs[0]).origin if term.origin.kind == "norm" else None,
            ):
                values.append(node.inputs[1 - place])
                after = term.factor
                over = over or _summed_over(node.about.get("sums", (None, None))[place], after)
    norms = tuple(term.origin for term in (query, key) if term.origin.kind == "norm")
    shape = softmax.shape
    heads = shape[-3] if len(shape) > 3 else 1
    factor *= query.factor * key.factor
    size = product.about["fan_in"]
    found = Logits(factor, size, layer, bool(norms), after, len(norms) == 2, over, heads, norms)
    return found, values


def _summed_over(sums: tuple[float, float, float] | None, after: float) -> str:
    """What probabilities sum to 1 over, by their sums over keys and, less 1, over queries."""
    if sums is None or abs(after - 1) > 1e-3:
        return ""
    least, largest, others = sums
    if largest <= 1 + 1e-3:
        return "keys"
    return "queries" if others < 1e-3 else "another axis"
