"""The account of a pass: matrices by their roles, the streams with their writers, and the logits.

Tests: `tests/auditing/test_audit.py`.
"""

import dataclasses

from sdeinfer.auditing._graph import Graph, Source
from sdeinfer.auditing._record import Node
from sdeinfer.auditing._stream import Link

NOT_LINEAR = ("embedding", "position", "offset", "bias", "norm", "norm bias", "layer scale", "scale", "other")
"""Roles of what inputs are not multiplied by as by a matrix."""


@dataclasses.dataclass(frozen=True)
class Matrix:
    """A parameter as a recipe sees it.

    Attributes:
        role: its place: "embedding", "position" (a table), "offset" (added before the layers), "query", "key", "value",
            "attention output", "gate", "up", "mlp output", "mixer output", "router", "reads" (the stream, in another
            way), "inner", "input", "head", "bias", "norm", "norm bias", "scale" or "other";
            of an array of several matrices the roles with "/" between.
        fan_in: number of its inputs.
        fan_out: number of its outputs.
        width: n, the width of the residual stream.
        layers: L, the number of Transformer layers.
        layer: l, the number of its layer from 0; None outside of layers.
        name: its name in the model.
        shape: its shape.
        of: for a bias the role of the matrix after which it is added.
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

    @property
    def last(self) -> bool:
        """Whether it is the last matrix of its branch."""
        return self.role.endswith("output")

    @property
    def linear(self) -> bool:
        """Whether it is a matrix that inputs are multiplied by."""
        return self.role not in NOT_LINEAR


@dataclasses.dataclass(frozen=True)
class Logits:
    """One attention: the factor c of q kᵀ before softmax, d_k, and a factor of the probabilities after it."""

    factor: float
    head_size: int
    layer: int | None
    normed: bool
    after: float
    dropout: float


@dataclasses.dataclass(eq=False)
class Account:
    """The books of a pass: its streams, the matrix of each parameter, products by parameter, and the logits."""

    graph: Graph
    streams: list[list[Link]]
    matrices: dict[str, Matrix]
    uses: dict[str, list[Node]]
    writers: dict[str, list[tuple[Link, Source]]]
    logits: list[Logits]
    gains: dict[str, list[tuple[float, float]]]

    @property
    def layers(self) -> int:
        """L, that of the longer one of an encoder and a decoder."""
        return max((chain[-1].layer + 1 for chain in self.streams), default=0)

    @property
    def width(self) -> int:
        """The width n of the longest stream."""
        return max(self.streams, key=len)[0].sum.shape[-1] if self.streams else 0
