"""The account of a pass: matrices by their roles, the streams with their writers, and the logits.

Tests: `tests/auditing/test_audit.py`.
"""

import dataclasses
import functools
from collections.abc import Mapping

from sdeinfer.auditing._graph import Graph, Source
from sdeinfer.auditing._parts import Places
from sdeinfer.auditing._record import Node, Parameter
from sdeinfer.auditing._stream import Link

NOT_LINEAR = ("embedding", "position", "offset", "bias", "norm", "norm bias", "scale", "mask", "other")
"""Roles of what inputs are not multiplied by as by a matrix."""


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


@dataclasses.dataclass(frozen=True)
class Logits:
    """One attention: the factor c of q kᵀ before softmax, d_k, and a factor of the probabilities after it.

    Attributes:
        factor: c.
        head_size: d_k.
        layer: number of its layer.
        normed: whether queries or keys are normed.
        both: whether both are.
        after: the factor of the probabilities.
        over: "keys", or "queries" if these are what the probabilities sum to 1 over; "" where it was not seen.
        heads: number of heads; 1 where it is not seen.
    """

    factor: float
    head_size: int
    layer: int | None
    normed: bool
    after: float
    both: bool = False
    over: str = ""
    heads: int = 1


@dataclasses.dataclass(eq=False)
class Account:
    """The books of a pass.

    Attributes:
        graph: the dependences of its record.
        streams: the sums of each residual stream, in order.
        matrices: by name, the parameters and the matrices in them that the pass used.
        uses: products by the name of their array.
        writers: the sums that each array writes to.
        logits: the attentions.
        gains: mean and standard deviation of what norms multiply by, as it is used, by name.
    """

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

    @functools.cached_property
    def parameters(self) -> Mapping[str, Parameter]:
        """All arrays, and the matrices in them, by name."""
        arrays = self.graph.record.parameters
        parts = {m.name: m.places.of(arrays[m.array]) for m in self.matrices.values() if m.places is not None}
        return arrays | parts
