"""Operations of PyTorch (aten) and primitives of JAX: what each is, and the node of what it returns.

Tests: `tests/auditing/test_torch_kinds.py`.
"""

import functools
import math
from collections.abc import Mapping
from typing import Any

from sdeinfer.passes._record import Node

OPERATIONS = """
view move: view reshape _unsafe_view expand expand_as squeeze unsqueeze clone contiguous _to_copy to alias detach
view move: lift_fresh lift type_as _reshape_alias
view move: broadcast_in_dim expand_dims convert_element_type copy_p stop_gradient reduce_precision
view move: optimization_barrier sharding_constraint name device_put mesh_cast pvary
view move turn: index_select flip roll rev
view move transpose: t transpose permute swapaxes movedim
view move piece: split split_with_sizes chunk unbind slice select narrow unstack
view piece choice: topk top_k sort
view reduction: sum mean reduce_sum
view: index gather constant_pad_nd pad repeat repeat_interleave masked_fill copy unfold im2col col2im pixel_shuffle
view: pixel_unshuffle view_as_real view_as_complex _conj upsample_bicubic2d upsample_bilinear2d upsample_nearest2d
view: upsample_nearest1d tril triu as_strided diagonal cumsum avg_pool2d _adaptive_avg_pool2d
view: reflection_pad1d avg_pool1d reflection_pad2d replication_pad1d real nan_to_num _adaptive_avg_pool3d
view: slice_backward channel_shuffle native_channel_shuffle dynamic_slice reduce_window_sum imag
piece choice: argmax
piece: argsort
reduction: var linalg_vector_norm
join: cat stack where index_put scatter slice_scatter select_scatter index_copy masked_scatter
join: concatenate select_n dynamic_update_slice complex
sum: add sub rsub index_add scatter_add addcmul lerp scatter_reduce add_any scatter-add
norm: native_layer_norm _fused_rms_norm rms_norm
norm batch: native_group_norm native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_no_training
norm batch: cudnn_batch_norm _batch_norm_with_update instance_norm
random: bernoulli native_dropout rand rand_like randn randn_like normal uniform exponential randperm randint
random: multinomial random_bits threefry2x32 random_gamma rng_bit_generator
softmax: _softmax softmax _safe_softmax
product: mm addmm bmm baddbmm mv addmv dot matmul linear addbmm dot_general
bound: maximum minimum clamp clamp_min clamp_max max min
convolution: convolution convolution_overrideable _convolution cudnn_convolution conv_general_dilated
truth: and or not eq ne lt le gt ge isin bitwise_and bitwise_or bitwise_not bitwise_xor
truth: logical_and logical_or logical_not logical_xor
"""
"""Names by their kinds: a "view" lets one tensor go on, also summed over an axis, padded or chosen from; a "move" does
no more than move, cut or convert it, and a "turn" changes places of entries; two "pieces" of a tensor are different
tensors; "choices" are those of routers; norms of a "batch" are not over features; "truths" are no stream."""


@functools.cache
def _kinds() -> dict[str, set[str]]:
    by_name: dict[str, set[str]] = {}
    for line in OPERATIONS.strip().splitlines():
        kinds, names = line.split(": ")
        for name in names.split():
            by_name.setdefault(name, set()).update(kinds.split())
    return by_name


def is_a(operation: str, kind: str) -> bool:
    """Whether an operation is of a kind."""
    return kind in _kinds().get(operation, ())


