"""The record of one pass through a network: what was computed from what, with few numbers and no activations.

Operations of PyTorch (aten) and primitives of JAX are in one table, by what they do to the accounts.

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
    moved: Callable[[Any], Any] | None = None  # does to other numbers what a view did to those of its input

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


@dataclasses.dataclass(frozen=True, eq=False)
class Parameter:
    """A parameter or buffer: its shape, a function that reads entries of the flat array, and its extreme entries."""

    shape: tuple[int, ...]
    read: Callable[[Any], np.ndarray]
    least: float = 0.0
    largest: float = 0.0
    dtype: str = "float32"

    def entries(self) -> np.ndarray:
        """At most `MOST` entries; the step is odd, so that it meets all columns."""
        return self.read(slice(None, None, 1 if self.size <= MOST else -(-self.size // MOST) | 1))

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
    """A pass: its nodes in order, the parameters and buffers by name, and what it returned."""

    name: str
    nodes: list[Node]
    parameters: dict[str, Parameter]
    buffers: dict[str, Parameter]
    outputs: list[Node]
    columns: Callable[[tuple[int, ...]], Any]  # an array of this shape that holds the number of each column


MOVES = frozenset(
    "view reshape _unsafe_view t transpose permute expand expand_as slice select squeeze unsqueeze clone contiguous "
    "_to_copy to alias detach split split_with_sizes chunk unbind narrow lift_fresh lift type_as swapaxes movedim "
    "_reshape_alias index_select flip roll "
    "broadcast_in_dim expand_dims convert_element_type rev copy_p stop_gradient reduce_precision optimization_barrier "
    "sharding_constraint name device_put mesh_cast pvary".split()
)  # fmt: skip
"""One tensor goes on: moved, cut or converted."""

PIECES = "split split_with_sizes chunk unbind slice select narrow topk top_k sort argsort argmax".split()
"""Views of a part of a tensor: two of them are different tensors."""

VIEWS = MOVES | frozenset(
    "index gather constant_pad_nd pad repeat repeat_interleave masked_fill copy unfold im2col col2im pixel_shuffle "
    "pixel_unshuffle view_as_real view_as_complex _conj upsample_bicubic2d upsample_bilinear2d upsample_nearest2d "
    "upsample_nearest1d tril triu as_strided diagonal sum mean cumsum avg_pool2d _adaptive_avg_pool2d "
    "reflection_pad1d avg_pool1d reflection_pad2d replication_pad1d real nan_to_num _adaptive_avg_pool3d "
    "slice_backward channel_shuffle native_channel_shuffle sort topk "
    "dynamic_slice reduce_sum reduce_window_sum imag top_k".split()
)  # fmt: skip
"""One tensor goes on, also summed over an axis, padded or chosen from."""

JOINS = frozenset(
    "cat stack where index_put scatter slice_scatter select_scatter index_copy masked_scatter "
    "concatenate select_n dynamic_update_slice complex".split()
)
SUMS = frozenset("add sub rsub index_add scatter_add addcmul lerp scatter_reduce add_any scatter-add".split())
NORMS = frozenset(
    "native_layer_norm native_group_norm native_batch_norm _native_batch_norm_legit "
    "_native_batch_norm_legit_no_training cudnn_batch_norm _fused_rms_norm rms_norm _batch_norm_with_update "
    "instance_norm".split()
)
RANDOM = frozenset(
    "bernoulli native_dropout rand rand_like randn randn_like normal uniform exponential randperm randint multinomial "
    "random_bits threefry2x32 random_gamma rng_bit_generator".split()
)
SOFTMAX = ("_softmax", "softmax", "_safe_softmax")


def node_of(
    name: str, inputs: list[Node], shape: tuple[int, ...], *, number: float = 1.0, factors: tuple[float, ...] = ()
) -> Node:
    """The node of what an operation returns, unless it multiplies matrices.

    Arguments:
        name: its name.
        inputs: the nodes of all tensors among its arguments, in order.
        shape: the shape of what it returns.
        number: the first number among its arguments.
        factors: of a sum, the factor of each input.
    """
    live = tuple(node for node in inputs if not node.fixed)
    names = names_of(inputs)
    if name in RANDOM:
        return Node("random", live, shape, name, about={"p": number})
    if not live:
        if name in VIEWS and inputs:
            return Node("view", tuple(inputs[:1]), shape, name, names, fixed=True, about=dict(inputs[0].about))
        return Node("other", tuple(inputs), shape, name, names, fixed=True)
    if name == "embedding" or (name in ("index", "index_select", "gather") and inputs[0].fixed and names):
        return Node("embedding", live, shape, "embedding" if name == "gather" else name, names)
    if name in NORMS:
        gain = next((node for node in inputs if node.fixed and node.parameters), None)
        return Node("norm", live[:1], shape, name, names, about={} if gain is None else {"gain": gain.about})
    if name in SOFTMAX:
        return Node("softmax", live, shape, name)
    if name in SUMS:
        pairs = [(node, factor) for node, factor in zip(inputs, factors, strict=False) if not node.fixed]
        fixed = tuple(node for node in inputs if node.fixed)
        about = {"fixed": fixed} if fixed else {}
        return Node("sum", tuple(n for n, _ in pairs), shape, name, names, tuple(f for _, f in pairs), about=about)
    if name == "neg":
        return Node("scale", live, shape, name, (), (-1.0,), about={"uniform": True})
    if name in ("mul", "div", "multiply", "divide"):
        return multiplied(name, inputs, shape, number)
    if name in JOINS or (name in ("copy", "scatter") and len(live) > 1):
        return Node("join", live, shape, name, names)
    if name in VIEWS:
        return Node("view", live[:1], shape, name)
    return Node("other", live, shape, name, names)


def names_of(inputs: list[Node]) -> tuple[str, ...]:
    """The parameters among the fixed inputs, without repetitions."""
    return tuple(dict.fromkeys(name for node in inputs if node.fixed for name in node.parameters))


def multiplied(operation: str, inputs: list[Node], shape: tuple[int, ...], number: float = 1.0) -> Node:
    """A product, or quotient, of activations, entry by entry; or one of activations and a fixed tensor or a number."""
    live, names = tuple(node for node in inputs if not node.fixed), names_of(inputs)
    if len(live) > 1:
        return Node("gate", live, shape, operation, names)
    divides = operation.startswith("div")
    if divides and inputs[0].fixed:
        return Node("other", live, shape, operation, names)
    fixed = next((node for node in inputs if node.fixed), None)
    if fixed is None:
        factor = 1 / number if divides and number else number
        return Node("scale", live, shape, operation, names, (factor,), about={"uniform": True})
    value = fixed.about.get("mean" if fixed.about.get("uniform") else "rms", math.nan)
    factor = 1 / value if divides and value else value
    return Node("scale", live, shape, operation, names, (factor,), about=fixed.about | {"by": fixed})


def contracted(left: Node, right: Node, shape: tuple[int, ...], name: str, sizes: dict, scale: float = 1.0) -> Node:
    """A matrix product: with a parameter it is a product, of activations a contraction."""
    parameter = next((node for node in (right, left) if node.fixed and node.parameters), None)
    if parameter is not None:
        other = left if parameter is right else right
        about = sizes | {"weight": parameter}
        return Node("product", (other,), shape, name, parameter.parameters, (scale,), about=about)
    live = tuple(node for node in (left, right) if not node.fixed)
    if len(live) < 2:
        return Node("view", live, shape, name)
    return Node("contraction", live, shape, name, (), (scale,), about=sizes)


def convolved(weight: Node, live: tuple[Node, ...], shape: tuple[int, ...], name: str, sizes: dict) -> Node:
    """A convolution; its kernel is `weight`."""
    return Node("convolution", live, shape, name, weight.parameters, about=sizes | {"weight": weight})
