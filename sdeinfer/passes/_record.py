"""The record of one pass through a network: nodes with the nodes they follow from, few numbers and no activations.

Tests: `tests/auditing/test_audit.py`.
"""

import dataclasses
import functools
import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

SAMPLED_ENTRIES = 1 << 16
"""Entries of a parameter from which its law is estimated, evenly spread; σ then has an error of .3 %."""

type Watch = Mapping[int, Callable[[Any], None]]
"""For each watched node, by its order, the function that takes its value."""


@dataclasses.dataclass(eq=False, slots=True)
class Node:
    """A tensor of a pass: its kind, the tensors it follows from, the mean square of its rows, and few other numbers."""

    kind: str
    inputs: tuple["Node", ...]
    shape: tuple[int, ...]
    operation: str = ""
    parameters: tuple[str, ...] = ()  # used with the activations: weight first
    factors: tuple[float, ...] = ()  # of the inputs of a sum, one each; the root mean square of a fixed tensor
    fixed: bool = False  # whether it follows from parameters, buffers and constants alone
    rows: np.ndarray | None = None
    about: dict[str, Any] = dataclasses.field(default_factory=dict)
    number: int = -1  # its place in the record, which leaves some nodes out
    order: int = -1  # its place among all nodes of the pass; −1 before it has one
    moved: Callable[[Any], Any] | None = None  # the same move as that of a view, for other numbers
    others: tuple["Node", ...] = ()  # tensors it follows from beside its inputs: weights, indices, conditions

    @property
    def is_sum_of_two(self) -> bool:
        """Whether it is the sum of two tensors that follow from the input."""
        return self.kind == "sum" and len(self.inputs) == 2 and not self.fixed

    @property
    def square(self) -> float:
        """Mean square of all entries."""
        return float("nan") if self.rows is None or not self.rows.size else float(self.rows.mean())


@dataclasses.dataclass(frozen=True, eq=False)
class StoredTensor:
    """A parameter or buffer: its shape, a function that reads entries of the flat array, its extremes, its names."""

    shape: tuple[int, ...]
    read: Callable[[Any], np.ndarray]
    least: float = 0.0
    largest: float = 0.0
    dtype: str = "float32"
    other_names: tuple[str, ...] = ()  # names beside the first under which a model has it

    def entries(self) -> np.ndarray:
        """At most `SAMPLED_ENTRIES` entries, evenly spread."""
        return self.read(slice(None, None, self.step))

    @property
    def step(self) -> int:
        """From one of the `entries` to the next; odd, so that they are of all columns."""
        return 1 if self.size <= SAMPLED_ENTRIES else -(-self.size // SAMPLED_ENTRIES) | 1

    @property
    def size(self) -> int:
        """Number of entries."""
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def finite(self) -> bool:
        """Whether all entries are finite."""
        return math.isfinite(self.least) and math.isfinite(self.largest)

    @property
    def masks(self) -> bool:
        """Whether some entries are −∞ and all others finite, as those of a mask."""
        return self.least == -math.inf and math.isfinite(self.largest)


@dataclasses.dataclass(eq=False)
class Record:
    """A pass: its nodes in order, the parameters and buffers by name, and what it returned.

    Nodes that no output follows from are left out.
    """

    name: str
    nodes: list[Node]
    parameters: dict[str, StoredTensor]
    buffers: dict[str, StoredTensor]
    outputs: list[Node]
    columns: Callable[[tuple[int, ...]], Any]  # an array of this shape that holds the number of each column
    length: int = 0  # number of all nodes of the pass

    def __post_init__(self) -> None:
        self.length = len(self.nodes)
        used, stack = set(), [*self.outputs]
        while stack:
            node = stack.pop()
            if id(node) not in used:
                used.add(id(node))
                stack += [*node.inputs, *node.others]
        if used:
            self.nodes = [node for node in self.nodes if id(node) in used or node.kind == "parameter"]
        for number, node in enumerate(self.nodes):
            node.number = number

    @functools.cached_property
    def readers(self) -> Mapping[int, list[Node]]:
        """The nodes that are computed from each node, by its number."""
        by_number: dict[int, list[Node]] = defaultdict(list)
        for node in self.nodes:
            for parent in node.inputs:
                by_number[parent.number].append(node)
        return by_number
