"""Attentions: softmax of a product of activations, with its factor, and what the probabilities weigh.

Tests: `tests/auditing/test_kinds.py`.
"""

import dataclasses
from collections.abc import Iterable

import numpy as np

from sdeinfer.passes._graph import PRODUCTS, Graph
from sdeinfer.passes._operations import is_a
from sdeinfer.passes._places import keys_first, torn_heads
from sdeinfer.passes._record import Node

LOGIT_NODES = 24
"""Nodes that are looked at between a softmax and its product: masks, biases, scales and a cap."""


@dataclasses.dataclass(frozen=True)
class Logits:
    """The logits of one attention: the factor c of q kᵀ before softmax, d_k, and what is done with the probabilities.

    Attributes:
        factor: c.
        head_size: d_k.
        layer: number of its layer.
        after: the factor of the probabilities.
        over: "keys", or "queries" or "another axis" if the probabilities sum to 1 over it; "" where it was not seen.
        heads: number of heads; 1 where it is not seen.
        norms: the norms of queries and keys.
        apart: whether values follow from another tensor than keys.
        short: whether probabilities of all keys sum to less than 1.
        torn: where heads are made of several tokens, "split" or "joined"; "" if they are not.
        turned: "queries" or "keys" if they alone are rotated by positions; "" if both or none are.
    """

    factor: float
    head_size: int
    layer: int | None
    after: float
    over: str = ""
    heads: int = 1
    norms: tuple[Node, ...] = dataclasses.field(default=(), repr=False, compare=False)
    apart: bool = False
    short: bool = False
    torn: str = ""
    turned: str = ""

    @property
    def normed(self) -> bool:
        """Whether queries or keys are normed."""
        return bool(self.norms)

    @property
    def both(self) -> bool:
        """Whether both are."""
        return len(self.norms) == 2


def softmaxes_in(graph: Graph, nodes: Iterable[Node]) -> list[Node]:
    """Softmaxes of products of activations, which are those of attentions."""
    return [node for node in nodes if node.kind == "softmax" and score_product_of(graph, node) is not None]


def score_product_of(graph: Graph, softmax: Node) -> tuple[Node, float] | None:
    """The matrix product of activations that softmax reads, and the factor between; through masks, biases and tanh."""
    return next(iter(_products_of(graph, softmax)), None)


def _products_of(graph: Graph, softmax: Node) -> list[tuple[Node, float]]:
    """All products that a softmax reads: logits may be a sum of several, or join those of some tokens."""
    products: dict[Node, float] = {}
    stack, seen = [(softmax.inputs[0], 1.0)], 0
    while stack and seen < LOGIT_NODES:
        node, factor = stack.pop()
        seen += 1
        term = graph.term(node)
        origin, factor = term.origin, factor * term.factor
        if origin.kind == "contraction":
            products.setdefault(origin, factor * origin.factors[0])
        elif origin.kind in ("sum", "join") or origin.operation == "tanh":
            stack += zip(
                origin.inputs, [factor * c for c in origin.factors or (1.0,) * len(origin.inputs)], strict=False
            )
        elif origin.kind == "other" and len(origin.inputs) == 1 and _keeps_entries(origin):
            stack.append((origin.inputs[0], factor))
    return [*products.items()]


def _keeps_entries(node: Node) -> bool:
    """Whether a mask or a bound is all that an operation applies to logits."""
    return "mask" in node.operation or (is_a(node.operation, "bound") and node.shape == node.inputs[0].shape)


def _before_masks(graph: Graph, origin: Node) -> Node:
    """The probabilities that were normalised again, or multiplied by a mask."""
    while origin.kind == "norm" or (origin.kind == "scale" and not origin.parameters):
        origin = graph.term(origin.inputs[0]).origin
    return origin


def sides_of(graph: Graph, product: Node) -> tuple[Node, ...]:
    """The queries and the keys of a product of both."""
    return product.inputs[::-1] if keys_first(graph.record, product) else product.inputs


