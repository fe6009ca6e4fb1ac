"""The residual stream: the sums that a branch adds to, with factors, found from what depends on what.

Tests: `tests/auditing/test_audit.py`.
"""

import dataclasses
import itertools
import re
from collections.abc import Iterable

from sdeinfer.passes._attention import score_product_of
from sdeinfer.passes._graph import PRODUCTS, Graph, Source, Term
from sdeinfer.passes._operations import is_a
from sdeinfer.passes._record import Node

NUMBERS = re.compile(r"(?<![^._\[])\d+(?![^.\]])")
"""The numbers of layers in the name of a parameter: h.0.w, block_0.w, w[0]."""


@dataclasses.dataclass(eq=False)
class Link:
    """A sum of the stream, X′ = αX + Σ_b c_b y_b: the stream before it, what is added, and the products of that.

    `before` is the sum before it in its stream, and `normed` whether that reaches it through a norm alone, as where the
    norm follows the sum. `again` says what is added twice, in words: the stream before it, or before the sum before
    it, or what was added.
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
    def place(self) -> str:
        """Its kind and layer, in words."""
        return f"{self.kind}, layer {self.layer}"

    @property
    def chain(self) -> list["Link"]:
        """The sums of its stream up to this one."""
        links, link = [], self
        while link is not None:
            links.append(link)
            link = link.before
        return links[::-1]

    def side(self, graph: Graph) -> int:
        """The place of what is added among the two summands."""
        return [graph.term(summand).origin for summand in self.sum.inputs].index(self.branch.origin)

    def stream(self, graph: Graph) -> Node:
        """The summand to which the branch is added."""
        return self.sum.inputs[1 - self.side(graph)]

    def inside(self, graph: Graph) -> int:
        """The nodes between the stream and what is added, as a set of bits."""
        return graph.between(self.branch.origin, self.skip.origin)


def streams_of(graph: Graph) -> list[list[Link]]:
    """The streams of a network, as of an encoder and a decoder, longest first; sums inside of branches are left out."""
    links: list[Link] = []
    by_sum: dict[int, Link] = {}
    added: dict[int, list[Link]] = {}  # states of the streams that are added to later ones
    for node in graph.record.nodes:
        if node.is_sum_of_two:
            left, right = (graph.term(side).origin for side in node.inputs)
            for late, early in ((left, right), (right, left)):
                if (link := by_sum.get(late.number)) is not None and _has(graph, link, early, by_sum):
                    by_sum[node.number] = link
                    added.setdefault(early.number, []).append(link)
                    break
            else:
                if (link := _link(graph, node, by_sum)) is not None:
                    links.append(link)
                    by_sum[node.number] = link
    for number, (link, *repeats) in added.items():
        recent = [recent_link for recent_link in (link, link.before) if recent_link is not None]
        if number in [recent_link.branch.origin.number for recent_link in recent]:
            link.again = "what a branch returns is added twice"
        elif not repeats and number in [recent_link.skip.origin.number for recent_link in recent]:
            link.again = "the stream is added to a sum that has it already, and counts twice"
    followed = {id(link.before) for link in links}
    chains = [link.chain for link in links if id(link) not in followed]
    chains.sort(key=lambda chain: (len(chain), chain[-1].sum.number), reverse=True)
    streams: list[list[Link]] = []
    for chain in chains:
        remainder = [link for link in chain if not any(link in stream for stream in streams)]
        if remainder and not any(_inside(graph, remainder, stream) for stream in streams):
            streams.append(remainder)
    for chain in streams:
        _number(graph, chain)
    return sorted(streams, key=lambda chain: chain[0].sum.number)


def _has(graph: Graph, link: Link, early: Node, links: dict[int, Link]) -> bool:
    """Whether a sum of a stream has a tensor already: an earlier state of it, or what one of the last two added."""
    if early in [recent_link.branch.origin for recent_link in (link, link.before) if recent_link is not None]:
        return True
    before = links.get(early.number)
    if before is link or not graph.depends(link.sum, early):
        return False
    start = link.chain[0]
    return start.skip.origin is early or (before is not None and before.chain[0] is start)


def _link(graph: Graph, node: Node, links: dict[int, Link]) -> Link | None:
    terms = [graph.term(side) for side in node.inputs]
    terms = [dataclasses.replace(term, factor=term.factor * c) for term, c in zip(terms, node.factors, strict=True)]
    for skip, branch in (terms, terms[::-1]):
        state, normed = skip.origin, False
        before = links.get(state.number)
        if before is None and state.kind == "norm" and not is_a(state.operation, "batch"):
            inner = graph.term(state.inputs[0]).origin
            before, normed = links.get(inner.number), inner.number in links
        starts = [before.chain[0].skip.origin] if before is not None else []
        mask = is_a(state.operation, "truth")
        if mask or graph.has(skip.origin, branch.origin) or branch.origin.number == state.number:
            continue
        if any(graph.depends(branch.origin, origin) for origin in [state, *starts]):
            stop = graph.reach[state.number]
            writers = graph.sources(branch.origin, stop=stop) or graph.sources(
                branch.origin, stop=stop, activations=True
            )
            writers = [
                dataclasses.replace(writer, factor=writer.factor * branch.factor, scales=writer.scales + branch.scales)
                for writer in writers
            ]
            return Link(node, skip, branch, writers, normed, before)
    return None


def _inside(graph: Graph, chain: list[Link], stream: list[Link]) -> bool:
    """Whether sums are part of a branch of another stream, or of several, as values that go on to later layers."""
    first, last = chain[0], chain[-1]
    branches = [link.inside(graph) for link in stream]
    states = [first.skip.origin, *(link.sum for link in chain)]
    of_stream = graph.has(first.skip.origin, stream[0].skip.origin)  # not what an encoder returns
    if of_stream and all(any(nodes >> state.number & 1 for nodes in branches) for state in states):
        return True
    return any(
        graph.has(link.branch.origin, last.sum)
        and not graph.has(link.skip.origin, last.sum)
        and graph.has(first.skip.origin, link.skip.origin)
        for link in stream
    )


def _number(graph: Graph, chain: list[Link]) -> None:
    """Kinds of branches, and layers: a layer ends with its MLP, or where kinds repeat."""
    for link in chain:
        link.kind = _kind(graph, link)
    if (layers := _layers_by_name(graph, chain)) is not None:
        for link, layer in zip(chain, layers, strict=True):
            link.layer = layer
        return
    kinds = [link.kind for link in chain]
    size = len(kinds)
    period = next((p for p in range(1, size + 1) if size % p == 0 and kinds == kinds[:p] * (size // p)), size)
    if "mlp" in kinds[: period - 1] and kinds[0] == "mlp" and period < size:
        for place, link in enumerate(chain):
            link.layer = place // period
        return
    layer = 0
    plain = "mlp" not in " ".join(kinds)
    for link in chain:
        link.layer = layer
        if "mlp" in link.kind or plain:
            layer += 1


def _layers_by_name(graph: Graph, chain: list[Link]) -> list[int] | None:
    """The layer of each sum by the numbers in the names of its matrices, if all layers have as many sums, and two.

    Sums that share matrices are of several layers of one name.
    """
    keys, names = [], []
    for link in chain:
        # A condition, which a branch has from elsewhere, is no part of the layer.
        nodes = [node for node in graph.nodes(link.inside(graph)) if graph.has(node, link.skip.origin)]
        matrices = {node.parameters[0] for node in nodes if node.kind in PRODUCTS and node.parameters}
        numbers = [NUMBERS.findall(name) for name in matrices]
        names += matrices
        keys.append([int(place[0]) for place in zip(*numbers, strict=False) if len({*place}) == 1])
    counts = [len(list(members)) for _, members in itertools.groupby(keys)]
    shared = len({*names}) < len(names)
    if shared or not all(keys) or keys != sorted(keys) or len({*counts}) > 1 or counts[0] < 2:
        return None
    return [place // counts[0] for place in range(len(chain))]


def _kind(graph: Graph, link: Link) -> str:
    bits = link.inside(graph)
    kinds = set()
    for source in link.writers:
        inside = graph.reach[source.node.number] & bits
        kinds.add(kind_of(graph, graph.nodes(inside)))
    return " and ".join(sorted(kinds)) or kind_of(graph, graph.nodes(bits))


def kind_of(graph: Graph, nodes: Iterable[Node]) -> str:
    """The kind of a branch of these nodes: "attention", "mixer" or "mlp"."""
    kind = "mlp"
    for node in nodes:
        if node.kind == "softmax" and score_product_of(graph, node) is not None:
            return "attention"
        if node.kind == "contraction" or (node.kind == "convolution" and node.about.get("groups", 1) > 1):
            kind = "mixer"
    return kind