def node_of(
    name: str, inputs: list[Node], shape: tuple[int, ...], *, number: float = 1.0, factors: tuple[float, ...] = ()
) -> Node:
    """The node of what an operation returns, unless it multiplies matrices.

    Arguments:
        name: its name.
        inputs: the nodes of all tensors among its arguments, in order.
        shape: the shape of what it returns.
        number: the first number among its arguments.
        factors: the factor of each input of a sum.
    """
    live = live_among(inputs)
    names = names_of(inputs)
    if is_a(name, "random"):
        return Node("random", live, shape, name)
    if not live:
        if is_a(name, "view") and inputs:
            return Node("view", tuple(inputs[:1]), shape, name, names, fixed=True, about=dict(inputs[0].about))
        return Node("other", tuple(inputs), shape, name, names, fixed=True)
    if name == "embedding" or (name in ("index", "index_select", "gather") and inputs[0].fixed and names):
        return Node("embedding", live, shape, "embedding" if name == "gather" else name, names)
    if is_a(name, "norm"):
        gain = next((node for node in inputs if node.fixed and node.parameters), None)
        return Node("norm", live[:1], shape, name, names, about={} if gain is None else {"gain": gain.about})
    if is_a(name, "softmax"):
        return Node("softmax", live, shape, name)
    if is_a(name, "sum"):
        pairs = [(node, factor) for node, factor in zip(inputs, factors, strict=False) if not node.fixed]
        fixed = tuple(node for node in inputs if node.fixed)
        about = {"fixed": fixed} if fixed else {}
        return Node("sum", tuple(n for n, _ in pairs), shape, name, names, tuple(f for _, f in pairs), about=about)
    if name == "neg":
        return Node("scale", live, shape, name, (), (-1.0,), about={"uniform": True})
    if name in ("mul", "div", "multiply", "divide"):
        return multiplied(name, inputs, shape, number)
    if is_a(name, "join") or (name in ("copy", "scatter") and len(live) > 1):
        return Node("join", live, shape, name, names)
    if is_a(name, "view"):
        return Node("view", live[:1], shape, name)
    return Node("other", live, shape, name, names)


def live_among(inputs: list[Node]) -> tuple[Node, ...]:
    """The inputs that are not fixed."""
    return tuple(node for node in inputs if not node.fixed)


def names_of(inputs: list[Node]) -> tuple[str, ...]:
    """The parameters among the fixed inputs, without repetitions."""
    return tuple(dict.fromkeys(name for node in inputs if node.fixed for name in node.parameters))


def multiplied(operation: str, inputs: list[Node], shape: tuple[int, ...], number: float = 1.0) -> Node:
    """A product, or quotient, of activations, entry by entry; or one of activations and a fixed tensor or a number."""
    live, names = live_among(inputs), names_of(inputs)
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
        activations = left if parameter is right else right
        about = sizes | {"weight": parameter}
        return Node("product", (activations,), shape, name, parameter.parameters, (scale,), about=about)
    live = live_among([left, right])
    if len(live) < 2:
        return Node("view", live, shape, name)
    return Node("contraction", live, shape, name, (), (scale,), about=sizes)


def of_torch(name: str, args: tuple, kwargs: dict[str, Any], inputs: list[Node], shape: tuple[int, ...]) -> Node:
    """The node of what an operation of PyTorch returns, by its arguments."""
    live = live_among(inputs)
    if live and (is_a(name, "product") or "grouped_mm" in name):
        return _matrix(name, kwargs, inputs, shape)
    if live and is_a(name, "convolution"):
        groups, transposed = args[8] if len(args) > 8 else 1, any(args[6:7])
        return _convolution(inputs, shape, name, groups, transposed=transposed)
    if live and is_a(name, "sum"):
        return _sum(name, args, kwargs, inputs, shape)
    number = next((float(argument) for argument in args if isinstance(argument, int | float)), 1.0)
    return node_of(name, inputs, shape, number=number)


