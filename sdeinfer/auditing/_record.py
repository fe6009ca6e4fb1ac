"""The record of one pass through a network: what was computed from what, with few numbers and no activations.

Tests: `tests/auditing/test_audit.py`.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np

MOST = 1 << 16
"""Entries of a parameter from which its law is estimated, evenly spread; σ then has an error of .3 %."""


@dataclasses.dataclass(eq=False, slots=True)
class Node:
    """A tensor of a pass: its kind, what it was computed from, the mean square of its rows, and few other numbers."""

    kind: str
    inputs: tuple["Node", ...]
    shape: tuple[int, ...]
    operation: str = ""
    parameters: tuple[str, ...] = ()  # used with the activations: weight first
    factors: tuple[float, ...] = ()  # of each input of a sum; of a fixed tensor its root mean square
    fixed: bool = False  # whether it follows from parameters, buffers and constants alone
    rows: np.ndarray | None = None
    about: dict[str, Any] = dataclasses.field(default_factory=dict)
    number: int = -1

    @property
    def square(self) -> float:
        """Mean square of all entries."""
        return float("nan") if self.rows is None or not self.rows.size else float(self.rows.mean())


def about(values: np.ndarray) -> dict[str, Any]:
    """Mean, standard deviation and root mean square of a fixed array, and whether all its entries are equal."""
    x = np.abs(values) if np.iscomplexobj(values) else values.astype(np.float64)
    with np.errstate(invalid="ignore", over="ignore"):  # masks are infinite
        mean, sd = float(x.mean()), float(x.std())
    return {"mean": mean, "sd": sd, "uniform": sd <= 1e-6 * abs(mean), "rms": math.hypot(mean, sd)}


def multiplied(
    operation: str, inputs: list[Node], shape: tuple[int, ...], names: tuple[str, ...], number: float = 1.0
) -> Node:
    """A product, or quotient, of activations, entry by entry; or one of activations and a fixed tensor or a number."""
    live = tuple(node for node in inputs if not node.fixed)
    if len(live) > 1:
        return Node("gate", live, shape, operation, names)
    divides = operation.startswith("div")
    if divides and inputs[0].fixed:
        return Node("other", live, shape, operation, names)
    fixed = next((node for node in inputs if node.fixed), None)
    if fixed is None:
        return Node(
            "scale",
            live,
            shape,
            operation,
            names,
            (1 / number if divides and number else number,),
            about={"uniform": True},
        )
    value = fixed.about.get("mean" if fixed.about.get("uniform") else "rms", math.nan)
    factor = 1 / value if divides and value else value
    return Node("scale", live, shape, operation, names, (factor,), about=fixed.about | {"by": fixed})


@dataclasses.dataclass(frozen=True, eq=False)
class Parameter:
    """A parameter or buffer: its shape, a function that reads entries of the flat array, whether all are finite."""

    shape: tuple[int, ...]
    read: Callable[[Any], np.ndarray]
    finite: bool = True
    dtype: str = "float32"

    def entries(self) -> np.ndarray:
        """At most `MOST` entries; the step is odd, so that it meets all columns."""
        return self.read(slice(None, None, 1 if self.size <= MOST else -(-self.size // MOST) | 1))

    @property
    def size(self) -> int:
        """Number of entries."""
        return int(np.prod(self.shape, dtype=np.int64))


@dataclasses.dataclass(eq=False)
class Record:
    """A pass: its nodes in order, the parameters and buffers by name, names of one tensor, and what it returned."""

    name: str
    nodes: list[Node]
    parameters: dict[str, Parameter]
    buffers: dict[str, Parameter]
    tied: dict[str, list[str]]
    outputs: list[Node]
    inputs: dict[str, tuple[int, ...]]
