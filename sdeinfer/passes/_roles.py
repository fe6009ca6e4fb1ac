"""Roles, sizes and layers of parameters, read off the graph; and the logits. Tests: `tests/auditing/test_audit.py`."""

import dataclasses
import math

import numpy as np

from sdeinfer.passes._account import MOST_EXPERTS, Account, Matrix, columns_of, places_of, places_of_bias
from sdeinfer.passes._attention import Logits, attention_of, score_product_of, sides_of
from sdeinfer.passes._graph import PRODUCTS, Graph, Source
from sdeinfer.passes._operations import is_a
from sdeinfer.passes._record import Node
from sdeinfer.passes._stream import Link, kind_of, streams_of

type Roles = dict[int, dict[str, np.ndarray | None]]
"""Roles of each product, with the outputs that have them; None where these are not known."""


def account_of(graph: Graph) -> Account:
    """The account of a record."""
    record = graph.record
    streams = streams_of(graph)
    uses: dict[str, list[Node]] = {}
    for node in record.nodes:
        if node.kind in (*PRODUCTS, "embedding") and node.parameters:
            uses.setdefault(node.parameters[0], []).append(node)
    roles: Roles = {}
    places: dict[int, tuple[int, int]] = {}
    logits: list[Logits] = []
    writers: dict[str, list[Source]] = {}
    for chain in streams:
        for link in chain:
            bits = link.inside(graph)
            # Values of another stream, as that of an encoder, are no part of a branch.
            for stream in streams:
                if stream is not chain and bits >> stream[-1].sum.number & 1:
                    bits &= ~graph.reach[stream[-1].sum.number]
            nodes = list(graph.nodes(bits))
            for source in link.writers:
                if source.node.parameters:
                    writers.setdefault(source.node.parameters[0], []).append(source)
            logits += _branch(graph, link, nodes, roles)
            for node in nodes:
                places.setdefault(node.number, (link.layer, chain[-1].layer + 1))
    _outside(graph, streams, roles)
    account = Account(graph, streams, {}, uses, writers, logits, {})
    account.matrices |= _Matrices(account, roles, places).by_name()
    return account


def _branch(graph: Graph, link: Link, nodes: list[Node], roles: Roles) -> list[Logits]:
    """Give the products of a branch their roles; the logits of its attentions."""
    stop = graph.reach[link.skip.origin.number]
    attentions: list[Logits] = []

    def give(node: Node, role: str, *, activations: bool = True) -> None:
        for source in graph.sources(node, stop=stop, activations=activations):
            if source.node.kind in PRODUCTS:
                roles.setdefault(source.node.number, {}).setdefault(role, columns_of(graph.record, source))

    ends = {source.node.number for source in link.writers}
    softmaxes = [node for node in nodes if node.kind == "softmax"]
    # Indices that a router chooses are no part of the branch's values, so that all of the record is looked through.
    routes = [node for node in graph.record.nodes if not node.fixed and is_a(node.operation, "choice")]
    routes += [node for node in softmaxes if score_product_of(graph, node) is None]
    kinds = {}
    for node in softmaxes:
        if (pair := score_product_of(graph, node)) is not None:
            queries, keys = sides_of(graph, pair[0])
            give(queries, "query")
            give(keys, "key")
            logits, values = attention_of(graph, node, pair, link.layer, nodes)
            attentions.append(logits)
            for value in values:
                give(value, "value")
    for source in link.writers:
        if source.node.kind in PRODUCTS:
            before = (node for node in nodes if graph.has(source.node, node) and node is not source.node)
            kinds[source.node.number] = kind_of(graph, before)
            if "value" not in roles.get(source.node.number, {}):
                roles[source.node.number] = {f"{kinds[source.node.number]} output": None}
    mixer = link.kind == "mixer"
    for node in nodes:
        if node.kind in PRODUCTS and node.number not in roles and node.about.get("fan_out", 0) <= MOST_EXPERTS:
            if any(graph.has(route, node) and not graph.depends(route, node) for route in routes):
                roles[node.number] = {"router": None}
    for node in nodes:
        if node.kind == "gate" and not mixer and not _weighs(graph, node, softmaxes):
            _gated(graph, node, ends, give)
    for node in nodes:
        if node.kind in PRODUCTS and node.number not in roles:
            reads = not any(
                graph.has(node, product) for product in nodes if product.kind in PRODUCTS and product is not node
            )
            plain = any(kind == "mlp" for kind in kinds.values()) and not any(
                graph.has(softmax, node) for softmax in softmaxes
            )
            roles[node.number] = {("up" if plain else "reads") if reads else "inner": None}
    return attentions


