"""The recorder that those of PyTorch and of JAX share: nodes in their order, and what is kept of each.

Tests: `tests/auditing/test_audit.py`.
"""

import math
from typing import Any

import numpy as np

from sdeinfer.passes._operations import is_a
from sdeinfer.passes._record import SAMPLED_ENTRIES, Node, Watch


class Recorder:
    """The nodes of a pass, in their order.

    Arguments:
        watch: for each watched node, by its order, the function that takes its value.
    """

    def __init__(self, watch: Watch):
        self.nodes: list[Node] = []
        self.watch = watch

    def add(self, node: Node) -> Node:
        """Add a node, after those inputs that it alone has, as an operation of two steps makes them."""
        for parent in node.inputs:
            if parent.order < 0:
                self.add(parent)
        node.order = len(self.nodes)
        self.nodes.append(node)
        return node


def keeps_rows(node: Node) -> bool:
    """Whether the mean squares of a tensor's rows are kept: it is not fixed, and no view of another tensor."""
    return not node.fixed and (node.kind != "view" or is_a(node.operation, "piece"))


def is_move(node: Node) -> bool:
    """Whether other numbers, as those of columns, can be moved as a tensor is."""
    return not node.fixed and node.kind == "view" and is_a(node.operation, "move")


def is_vector(shape: tuple[int, ...]) -> bool:
    """Whether all entries lie along one axis, as those of a gain or a bias."""
    return math.prod(shape) in (1, max(shape, default=1))


def has_summary(size: int) -> bool:
    """Whether a fixed tensor of so many entries is read at once, for its `summary_of`."""
    return 0 < size <= SAMPLED_ENTRIES


def summary_of(values: np.ndarray) -> dict[str, Any]:
    """Mean, standard deviation and root mean square of a fixed array, and whether all its entries are equal."""
    x = np.abs(values) if np.iscomplexobj(values) else values.astype(np.float64)
    with np.errstate(invalid="ignore", over="ignore"):  # masks are infinite
        mean, sd = float(x.mean()), float(x.std())
    return {"mean": mean, "sd": sd, "uniform": sd <= 1e-6 * abs(mean), "rms": math.hypot(mean, sd)}


ROUNDINGS = {"bfloat16": 2.0**-7, "float16": 2.0**-10}
"""The largest difference from 1 of sums of rounded probabilities, by type; 0 for others."""


def sums_over(values: Any, axis: int, other_axis: int, dtype: str) -> tuple[float, float, float] | None:
    """The least and largest sum of probabilities over an axis, and how far sums over the other axis are from 1.

    Arguments:
        values: an array, or a tensor of PyTorch, with entries; None is returned if some are no probabilities.
        axis: the axis.
        other_axis: the other axis.
        dtype: the type in which they were computed, whose rounding is taken off.
    """
    if values.min() < 0 or values.max() > 1:
        return None
    sums, other_sums, rounding = values.sum(axis), values.sum(other_axis), ROUNDINGS.get(dtype, 0.0)
    return float(sums.min()) + rounding, float(sums.max()) - rounding, float(abs(other_sums - 1).max()) - rounding