def _convolution(inputs: list[Node], shape: tuple[int, ...], name: str, groups: int, *, transposed: bool) -> Node:
    weight = inputs[1]
    area, (first, second) = math.prod(weight.shape[2:]), weight.shape[:2]
    out, read = (second * groups, first // groups) if transposed else (first, second)
    about = {"fan_in": read * area, "fan_out": out * area, "groups": groups, "weight": weight}
    return Node("convolution", live_among(inputs), shape, name, names_of(inputs), about=about)


def _matrix(name: str, kwargs: dict[str, Any], inputs: list[Node], shape: tuple[int, ...]) -> Node:
    """A matrix product, with an added term a sum."""
    added, (left, right) = (inputs[0], inputs[1:3]) if name.startswith(("add", "badd")) else (None, inputs[:2])
    inner, outer = left.shape[-1], right.shape[-1] if len(right.shape) > 1 else 1
    if left.fixed and left.parameters and not (right.fixed and right.parameters):
        inner = math.prod(right.shape[-2:-1] or right.shape)
        outer = left.shape[-2] if len(left.shape) > 1 else 1
    last = right.fixed and bool(right.parameters)
    sizes = {"fan_in": inner, "fan_out": outer, "outputs_last": last}
    node = contracted(left, right, shape, name, sizes, float(kwargs.get("alpha", 1.0)))
    if added is None:
        return node
    if added.fixed and node.kind == "product":
        node.parameters = (*node.parameters, *added.parameters)
        return node
    if added.fixed:
        return Node("sum", (node,), shape, name, added.parameters, (1.0,), about={"fixed": (added,)})
    beta = float(kwargs.get("beta", 1.0))
    return Node("sum", (added, node), shape, name, (), (beta, 1.0))


def _sum(name: str, args: tuple, kwargs: dict[str, Any], inputs: list[Node], shape: tuple[int, ...]) -> Node:
    alpha = float(kwargs.get("alpha", 1.0))
    factors = [1.0, -alpha if name == "sub" else alpha]
    if name == "rsub":
        factors = [-alpha, 1.0]
    if name == "lerp":
        weight = _number([*args[2:3], kwargs.get("weight")])
        weight = float(inputs[2].about.get("mean", math.nan)) if math.isnan(weight) and len(inputs) > 2 else weight
        inputs, factors = inputs[:2], [1 - weight, weight]
    if name == "addcmul":
        inputs, factors = [inputs[0], multiplied("mul", inputs[1:3], shape)], [1.0, float(kwargs.get("value", 1.0))]
    if name in ("index_add", "scatter_add", "scatter_reduce"):
        inputs = [inputs[0], inputs[-1]]
    return node_of(name, inputs, shape, factors=tuple(factors))


def _number(values: Any) -> float:
    return next((float(value) for value in values if isinstance(value, int | float)), math.nan)


def of_jax(name: str, parameters: Mapping[str, Any], inputs: list[Node], shape: tuple[int, ...]) -> Node:
    """The node of what a primitive of JAX returns, by its parameters."""
    live = live_among(inputs)
    if live and name == "dot_general":
        (left_axes, right_axes), (left_batch, right_batch) = parameters["dimension_numbers"]
        left, right = inputs
        weight, axes, batch = (
            (right, right_axes, right_batch) if right.fixed and right.parameters else (left, left_axes, left_batch)
        )
        inner = math.prod(weight.shape[axis] for axis in axes)
        outer = math.prod(n for axis, n in enumerate(weight.shape) if axis not in {*axes, *batch})
        last = max(axes, default=0) < len(weight.shape) - 1
        sizes: dict[str, Any] = {"fan_in": inner, "fan_out": outer, "outputs_last": last}
        sizes["left_axes"] = range(len(left_batch), len(left.shape) - len(left_axes))
        if not batch:
            count = len(weight.shape) - len(axes)
            first = len(shape) - count if weight is right else 0
            sizes |= {"axes": axes, "output_axes": range(first, first + count)}
        return contracted(left, right, shape, name, sizes)
    if live and name.startswith("ragged_dot"):
        left, right, *_ = inputs
        _, inner, outer = right.shape
        return contracted(left, right, shape, name, {"fan_in": inner, "fan_out": outer, "outputs_last": True})
    if live and name == "conv_general_dilated":
        weight, groups = inputs[1], parameters["feature_group_count"]
        out, read, *_ = parameters["dimension_numbers"].rhs_spec
        area = math.prod(weight.shape) // (weight.shape[out] * weight.shape[read])
        fans = {"fan_in": weight.shape[read] * area, "fan_out": weight.shape[out] * area}
        about = fans | {"groups": groups, "weight": weight}
        return Node("convolution", live, shape, name, weight.parameters, about=about)
    if is_a(name, "sum"):
        inputs = [inputs[0], inputs[-1]]
        return node_of(name, inputs, shape, factors=(1.0, -1.0 if name == "sub" else 1.0))
    if name in ("concatenate", "select_n") and len(live) > 1:
        inputs = [node for node in inputs if node.kind != "input"]
    return node_of(name, inputs, shape)
