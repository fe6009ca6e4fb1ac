"""Taps of a pass: the states of a residual stream, and the tensors that each branch reads and adds.

Tests: `tests/observation/test_networks.py`.
"""

import dataclasses
import fnmatch
import functools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from sdeinfer._files import InputError
from sdeinfer.passes._account import Account, Matrix, common_beginning
from sdeinfer.passes._attention import softmaxes_in
from sdeinfer.passes._graph import PRODUCTS, Source
from sdeinfer.passes._readings import BranchNorms, Reading, norms_of, readings_of
from sdeinfer.passes._record import Node, Record, Watch
from sdeinfer.passes._stream import Link, kind_of


class Taps:
    """Nodes of a pass that is to come, and what is done with their values."""

    def __init__(self) -> None:
        self._takers: dict[int, list[Callable[[Any], None]]] = defaultdict(list)
        self._unseen: dict[int, str] = {}

    def require_seen(self) -> None:
        """Raise an InputError for nodes that the pass did not show, as of fused operations."""
        for where in filter(None, self._unseen.values()):
            raise InputError(f"model: {where}: an operation of the model hides it")

    def see(self, where: str, nodes: Mapping[str, Node], take: Callable[[dict[str, Any]], None]) -> None:
        """Collect the values of some nodes by name, and take them when all are there; `where` is for messages."""
        values: dict[str, Any] = {}
        key = len(self._unseen)
        self._unseen[key] = where

        def keep(name: str, value: Any) -> None:
            values[name] = value
            if len(values) == len(nodes):
                self._unseen[key] = ""
                take(values.copy())
                values.clear()

        for name, node in nodes.items():
            self._takers[node.order].append(functools.partial(keep, name))

    def with_others(self, taps: "Taps") -> "Taps":
        """These taps, and those of another one, which keeps count of its own."""
        for order, takers in taps._takers.items():
            self._takers[order] += takers
        return self

    @property
    def watch(self) -> Watch:
        """The functions that take the values of each node."""

        def show(takers: list[Callable[[Any], None]], value: Any) -> None:
            for take in takers:
                take(value)

        return {order: functools.partial(show, takers) for order, takers in self._takers.items()}


@dataclasses.dataclass(frozen=True, eq=False)
class Branch:
    """A residual branch of a pass.

    Attributes:
        link: its sum, that of all branches beside each other.
        kind: "attention", "mlp" or "mixer".
        place: its number among the branches of the stream.
        beside: whether it reads the state that the branch before it reads.
        name: what the names of its matrices have in common.
        readings: what the matrices that read the stream read; one tensor.
        adds: the increment without the factor of the sum: what is added, or what a norm of it reads.
        stream: the other summand of its sum.
        norm: the norm of the increment; None without one.
        factor: the factor of `adds` in the sum; 1 before a norm.
        norm_factor: the factor of the norm in the sum.
        writers: the products that it adds.
        norms: its norms.
        matrices: by role its matrices, each with its product.
        nodes: all nodes between the stream and what it adds.
    """

    link: Link
    kind: str
    place: int
    beside: bool
    name: str
    readings: tuple[Reading, ...]
    adds: Node
    stream: Node
    norm: Node | None
    factor: float
    norm_factor: float
    writers: list[Source]
    norms: BranchNorms
    matrices: Mapping[str, list[tuple[Matrix, Node]]]
    nodes: list[Node]

    @property
    def where(self) -> str:
        """The branch in messages."""
        return f"layer {self.link.layer}, {self.kind} ({self.name})"

    @property
    def reads(self) -> Node:
        """The tensor that the branch reads, after any norm before it, as it was before it was moved."""
        node, size = self.readings[0].product.inputs[0], math.prod(self.link.sum.shape)
        # Experts read some tokens several times.
        while node.kind == "view" and (math.prod(node.inputs[0].shape) == size or math.prod(node.shape) != size):
            node = node.inputs[0]
        return node

    def require_one_reading(self) -> None:
        """Raise an InputError unless its matrices read one tensor with the features of the stream."""
        if not self.readings:
            raise InputError(f"{self.where}: no matrix of it is seen that reads the stream")
        width, first = self.link.sum.shape[-1], self.readings[0]
        for reading in self.readings:
            # One norm may be called for each matrix.
            again = reading.normed and reading.read is first.read and reading.norms == first.norms
            same = reading.origin is first.origin or (again and math.isclose(reading.square, first.square))
            if not same or reading.product.inputs[0].shape[-1:] != (width,):
                raise InputError(f"{self.where}: {reading.name} reads another tensor than {first.name}")


def _stream_of(account: Account, names: str | None = None) -> list[Link]:
    """The residual stream of a network, or the one whose parameters match a glob."""
    streams = account.streams
    if names is not None:
        streams = [chain for chain in streams if any(fnmatch.fnmatchcase(x, names) for x in _names_in(chain))]
    if len(streams) == 1:
        return streams[0]
    if streams:
        known = ", ".join(sorted({f"{common_beginning(_names_in(chain))}.*" for chain in streams}))
        raise InputError(f"stream: the model has {len(streams)} residual streams: name one, as by {known}")
    condition = "" if names is None else f" with parameters {names!r}"
    raise InputError(f"stream: the model has no residual stream{condition}")


def _names_in(chain: Iterable[Link]) -> list[str]:
    return [name for link in chain for source in link.writers for name in source.node.parameters]


