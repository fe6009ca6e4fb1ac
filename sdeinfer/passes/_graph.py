"""The record as a graph: origins of tensors, norms and activations that are written out, dependences.

Tests: `tests/auditing/test_audit.py`.
"""

import dataclasses
import math
from collections.abc import Iterator

from sdeinfer.passes._operations import is_a
from sdeinfer.passes._record import Node, Record

PRODUCTS = ("product", "convolution")

REDUCTION_STEPS = 8
"""Operations between a sum over an axis and the factor of a norm: a mean, ε, a root and their views."""

ROOT_NODES = 12
"""Nodes that are looked at for the roots of a tensor: masks of dropout have few."""

PIECE_NODES = 64
"""Nodes that are looked at for the one tensor whose pieces a sum has: a rotation has few."""


@dataclasses.dataclass(frozen=True)
class Term:
    """A tensor as a factor times its origin, with the names of parameters that scale it."""

    origin: Node
    factor: float = 1.0
    scales: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Source:
    """A product that a tensor is linear in: the factor on the way, and whether a norm or a gate is on it.

    `moves` are the views that follow the product directly, on each way; None for one that is not known.
    """

    node: Node
    factor: float = 1.0
    scales: tuple[str, ...] = ()
    normed: bool = False
    gated: bool = False
    moves: tuple[tuple[Node, ...] | None, ...] = ((),)

    @property
    def plain(self) -> bool:
        """Whether numbers alone are on the way."""
        return not (self.normed or self.scales or self.gated)