def _weighs(graph: Graph, node: Node, softmax: list[Node]) -> bool:
    """Whether one side of a product is what softmax, or a router, returned."""
    return any(side.shape[-1:] == (1,) for side in node.inputs) or any(
        graph.term(side).origin in softmax for side in node.inputs
    )


def _gated(graph: Graph, node: Node, ends: set[int], give) -> None:
    """Give roles to the sides of a product of activations: the side through a nonlinearity is the gate."""
    linear = [{source.node.number for source in graph.sources(side)} for side in node.inputs]
    if (linear[0] | linear[1]) & ends or node.inputs[0] is node.inputs[1]:
        return
    if bool(linear[0]) == bool(linear[1]):
        for side in node.inputs:
            give(side, "up")
        return
    gate, up = node.inputs if not linear[0] else node.inputs[::-1]
    give(gate, "gate")
    give(up, "up", activations=False)


def _outside(graph: Graph, streams: list[list[Link]], roles: Roles) -> None:
    """Products before and after the streams."""
    ends = [chain[-1].sum for chain in streams]
    outputs = {graph.term(node).origin.number for node in graph.record.outputs}
    for node in graph.record.nodes:
        if node.kind not in PRODUCTS or node.number in roles:
            continue
        after = any(graph.has(node, end) for end in ends)
        roles[node.number] = {("head" if node.number in outputs else "inner") if after else "input": None}


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


