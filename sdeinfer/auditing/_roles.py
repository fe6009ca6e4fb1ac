"""Roles, sizes and layers of parameters, read off the graph; and the logits. Tests: `tests/auditing/test_audit.py`."""

from sdeinfer.auditing._account import Account, Logits, Matrix
from sdeinfer.auditing._graph import PRODUCTS, Graph, Source
from sdeinfer.auditing._record import Node
from sdeinfer.auditing._stream import Link, kind_of, logits_of, streams_of

CHOICES = ("topk", "top_k", "sort", "argmax")
"""Operations by which routers choose."""


def account_of(graph: Graph) -> Account:
    """The books of a record."""
    record = graph.record
    streams = streams_of(graph)
    uses: dict[str, list[Node]] = {}
    for node in record.nodes:
        if node.kind in (*PRODUCTS, "embedding"):
            uses.setdefault(node.parameters[0] if node.parameters else "", []).append(node)
    roles: dict[int, list[str]] = {}
    places: dict[int, tuple[int, int]] = {}
    logits: list[Logits] = []
    writers: dict[str, list[tuple[Link, Source]]] = {}
    longest = max((chain[-1].layer + 1 for chain in streams), default=0)
    for chain in streams:
        for link in chain:
            own = graph.reach[link.branch.origin.number] & ~graph.reach[link.skip.origin.number]
            # Values of another stream, as that of an encoder, are no part of a branch.
            for other in streams:
                if other is not chain and own >> other[-1].sum.number & 1:
                    own &= ~graph.reach[other[-1].sum.number]
            nodes = list(graph.nodes(own))
            for source in link.writers:
                if source.node.parameters:
                    writers.setdefault(source.node.parameters[0], []).append((link, source))
            logits += _branch(graph, link, nodes, roles)
            for node in nodes:
                places.setdefault(node.number, (link.layer, chain[-1].layer + 1))
    _outside(graph, streams, roles)
    width = max(streams, key=len)[0].sum.shape[-1] if streams else 0
    matrices, gains = _matrices(graph, roles, places, width, longest)
    return Account(graph, streams, matrices, uses, writers, logits, gains)


def _branch(graph: Graph, link: Link, nodes: list[Node], roles: dict[int, list[str]]) -> list[Logits]:
    """Give the products of a branch their roles; the logits of its attentions."""
    stop = graph.reach[link.skip.origin.number]
    found: list[Logits] = []

    def give(node: Node, role: str, *, activations: bool = True) -> None:
        for source in graph.sources(node, stop=stop, activations=activations):
            if source.node.kind in PRODUCTS and role not in roles.setdefault(source.node.number, []):
                roles[source.node.number].append(role)

    ends = {source.node.number for source in link.writers}
    softmax = [node for node in nodes if node.kind == "softmax"]
    # Indices that a router chooses are no part of the branch's values, so that all of the record is looked through.
    routes = [node for node in graph.record.nodes if not node.fixed and node.operation in CHOICES]
    routes += [node for node in softmax if logits_of(graph, node) is None]
    kinds = {}
    for node in nodes:
        if node.kind == "attention":
            for each, role in zip(node.inputs, ("query", "key", "value"), strict=False):
                give(each, role)
            found.append(_fused(graph, node, link))
        elif node.kind == "softmax" and (pair := logits_of(graph, node)) is not None:
            give(pair[0].inputs[0], "query")
            give(pair[0].inputs[1], "key")
            found.append(_written(graph, node, pair, link, nodes, give))
    for source in link.writers:
        if source.node.kind in PRODUCTS:
            before = (node for node in nodes if graph.has(source.node, node) and node is not source.node)
            kinds[source.node.number] = kind_of(graph, before)
            if not set(roles.get(source.node.number, ())) & {"value"}:
                roles[source.node.number] = [f"{kinds[source.node.number]} output"]
    mixer = link.kind == "mixer"
    for node in nodes:
        if node.kind in PRODUCTS and node.number not in roles and node.about.get("fan_out", 0) <= 512:
            if any(graph.has(each, node) and not graph.depends(each, node) for each in routes):
                roles[node.number] = ["router"]
    for node in nodes:
        if node.kind == "gate" and not mixer and not softmax_inside(graph, node, softmax):
            _gated(graph, node, ends, roles, give)
    for node in nodes:
        if node.kind in PRODUCTS and node.number not in roles:
            reads = not any(graph.has(node, each) for each in nodes if each.kind in PRODUCTS and each is not node)
            plain = any(kind == "mlp" for kind in kinds.values()) and not any(
                graph.has(each, node) for each in nodes if each.kind == "attention"
            )
            roles[node.number] = [("up" if plain else "reads") if reads else "inner"]
    return found


def softmax_inside(graph: Graph, node: Node, softmax: list[Node]) -> bool:
    """Whether one side of a product is what softmax, or a router, returned."""
    return any(each.shape[-1:] == (1,) for each in node.inputs) or any(
        graph.term(each).origin in softmax for each in node.inputs
    )