def branches_of(account: Account, stream: str | None = None) -> list[Branch]:
    """The branches of the residual stream, or of the one whose parameters match a glob, in order."""
    norms = {id(of_link.link): of_link for of_link in norms_of(account, readings_of(account))}
    matrices: dict[str, list[Matrix]] = defaultdict(list)
    for matrix in account.matrices.values():
        matrices[matrix.array].append(matrix)
    branches: list[Branch] = []
    for link in _stream_of(account, stream):
        for number, (summand, factor) in enumerate(_summands(account, link)):
            place, of_link = len(branches), norms[id(link)]
            before = branches[-1].link.layer if branches else None
            beside = number > 0 or (of_link.back == 1 and before == link.layer)
            branches.append(_branch(account, matrices, of_link, summand, factor, place=place, beside=beside))
    return branches


def _summands(account: Account, link: Link) -> list[tuple[Node, float]]:
    """The tensor that a branch adds, with its factor; or those of branches of several kinds, whose sum is added."""
    side = link.side(account.graph)
    branch, factor = link.sum.inputs[side], link.sum.factors[side]
    if " and " not in link.kind:
        return [(branch, factor)]
    summands, stack = [], [(branch, factor)]
    while stack:
        node, factor = stack.pop()
        term = account.graph.term(node)
        total = term.origin
        if total.is_sum_of_two:
            stack += [(side, factor * term.factor * c) for side, c in zip(total.inputs, total.factors, strict=True)]
        else:
            summands.append((node, factor))
    return sorted(summands, key=lambda pair: _kind(account, link, pair[0]))


def _nodes(account: Account, link: Link, summand: Node) -> list[Node]:
    graph = account.graph
    return [*graph.nodes(graph.between(graph.term(summand).origin, link.skip.origin))]


def _kind(account: Account, link: Link, summand: Node) -> str:
    return link.kind if " and " not in link.kind else kind_of(account.graph, _nodes(account, link, summand))


def _branch(
    account: Account,
    by_array: Mapping[str, list[Matrix]],
    norms: BranchNorms,
    summand: Node,
    factor: float,
    *,
    place: int,
    beside: bool,
) -> Branch:
    graph, link = account.graph, norms.link
    nodes, kind = _nodes(account, link, summand), _kind(account, link, summand)
    products = {node.number for node in nodes if node.kind in PRODUCTS}
    matrices: dict[str, list[tuple[Matrix, Node]]] = defaultdict(list)
    for node in nodes:
        for matrix in by_array.get(node.parameters[0], ()) if node.number in products and node.parameters else ():
            matrices[matrix.role].append((matrix, node))
    readers = tuple(reading for reading in norms.readers if reading.product.number in products)
    term = graph.term(summand)
    norm = term.origin if norms.of_branch and term.origin.kind == "norm" else None
    return Branch(
        link=link,
        kind=kind,
        place=place,
        beside=beside,
        name=common_beginning(matrix.array for role in matrices.values() for matrix, _ in role) or f"{kind}.{place}",
        readings=readers,
        adds=summand if norm is None else norm.inputs[0],
        stream=link.stream(account.graph),
        norm=norm,
        factor=factor if norm is None else 1.0,
        norm_factor=factor * term.factor,
        writers=[source for source in link.writers if source.node.number in products],
        norms=dataclasses.replace(norms, readers=readers),
        matrices=matrices,
        nodes=nodes,
    )


def states_of(branches: list[Branch]) -> list[Node]:
    """The stream before its first branch, and after the last sum of each layer."""
    first, last = branches[0], {branch.link.layer: branch.link.sum for branch in branches}
    # A factor of the stream alone, or of the branch alone, is no part of it.
    read = first.readings[0].product.inputs[0] if first.readings else first.link.skip.origin
    shared = _way(read)
    start = next((node for node in _way(first.stream) if node in shared), first.link.skip.origin)
    return [start, *last.values()]


def _way(node: Node) -> list[Node]:
    """A tensor, and what it was made of by views, factors and norms."""
    tensors = [node]
    while (
        node.inputs and node.kind in ("view", "scale", "norm", "join") or (node.kind == "sum" and len(node.inputs) == 1)
    ):
        node = node.inputs[0]
        tensors.append(node)
    return tensors


def products_in_turn(account: Account) -> list[Node]:
    """The hidden states of a network without a residual stream: the input, and the output of each matrix, scaled."""
    record, states = account.graph.record, []
    for node in record.nodes:
        if node.kind == "product":
            states += [node.inputs[0]] if not states else []
            states.append(node)
    return [*states[:1], *(_scaled(record, node) for node in states[1:])]


def _scaled(record: Record, node: Node) -> Node:
    """A tensor after the factors and offsets that all that follows from it has in common."""
    while len(after := record.readers[node.number]) == 1:
        (reader,) = after
        if reader.kind not in ("scale", "sum") or len(reader.inputs) > 1:
            break
        node = reader
    return node


def in_rows(account: Account, branches: list[Branch]) -> Callable[[Any], Any]:
    """Tensors with the entries of the stream as arrays (tokens, width) or (prompts, tokens, width)."""
    shape = branches[0].link.sum.shape
    softmaxes = softmaxes_in(account.graph, account.graph.record.nodes)
    tokens = softmaxes[0].shape[-1] if softmaxes else None

    def placed(values: Any) -> Any:
        values = values.reshape(shape)
        if len(shape) > 3:
            values = values.reshape(shape[0], -1, shape[-1])
        elif len(shape) == 3 and tokens == shape[0] != shape[1]:
            values = values.swapaxes(0, 1)
        elif len(shape) == 2 and tokens is not None and shape[0] > tokens and shape[0] % tokens == 0:
            values = values.reshape(-1, tokens, shape[-1])
        return values[0] if len(values.shape) == 3 and values.shape[0] == 1 else values

    return placed