def _of_one_expert(matrix: Matrix, experts: int) -> Matrix:
    """A stack of the matrices of all experts that one product multiplies by, with the fans of one of them."""
    if len(matrix.shape) != 3 or matrix.shape[0] != experts or matrix.places is not None:
        return matrix
    _, *sizes = matrix.shape
    fan_in, fan_out = (fan // experts if fan not in sizes else fan for fan in (matrix.fan_in, matrix.fan_out))
    return dataclasses.replace(matrix, fan_in=fan_in, fan_out=fan_out)


class _Matrices:
    """The matrices of each parameter, by the first use that says what they are; gains of norms as they are used."""

    def __init__(self, account: Account, roles: Roles, places: dict[int, tuple[int, int]]):
        self.graph, self.gains, self.roles, self.places = account.graph, account.gains, roles, places
        self.width, self.layers = account.width, account.layers
        self.inside = sum(1 << number for number in places)
        self.matrices: dict[str, list[Matrix]] = {}

    def by_name(self) -> dict[str, Matrix]:
        """All matrices by name."""
        for node in self.graph.record.nodes:
            if node.kind in PRODUCTS and node.parameters:
                self._product(node)
            elif node.operation in ("embedding", "index_select") and node.parameters:
                self._table(node)
            elif node.kind == "norm":
                self._norm(node)
            elif node.kind == "scale" and node.parameters:
                self._scale(node)
            elif node.kind == "sum" and not node.fixed and node.parameters:
                self._added(node)
        matrices = {matrix.name: matrix for array in self.matrices.values() for matrix in array}
        experts = {matrix.layer: matrix.fan_out for matrix in matrices.values() if matrix.role == "router"}
        return {name: _of_one_expert(m, experts.get(m.layer, 0)) for name, m in matrices.items()}

    def _note(self, name: str, role: str, node: Node, fans: tuple[int, int] = (0, 0), of: str = "", parts=None) -> None:
        if name not in self.graph.record.parameters:
            return
        known = self.matrices.get(name)
        if known and not (role == "embedding" and known[0].role != "embedding"):
            return
        layer, layers = self.places.get(node.number, (None, self.layers))
        shape = self.graph.record.parameters[name].shape
        matrix = Matrix(role, *fans, self.width, layers, layer, name, shape, of, name)
        self.matrices[name] = [
            dataclasses.replace(
                matrix,
                role="bias" if role == "bias" else part_role,
                of=part_role if role == "bias" else "",
                fan_out=len(places.columns),
                name=f"{name}[{label}]",
                shape=places.shape,
                places=places,
            )
            for label, (part_role, places) in (parts or {}).items()
        ] or [matrix]

    def _product(self, node: Node) -> None:
        columns = self.roles.get(node.number, {"other": None})
        role, fans = next(iter(columns)), (node.about["fan_in"], node.about["fan_out"])
        name, *biases = node.parameters
        parameter = self.graph.record.parameters.get(name)
        parts = {} if parameter is None else places_of(node, parameter, columns)
        self._note(name, role, node, fans, parts=parts)
        if len(columns) > 1 and not parts and len(self.matrices.get(name, ())) == 1:
            (matrix,) = self.matrices[name]
            self.matrices[name] = [dataclasses.replace(matrix, roles=tuple(columns))]
        for bias in biases:
            self._note(bias, "bias", node, fans, role, places_of_bias(fans[1], columns))

    def _table(self, node: Node) -> None:
        parameter = self.graph.record.parameters.get(node.parameters[0])
        rows, *sizes = parameter.shape if parameter is not None else (0, 0)
        role = "position" if node.fixed or _counted(node.inputs[0]) else "embedding"
        self._note(node.parameters[0], role, node, (rows, sizes[-1] if sizes else 0))

    def _norm(self, node: Node) -> None:
        for name, role in zip(node.parameters, ("norm", "norm bias"), strict=False):
            self._note(name, role, node)
        gain = node.about.get("gain", {})
        if "mean" in gain:
            self.gains.setdefault(node.parameters[0], []).append((gain["mean"], gain["sd"]))

    def _scale(self, node: Node) -> None:
        """A parameter that multiplies: the gain of a norm, if no other one is between."""
        origin, tensor, gains = self.graph.term(node.inputs[0]).origin, node.inputs[0], 0
        while tensor.kind == "scale" or (tensor.kind == "view" and is_a(tensor.operation, "move")):
            gains += tensor.kind == "scale" and bool(tensor.parameters)
            tensor = tensor.inputs[0]
        normed = tensor.kind == "norm" and not gains and not tensor.parameters
        for name in node.parameters:
            self._note(name, "norm" if normed else "scale", origin)
            if normed and "mean" in node.about:
                self.gains.setdefault(name, []).append((node.about["mean"], node.about["sd"]))

    def _added(self, node: Node) -> None:
        """A parameter that is added: a bias, an offset of a norm or of the stream, or a mask."""
        parameters = self.graph.record.parameters
        origin = self.graph.term(node.inputs[0]).origin if node.inputs else node
        of_piece = origin.shape[-1:] != node.shape[-1:] or math.prod(node.shape) < math.prod(origin.shape)
        if origin.kind == "product" and of_piece:
            origin = node  # as of a time step
        usual = {"norm": "norm bias", "product": "bias", "convolution": "bias"}.get(origin.kind, "other")
        columns = self.roles.get(origin.number, {})
        fans = origin.about.get("fan_in", 0), origin.about.get("fan_out", 0)
        for name in node.parameters:
            if name not in parameters:
                continue
            shape = parameters[name].shape
            table = max(shape, default=1) < parameters[name].size
            before = not self.graph.reach[node.number] & self.inside & ~(1 << node.number)
            # A table that is added to tokens varies over these, unless it is one of heads.
            role = "offset" if table and (before or usual == "bias" or len(node.shape) < 4) else usual
            role = "position" if role == "offset" and before and shape[-2] > 1 else role
            role = "mask" if parameters[name].masks else role
            of = next(iter(columns), "") if role == "bias" else ""
            self._note(name, role, node, fans, of, places_of_bias(fans[1], columns) if role == "bias" else None)