class Graph:
    """Dependences between the nodes of a record, as sets of bits; `depends` is by products with parameters."""

    def __init__(self, record: Record):
        self.record = record
        self.reach: list[int] = []
        self.through: list[int] = []
        self.origins: dict[int, tuple[Node, float]] = {}
        for node in record.nodes:
            reach = through = 0
            for parent in node.inputs:
                reach |= self.reach[parent.number]
                through |= self.through[parent.number]
            if node.kind in PRODUCTS:
                through |= reach
            if not node.fixed and node.kind != "scale" and (node.kind != "view" or is_a(node.operation, "piece")):
                reach |= 1 << node.number
            self.reach.append(reach)
            self.through.append(through)
            if node.kind == "gate":
                self._written_out(node)

    def _written_out(self, node: Node) -> None:
        """Norms, activations, softmax and dropout that are products of a tensor and a function of it."""
        for tensor, function in (node.inputs[:2], node.inputs[1::-1]):
            a, b = self.whole(tensor), self.term(function).origin
            if not self.has(b, a) or self.depends(b, a):
                if a.kind != "random" and all(root.kind == "random" for root in self.roots(b)):
                    node.kind, node.inputs, node.factors = "scale", (tensor,), (1.0,)
                    node.about = {"dropout": True, "uniform": True}
                    return
                continue
            if self._reduced(function, a):
                softmax = a.operation in ("exp", "exp2")
                inverse = self.term(function).origin.operation
                divides = node.operation.startswith("div")
                wrong = ("rsqrt", "reciprocal") if divides else ("sqrt", "linalg_vector_norm")
                node.about["inverse"] = inverse in wrong
                node.about["l2"] = self._of_length(function)
                node.kind, node.inputs = ("softmax", a.inputs) if softmax else ("norm", (tensor,))
            else:
                node.kind = "other"
            return

    def _reduced(self, node: Node, tensor: Node) -> bool:
        """Whether a function of a tensor is one number a row: a sum over an axis is on the way to it."""
        for _ in range(REDUCTION_STEPS):
            fewer = any(n > 1 and m == 1 for n, m in zip(tensor.shape[::-1], node.shape[::-1], strict=False))
            if fewer or len(node.shape) < len(tensor.shape) or is_a(node.operation, "reduction"):
                return True
            if not node.inputs or node is tensor:
                return False
            node = node.inputs[0]
        return False

    def _of_length(self, node: Node) -> bool:
        """Whether a tensor follows from lengths, and not from mean squares."""
        while node.inputs and not is_a(node.operation, "reduction"):
            node = node.inputs[0]
        return node.operation == "linalg_vector_norm"

    def whole(self, node: Node) -> Node:
        """The origin of a tensor, or the piece of it that it is."""
        while node.kind in ("view", "scale") and not is_a(node.operation, "piece"):
            node = node.inputs[0]
        return node if is_a(node.operation, "piece") else self.term(node).origin

    def roots(self, node: Node) -> list[Node]:
        """The nodes without inputs that a node follows from, through operations on entries."""
        leaves, stack, seen = [], [node], set()
        while stack:
            tensor = stack.pop()
            if tensor.number in seen or len(seen) > ROOT_NODES:
                continue
            seen.add(tensor.number)
            stack += tensor.inputs
            leaves += [tensor] if not tensor.inputs or tensor.kind in PRODUCTS else []
        return [leaf for leaf in leaves if leaf.kind not in ("constant", "buffer")] or [node]

    def nodes(self, bits: int) -> Iterator[Node]:
        """The nodes of a set of bits, in order."""
        while bits:
            low = bits & -bits
            yield self.record.nodes[low.bit_length() - 1]
            bits ^= low

    def has(self, node: Node, ancestor: Node) -> bool:
        """Whether a node follows from another one."""
        return bool(self.reach[node.number] >> ancestor.number & 1)

    def between(self, node: Node, start: Node) -> int:
        """The nodes that a node follows from and `start` does not, as a set of bits."""
        return self.reach[node.number] & ~self.reach[start.number]

    def depends(self, node: Node, ancestor: Node) -> bool:
        """Whether a product with a parameter lies between them."""
        return bool(self.through[node.number] >> ancestor.number & 1)

    def term(self, node: Node) -> Term:
        """A tensor by its origin, through views, factors and fixed tensors that are added."""
        factor, scales = 1.0, ()
        while True:
            if node.kind == "view" or (node.kind == "join" and len(node.inputs) == 1):
                node = node.inputs[0]
            elif node.kind == "scale" and (node.about.get("uniform") or node.parameters):
                factor, scales, node = factor * node.factors[0], (*scales, *node.parameters), node.inputs[0]
            elif node.kind == "scale" and abs(node.about.get("rms", 0.0) - 1) < 1e-3:  # rotations by complex numbers
                node = node.inputs[0]
            elif node.kind == "sum" and len(node.inputs) == 1:
                factor, node = factor * node.factors[0], node.inputs[0]
            elif node.kind in ("sum", "join") and (turned := self.rotated(node)) is not None:
                factor, node = factor * turned[1], turned[0]
            else:
                return Term(node, factor, scales)

    def rotated(self, node: Node) -> tuple[Node, float] | None:
        """The origin of a sum or join of one tensor's pieces, as by rotations, and the factor of its size."""
        if node.number in self.origins:
            origin, size = self.origins[node.number]
        else:
            origin, stack, seen = node, list(node.inputs), set()
            roots: set[int] = set()
            while stack and len(roots) < 2 and len(seen) < PIECE_NODES:
                tensor = stack.pop()
                if tensor.number in seen:
                    continue
                seen.add(tensor.number)
                if tensor.kind in ("view", "scale", "join"):
                    stack += tensor.inputs
                elif tensor.kind == "sum" and len(tensor.inputs) == 1:
                    stack += tensor.inputs
                elif tensor.kind == "sum" and (turned := self.rotated(tensor)) is not None:
                    stack.append(turned[0])
                else:
                    roots.add(tensor.number)
            if len(roots) == 1 and not stack:
                origin = self.record.nodes[roots.pop()]
            # The tensor that was turned may be a piece of its origin, as queries are.
            pieces = [self.record.nodes[number] for number in sorted({*seen, origin.number})]
            # Keys may be repeated before they are turned, and what cosines multiply is smaller.
            pieces = [
                piece
                for piece in pieces
                if piece.rows is not None
                and piece.kind not in ("scale", "sum")
                and math.prod(piece.shape) <= math.prod(node.shape)
            ]
            size = pieces[0].square if pieces else math.nan
            self.origins[node.number] = origin, size
        if origin is node:
            return None
        ratio = (node.square / size) ** 0.5 if node.square > 0 and size > 0 else 1.0
        return origin, 1.0 if abs(ratio - 1) < 1e-3 else ratio

    def sources(self, node: Node, *, stop: int = 0, activations: bool = False) -> list[Source]:
        """The products that a tensor is linear in, nearest first; nodes of `stop` (bits) are not entered."""
        products: dict[int, Source] = {}
        stack, seen = [Source(node)], set()
        while stack:
            source = stack.pop()
            node = source.node
            way = node.number, source.moves
            if node.fixed or way in seen or (stop >> node.number & 1):
                continue
            seen.add(way)
            if node.kind in (*PRODUCTS, "embedding"):
                first = products.setdefault(node.number, source)
                if first is not source:
                    products[node.number] = dataclasses.replace(first, moves=(*first.moves, *source.moves))
                continue
            stack += self._before(source, activations=activations)
        return list(products.values())

    def _before(self, source: Source, *, activations: bool) -> Iterator[Source]:
        node = source.node
        if node.kind in ("softmax", "random") or (node.kind == "other" and not activations):
            return
        factors = node.factors if node.kind in ("sum", "scale") else (1.0,) * len(node.inputs)
        scales = source.scales + (node.parameters if node.kind == "scale" else ())
        gated, normed = source.gated or node.kind == "gate", source.normed or node.kind == "norm"
        offset = node.kind == "sum" and len(node.inputs) == 1 and node.shape == node.inputs[0].shape
        moves = source.moves if offset or (node.kind == "scale" and node.about.get("uniform")) else ((),)
        if node.kind == "view":
            (after,) = source.moves
            moves = (None if node.moved is None or after is None else (node, *after),)
        for side, factor in zip(node.inputs, factors, strict=False):
            # A factor before a norm does not change the values after it.
            yield Source(side, source.factor if source.normed else source.factor * factor, scales, normed, gated, moves)