def attention_of(
    graph: Graph, softmax: Node, pair: tuple[Node, float], layer: int, nodes: list[Node]
) -> tuple[Logits, list[Node]]:
    """The attention of a softmax of a product of activations, and what its probabilities weigh."""
    product, factor = pair
    sides = sides_of(graph, product)
    query, key = map(graph.term, sides)
    after, over, short, values, readers = 1.0, "", False, [], []
    for node in nodes:
        if node.kind != "contraction" or node is product:
            continue
        for place, side in enumerate(node.inputs):
            term = graph.term(side)
            if softmax is _before_masks(graph, term.origin):
                readers.append(node)
                values.append(node.inputs[1 - place])
                after = term.factor
                sums = node.about.get("sums", (None, None))[place]
                over = over or _summed_over(sums, after)
                whole = over == "keys" and side.shape[-1] == softmax.shape[-1]  # and no sink
                short = short or (whole and sums is not None and sums[0] < 1 - 1e-2)
    norms = tuple(term.origin for term in (query, key) if term.origin.kind == "norm")
    alone = len(_products_of(graph, softmax)) == 1
    apart = alone and over == "keys" and any(_apart(graph, sides[1], value) for value in values)
    logits = Logits(
        factor=factor * query.factor * key.factor,
        head_size=product.about["fan_in"],
        layer=layer,
        after=after,
        over=over,
        heads=softmax.shape[-3] if len(softmax.shape) > 3 else 1,
        norms=norms,
        apart=apart,
        short=short,
        torn=torn_heads(graph, softmax, product, readers),
        turned=_alone_turned(graph, sides),
    )
    return logits, values


def attended(probabilities: np.ndarray) -> np.ndarray | None:
    """Which tokens each token attends to, by probabilities of heads and items; None if these differ in that.

    One column more than tokens is that of a sink.
    """
    tokens = probabilities.shape[-2]
    if probabilities.shape[-1] == tokens + 1:
        probabilities = probabilities[..., :-1]
    if probabilities.shape[-2:] != (tokens, tokens):
        return None
    mask = probabilities.reshape(-1, tokens, tokens) > 0
    return mask[0] if (mask == mask[0]).all() and mask[0].any(axis=1).all() else None


def _summed_over(sums: tuple[float, float, float] | None, after: float) -> str:
    """The axis over which probabilities sum to 1, by their sums over keys and, less 1, over queries."""
    if sums is None or abs(after - 1) > 1e-3:
        return ""
    least, largest, deviation = sums
    if largest <= 1 + 1e-3:
        return "keys"
    return "queries" if deviation < 1e-3 else "another axis"


def _apart(graph: Graph, keys: Node, values: Node) -> bool:
    """Whether the matrices of keys and of values read different tensors, none of which is made of the other one."""
    reads = []
    for side in (keys, values):
        products = [source.node for source in graph.sources(side) if source.node.kind == "product"]
        reads.append([node for product in products for node in _made_of(product.inputs[0])])
    near = any(
        key is value or any(graph.has(a, b) and not graph.depends(a, b) for a, b in ((key, value), (value, key)))
        for key in reads[0]
        for value in reads[1]
    )
    return all(reads) and not near


def _alone_turned(graph: Graph, sides: tuple[Node, ...]) -> str:
    queries, keys = (_is_turned(graph, side) for side in sides)
    if queries == keys:
        return ""
    return "queries" if queries else "keys"


def _is_turned(graph: Graph, side: Node) -> bool:
    """Whether queries or keys are rotated after their product: a sum of pieces times cosines and sines."""
    stack, seen = [side], set()
    while stack:
        node = stack.pop()
        if node.number in seen or node.fixed or node.kind in (*PRODUCTS, "embedding"):
            continue
        seen.add(node.number)
        if node.kind == "scale" and node.inputs[0].operation == "view_as_complex":
            return True
        if node.kind == "sum" and len(node.inputs) > 1 and graph.rotated(node) is not None:
            factors = [_before_views(tensor) for tensor in node.inputs]
            if all(factor.kind == "scale" and not factor.about.get("uniform") for factor in factors):
                return True
        stack += node.inputs
    return False


def _before_views(node: Node) -> Node:
    while node.kind == "view":
        node = node.inputs[0]
    return node


def _made_of(node: Node) -> list[Node]:
    """The sums and products that a tensor is made of by norms, convolutions and views, which keys have of their own."""
    origins, stack = [], [node]
    while stack:
        node = stack.pop()
        through = node.kind in ("norm", "convolution", "view", "scale", "join") or len(node.inputs) == 1
        if node.inputs and through and node.kind not in ("product", "contraction", "embedding"):
            stack += node.inputs
        else:
            origins.append(node)
    return origins
