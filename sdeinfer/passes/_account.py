"""The account of a pass: matrices by their roles, the streams with their writers, and the logits.

Tests: `tests/auditing/test_audit.py`.
"""

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from sdeinfer.passes._attention import Logits
from sdeinfer.passes._graph import Graph, Source
from sdeinfer.passes._operations import is_a
from sdeinfer.passes._places import numbers_along
from sdeinfer.passes._record import Node, Record, StoredTensor
from sdeinfer.passes._stream import Link

MOST_EXPERTS = 512
"""Number of equal blocks of an array up to which each is a matrix; and of outputs of a router, one a block."""

IN_BLOCKS = "query, key, value, attention output, gate, up, mlp output, mixer output, router, reads, inner".split(", ")
"""Roles of matrices in layers, of which rules of fan-in and fan-out speak."""

NOT_LINEAR = ("embedding", "position", "offset", "bias", "norm", "norm bias", "scale", "mask", "other")
"""Roles of parameters that are not matrices of a linear map."""


@dataclasses.dataclass(frozen=True, eq=False)
class Places:
    """The places of a matrix's entries in an array: each the sum of a number of its input and one of its output."""

    by_input: np.ndarray
    by_output: np.ndarray  # of all matrices in a block of the array
    columns: np.ndarray  # numbers of the matrix's outputs among these
    outputs_first: bool

    @property
    def outputs(self) -> int:
        """Number of outputs of all matrices in a block of the array."""
        return len(self.by_output)

    @property
    def size(self) -> int:
        return len(self.by_input) * len(self.columns)

    @property
    def shape(self) -> tuple[int, int]:
        """As the array has it."""
        rows, columns = len(self.columns), len(self.by_input)
        return (rows, columns) if self.outputs_first else (columns, rows)

    def __call__(self, index: np.ndarray) -> np.ndarray:
        """Flat indices of the array, of flat indices of the matrix."""
        _, count = self.shape
        by_row, by_column = self.by_input, self.by_output[self.columns]
        if self.outputs_first:
            by_row, by_column = by_column, by_row
        return by_row[index // count] + by_column[index % count]

    def of(self, parameter: StoredTensor) -> StoredTensor:
        """The matrix alone."""

        def read(index: Any) -> np.ndarray:
            flat = np.arange(*index.indices(self.size)) if isinstance(index, slice) else np.asarray(index)
            return parameter.read(self(flat))

        return StoredTensor(self.shape, read, parameter.least, parameter.largest, parameter.dtype)


@dataclasses.dataclass(frozen=True)
class Matrix:
    """A parameter, or one of the matrices in it, as a recipe sees it.

    Attributes:
        role: its place: "embedding", "position" (a table), "offset" (added before the layers), "query", "key", "value",
            "attention output", "gate", "up", "mlp output", "mixer output", "router", "reads" (the stream, in another
            way), "inner", "input", "head", "bias", "norm", "norm bias", "scale", "mask" or "other".
        fan_in: number of its inputs; of a convolution times the area of its kernel.
        fan_out: number of its outputs; likewise.
        width: n, the width of the residual stream.
        layers: L, the number of Transformer layers.
        layer: l, the number of its layer from 0; None outside of layers.
        name: its name in the model; of a part of an array with a label, as "qkv.weight[query]".
        shape: its shape.
        of: for a bias the role of the matrix after which it is added.
        array: name of the array that it is in.
        roles: all roles of an array of several matrices whose layout is not known.
        places: where its entries are in an array of several matrices; None if it is all of its array.
    """

    role: str
    fan_in: int
    fan_out: int
    width: int
    layers: int
    layer: int | None = None
    name: str = ""
    shape: tuple[int, ...] = ()
    of: str = ""
    array: str = ""
    roles: tuple[str, ...] = ()
    places: Places | None = dataclasses.field(default=None, repr=False)

    @property
    def last(self) -> bool:
        """Whether it is the last matrix of its branch."""
        return self.role.endswith("output")

    @property
    def linear(self) -> bool:
        """Whether it is a matrix that inputs are multiplied by."""
        return self.role not in NOT_LINEAR


@dataclasses.dataclass(eq=False)
class Account:
    """The contents of one recorded pass: streams, matrices with their roles, attentions.

    Attributes:
        graph: the dependences of its record.
        streams: the sums of each residual stream, in order.
        matrices: the parameters, and the matrices in them, that the pass used, by name.
        uses: products by the name of their array.
        writers: the outputs of each array in the sums that it writes to.
        logits: those of each attention.
        gains: mean and standard deviation of what norms multiply by, as it is used, by name.
    """

    graph: Graph
    streams: list[list[Link]]
    matrices: dict[str, Matrix]
    uses: dict[str, list[Node]]
    writers: dict[str, list[Source]]
    logits: list[Logits]
    gains: dict[str, list[tuple[float, float]]]

    @property
    def links(self) -> list[Link]:
        """All sums of the streams."""
        return [link for chain in self.streams for link in chain]

    @property
    def layers(self) -> int:
        """L, that of the longer one of an encoder and a decoder."""
        return max((chain[-1].layer + 1 for chain in self.streams), default=0)

    @property
    def width(self) -> int:
        """The width n of the longest stream."""
        return max(self.streams, key=len)[0].sum.shape[-1] if self.streams else 0

    def plain_source(self, array: str) -> Source | None:
        """A writer's output in the sum; None for other arrays, or where a norm or a parameter is between."""
        source = next(iter(self.writers.get(array, ())), None)
        return source if source is not None and source.plain else None

    def writer_factor(self, array: str, multiplier: float | None = 1.0) -> float:
        """The factor of a writer's output over the declared one; 1 where a norm or a parameter is between."""
        source = self.plain_source(array)
        return source.factor / multiplier if source and source.factor and multiplier else 1.0

    @functools.cached_property
    def unreached(self) -> list[str]:
        """Parameters that no output follows from."""
        record = self.graph.record
        used = {name for node in record.nodes for name in node.parameters if node.kind != "parameter"}
        stacked = {name.split("[")[0] for name in used}
        return [name for name, parameter in record.parameters.items() if name not in used | stacked and parameter.size]

    @functools.cached_property
    def layer_names(self) -> re.Pattern[str] | None:
        """The common beginnings of the names of a layer's parameters; None if they have nothing in common."""
        beginnings = set()
        for link in self.links:
            nodes = self.graph.nodes(link.inside(self.graph))
            common = common_beginning(name for node in nodes if not node.fixed for name in node.parameters).split(".")
            places = [place for place, part in enumerate(common) if any(letter.isdigit() for letter in part)]
            if places:
                beginnings.add(".".join(re.sub(r"\d+", r"\\d+", part) for part in common[: places[-1] + 1]) + r"\.")
        return re.compile("|".join(sorted(beginnings))) if beginnings else None

    @functools.cached_property
    def parameters(self) -> Mapping[str, StoredTensor]:
        """All arrays, and the matrices in them, by name."""
        arrays = self.graph.record.parameters
        parts = {m.name: m.places.of(arrays[m.array]) for m in self.matrices.values() if m.places is not None}
        return arrays | parts


def common_beginning(names: Iterable[str]) -> str:
    """The common beginning of dotted names, without their last parts."""
    parts = [name.split(".")[:-1] for name in names]
    return ".".join(column[0] for column in itertools.takewhile(lambda c: len({*c}) == 1, zip(*parts, strict=False)))


def places_of(
    product: Node, parameter: StoredTensor, columns: Mapping[str, np.ndarray | None]
) -> dict[str, tuple[str, Places]]:
    """Role and places of each matrix in an array by its label; nothing if it is one matrix, or its layout is not known.

    Arguments:
        product: the product that the array is used in.
        parameter: the array.
        columns: the outputs of the product that have a role, by role; None where they are not known.
    """
    inputs, outputs = product.about["fan_in"], product.about["fan_out"]
    blocks, remainder = divmod(parameter.size, max(inputs * outputs, 1))
    if product.kind != "product" or remainder or not 1 <= blocks <= MOST_EXPERTS:
        return {}
    by_role = _disjoint(columns)
    if blocks == 1 and len(by_role) < 2:
        return {}
    by_role = by_role or {next(iter(columns), "other"): np.arange(outputs)}
    by_input, by_output, first = _offsets(product, parameter)
    parts = {}
    for block in range(blocks):
        for role, numbers in by_role.items():
            label = ", ".join([role] * (len(by_role) > 1) + [str(block)] * (blocks > 1))
            parts[label] = role, Places(block * inputs * outputs + by_input, by_output, numbers, first)
    return parts


def _offsets(product: Node, parameter: StoredTensor) -> tuple[np.ndarray, np.ndarray, bool]:
    """Numbers of inputs and outputs whose sums are the places in an array; and whether outputs are its first axis."""
    inputs, outputs = product.about["fan_in"], product.about["fan_out"]
    summed, shape = product.about.get("axes"), parameter.shape
    if summed is not None and product.about["weight"].shape == shape and parameter.size == inputs * outputs:
        others = [axis for axis in range(len(shape)) if axis not in summed]
        return _steps(shape, summed), _steps(shape, others), False
    if _outputs_first(product, parameter):
        return np.arange(inputs), inputs * np.arange(outputs), True
    return outputs * np.arange(inputs), np.arange(outputs), False


def _steps(shape: tuple[int, ...], axes: Sequence[int]) -> np.ndarray:
    """Flat indices of the entries of an array that are the first along all other axes."""
    steps = np.zeros(1, int)
    for axis in axes:
        steps = np.add.outer(steps, math.prod(shape[axis + 1 :]) * np.arange(shape[axis])).ravel()
    return steps


def places_of_bias(outputs: int, columns: Mapping[str, np.ndarray | None]) -> dict[str, tuple[str, Places]]:
    """The biases of several matrices in one array."""
    by_input, by_output = np.zeros(1, int), np.arange(outputs)
    return {
        role: (role, Places(by_input, by_output, numbers, outputs_first=True))
        for role, numbers in _disjoint(columns).items()
    }


def _disjoint(columns: Mapping[str, np.ndarray | None]) -> dict[str, np.ndarray]:
    known = {role: numbers for role, numbers in columns.items() if numbers is not None and len(numbers)}
    together = np.concatenate(list(known.values())) if known else np.empty(0)
    disjoint = len(known) == len(columns) > 1 and len(np.unique(together)) == len(together)
    return known if disjoint else {}


def _outputs_first(product: Node, parameter: StoredTensor) -> bool:
    """Whether outputs are the first axis of each block; by the way to the product if both axes are of one length."""
    inputs, outputs = product.about["fan_in"], product.about["fan_out"]
    if inputs != outputs:
        sizes = np.cumprod(parameter.shape[::-1]).tolist()
        return inputs in sizes and not (outputs in sizes and parameter.shape[-1] == outputs)
    first, node = not product.about.get("outputs_last", True), product.about["weight"]
    while node.inputs:
        first ^= is_a(node.operation, "transpose")
        node = node.inputs[0]
    return first


def columns_of(record: Record, source: Source) -> np.ndarray | None:
    """The outputs of a product that are in a tensor which is linear in it; None if these are not known."""
    columns, shape, axes = [], source.node.shape, source.node.about.get("output_axes")
    for moves in source.moves:
        if moves is None:
            return None
        values = record.columns(shape) if axes is None else numbers_along(shape, axes)
        try:
            for node in moves:
                values = node.moved(values)  # pyright: ignore[reportOptionalCall]
        except Exception:  # a move that numbers of columns cannot make
            return None
        columns.append(np.unique(np.asarray(values)))
    return np.unique(np.concatenate(columns))