def _gated(graph: Graph, node: Node, ends: set[int], roles: dict[int, list[str]], give) -> None:
    """Give roles to the sides of a product of activations: the side through a nonlinearity is the gate."""
    linear = [{each.node.number for each in graph.sources(side)} for side in node.inputs]
    if (linear[0] | linear[1]) & ends or node.inputs[0] is node.inputs[1]:
        return
    if bool(linear[0]) == bool(linear[1]):
        for side in node.inputs:
            give(side, "up")
        return
    gate, up = node.inputs if not linear[0] else node.inputs[::-1]
    give(gate, "gate")
    give(up, "up", activations=False)


def _fused(graph: Graph, node: Node, link: Link) -> Logits:
    query, key = (graph.term(each) for each in node.inputs[:2])
    factor = node.about["scale"] * query.factor * key.factor
    normed = "norm" in (query.origin.kind, key.origin.kind)
    return Logits(factor, node.about["head_size"], link.layer, normed, 1.0, node.about["dropout"])


def _written(graph: Graph, softmax: Node, pair: tuple[Node, float], link: Link, nodes: list[Node], give) -> Logits:
    product, factor = pair
    query, key = (graph.term(each) for each in product.inputs)
    after = 1.0
    for node in nodes:
        if node.kind == "contraction" and node is not product:
            for one, other in (node.inputs, node.inputs[::-1]):
                term = graph.term(one)
                if term.origin is softmax:
                    give(other, "value")
                    after = term.factor
    normed = "norm" in (query.origin.kind, key.origin.kind)
    return Logits(factor * query.factor * key.factor, product.about["fan_in"], link.layer, normed, after, 0.0)


def _outside(graph: Graph, streams: list[list[Link]], roles: dict[int, list[str]]) -> None:
    """Products before and after the streams."""
    ends = [chain[-1].sum for chain in streams]
    outputs = {graph.term(node).origin.number for node in graph.record.outputs}
    for node in graph.record.nodes:
        if node.kind not in PRODUCTS or node.number in roles:
            continue
        after = any(graph.has(node, end) for end in ends)
        roles[node.number] = [("head" if node.number in outputs else "inner") if after else "input"]


def _counted(index: Node) -> bool:
    """Whether an index counts tokens that are no padding: it is one of positions."""
    stack, seen = [index], set()
    while stack:
        node = stack.pop()
        if node.operation == "cumsum":
            return True
        # An index that the network computes from its values is no count.
        if node.number not in seen and node.kind not in (*PRODUCTS, "gate", "contraction"):
            seen.add(node.number)
            stack += node.inputs
    return False


def _matrices(graph: Graph, roles: dict, places: dict, width: int, layers: int) -> tuple[dict[str, Matrix], dict]:
    """The matrix of each parameter, by the first use that says what it is; gains of norms as they are used."""
    found: dict[str, Matrix] = {}
    gains: dict[str, list[tuple[float, float]]] = {}
    record = graph.record

    def note(name: str, role: str, node: Node, fan_in: int = 0, fan_out: int = 0, of: str = "") -> None:
        if name in record.parameters and (
            name not in found or (role == "embedding" and found[name].role != "embedding")
        ):
            layer, own = places.get(node.number, (None, layers))
            found[name] = Matrix(role, fan_in, fan_out, width, own, layer, name, record.parameters[name].shape, of)

    for node in record.nodes:
        if node.kind in PRODUCTS and node.parameters:
            role = "/".join(roles.get(node.number, ["other"]))
            note(node.parameters[0], role, node, node.about["fan_in"], node.about["fan_out"])
            for name in node.parameters[1:]:
                note(name, "bias", node, node.about["fan_in"], node.about["fan_out"], role)
        elif node.operation in ("embedding", "index_select") and node.parameters:
            rows, *rest = (
                record.parameters[node.parameters[0]].shape if node.parameters[0] in record.parameters else (0, 0)
            )
            role = "position" if node.fixed or _counted(node.inputs[0]) else "embedding"
            note(node.parameters[0], role, node, rows, rest[-1] if rest else 0)
        elif node.kind == "norm":
            for name, role in zip(node.parameters, ("norm", "norm bias"), strict=False):
                note(name, role, node)
            if "mean" in node.about.get("gain", {}):
                of = node.about["gain"]
                gains.setdefault(node.parameters[0], []).append((of["mean"], of["sd"]))
        elif node.kind == "scale" and node.parameters:
            at = graph.term(node.inputs[0]).origin
            normed = at.kind == "norm"
            for name in node.parameters:
                note(name, "norm" if normed else "scale", at)
                if normed and "mean" in node.about:
                    gains.setdefault(name, []).append((node.about["mean"], node.about["sd"]))
        elif node.kind == "sum" and not node.fixed and node.parameters:
            at = graph.term(node.inputs[0]).origin if node.inputs else node
            if at.kind in PRODUCTS and at.shape[-1:] != node.shape[-1:] and at.kind == "product":
                at = node  # of a piece, as of a time step
            role = {"norm": "norm bias", "product": "bias", "convolution": "bias"}.get(at.kind, "other")
            before = not any(graph.has(node, each) for each in record.nodes if each.number in places)
            for name in node.parameters:
                shape = record.parameters[name].shape
                table = max(shape, default=1) < record.parameters[name].size
                role = "offset" if table and (before or role == "bias") else role
                of = "/".join(roles.get(at.number, ())) if role == "bias" else ""
                note(name, role, node, at.about.get("fan_in", 0), at.about.get("fan_out", 0), of)
    return found, gains
