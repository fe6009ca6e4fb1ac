"""Operations of PyTorch (aten) by what they do to the accounts of a pass.

Tests: `tests/auditing/test_torch_audit.py`.
"""

import math
from typing import Any

from sdeinfer.auditing._record import Node, multiplied

VIEWS = frozenset(
    "view reshape _unsafe_view t transpose permute expand expand_as slice select squeeze unsqueeze clone "
    "contiguous _to_copy to alias detach split split_with_sizes chunk unbind index index_select gather roll "
    "constant_pad_nd pad flip repeat repeat_interleave masked_fill copy lift_fresh lift narrow unfold im2col "
    "col2im pixel_shuffle pixel_unshuffle view_as_real view_as_complex _conj upsample_bicubic2d "
    "upsample_bilinear2d upsample_nearest2d upsample_nearest1d tril triu _reshape_alias swapaxes movedim "
    "as_strided diagonal sum mean cumsum avg_pool2d _adaptive_avg_pool2d reflection_pad1d avg_pool1d "
    "reflection_pad2d replication_pad1d real type_as nan_to_num _adaptive_avg_pool3d slice_backward "
    "channel_shuffle native_channel_shuffle sort topk".split()
)  # fmt: skip
"""One tensor goes on: moved, cut, converted, or summed over an axis."""

JOINS = frozenset("cat stack where index_put scatter slice_scatter select_scatter index_copy masked_scatter".split())

SUMS = frozenset("add sub rsub index_add scatter_add addcmul lerp scatter_reduce".split())

NORMS = frozenset(
    "native_layer_norm native_group_norm native_batch_norm _native_batch_norm_legit "
    "_native_batch_norm_legit_no_training cudnn_batch_norm _fused_rms_norm rms_norm _batch_norm_with_update "
    "instance_norm".split()
)  # fmt: skip

RANDOM = frozenset(
    "bernoulli native_dropout rand rand_like randn randn_like normal uniform exponential randperm randint "
    "multinomial".split()
)

MATRIX = frozenset("mm addmm bmm baddbmm mv addmv dot matmul linear addbmm".split())


def node_of_operation(
    name: str, args: tuple, kwargs: dict[str, Any], inputs: list[Node], shape: tuple[int, ...]
) -> Node:
    """The node of an operation's first output; `inputs` are those of all tensors among its arguments, in order."""
    live = tuple(node for node in inputs if not node.fixed)
    names = tuple(dict.fromkeys(each for node in inputs if node.fixed for each in node.parameters))
    if name in RANDOM:
        return Node("random", live, shape, name, about={"p": _number(args[1:2])})
    if not live:
        if name in VIEWS and inputs:
            return Node("view", tuple(inputs[:1]), shape, name, names, fixed=True, about=dict(inputs[0].about))
        return Node("other", tuple(inputs), shape, name, names, fixed=True)
    if "scaled_dot_product" in name or "flash_attention" in name or "efficient_attention" in name:
        return _attention(name, args, kwargs, inputs, shape)
    if name in MATRIX or "grouped_mm" in name:
        return _matrix(name, args, kwargs, inputs, shape)
    if name in ("convolution", "convolution_overrideable", "_convolution", "cudnn_convolution"):
        weight, groups, transposed = inputs[1], args[8] if len(args) > 8 else 1, any(args[6:7])
        fan_in = (
            math.prod(weight.shape) // weight.shape[0]
            if not transposed
            else weight.shape[0] // groups * math.prod(weight.shape[2:])
        )
        about = {"fan_in": fan_in, "fan_out": shape[1] // groups, "groups": groups}
        return Node("convolution", live, shape, name, names, about=about)
    if name == "embedding" or (name in ("index", "index_select", "gather") and inputs[0].fixed and names):
        return Node("embedding", live, shape, name, names)
    if name in NORMS:
        gain = next((each for each in inputs if each.fixed and each.parameters), None)
        return Node("norm", live[:1], shape, name, names, about={} if gain is None else {"gain": gain.about})
    if name in ("_softmax", "softmax", "_safe_softmax", "_log_softmax"):
        return Node("softmax" if "log" not in name else "other", live, shape, name)
    if name in SUMS:
        return _sum(name, args, kwargs, inputs, shape, names)
    if name == "neg":
        return Node("scale", live, shape, name, (), (-1.0,), about={"uniform": True})
    if name in ("mul", "div", "multiply", "divide"):
        number = next((float(each) for each in args if isinstance(each, int | float)), 1.0)
        return multiplied(name, inputs, shape, names, number)
    if name in JOINS or (name == "copy" and len(live) > 1):
        return Node("join", live, shape, name, names)
    if name == "copy":
        return Node("view", live, shape, name, fixed=False)
    if name in VIEWS:
        return Node("view", live[:1], shape, name)
    return Node("other", live, shape, name, names)


def _number(values: Any) -> float:
    return next((float(each) for each in values if isinstance(each, int | float)), math.nan)


def _attention(name: str, args: tuple, kwargs: dict[str, Any], inputs: list[Node], shape: tuple[int, ...]) -> Node:
    """A fused kernel; its arguments are query, key, value, and others by name or place."""
    scale = kwargs.get("scale")
    booleans = [each for each in args if isinstance(each, bool)]
    numbers = [each for each in args[3:] if isinstance(each, float)]
    causal = bool(kwargs.get("is_causal", booleans[-1] if booleans else False))
    size = inputs[0].shape[-1]
    about = {
        "scale": float(scale) if scale is not None else 1 / math.sqrt(size),
        "default_scale": scale is None,
        "causal": causal,
        "dropout": float(kwargs.get("dropout_p", numbers[0] if numbers else 0.0)),
        "masked": len(inputs) > 3,
        "head_size": size,
    }
    return Node("attention", tuple(inputs[:3]), shape, name, about=about)


def _matrix(name: str, args: tuple, kwargs: dict[str, Any], inputs: list[Node], shape: tuple[int, ...]) -> Node:
    """A matrix product: with a parameter it is a product, of activations a contraction, with an added term a sum."""
    grouped = "grouped_mm" in name
    added, (left, right) = (inputs[0], inputs[1:3]) if name.startswith(("add", "badd")) else (None, inputs[:2])
    scale = float(kwargs.get("alpha", 1.0))
    inner, outer = left.shape[-1], right.shape[-1] if len(right.shape) > 1 else 1
    parameter = next((each for each in (right, left) if each.fixed and each.parameters), None)
    if parameter is left:
        inner, outer = (
            math.prod(right.shape[-2:-1] or right.shape),
            left.shape[-2] if len(left.shape) > 1 else 1,
        )
    about: dict[str, Any] = {"fan_in": inner, "fan_out": outer, "grouped": grouped}
    if parameter is not None:
        other = left if parameter is right else right
        about["weight"] = parameter
        names = parameter.parameters
        if added is not None and added.fixed:
            names, about["bias"] = (*names, *added.parameters), added.parameters
        node = Node("product", (other,), shape, name, names, (scale,), about=about)
    elif left.fixed or right.fixed:
        node = Node("view", tuple(each for each in (left, right) if not each.fixed), shape, name)
    else:
        node = Node("contraction", (left, right), shape, name, (), (scale,), about=about)
    if added is None or added.fixed:
        return node
    beta = float(kwargs.get("beta", 1.0))
    return Node("sum", (added, node), shape, name, (), (beta, 1.0))


def _sum(
    name: str, args: tuple, kwargs: dict[str, Any], inputs: list[Node], shape: tuple[int, ...], names: tuple
) -> Node:
    alpha = float(kwargs.get("alpha", 1.0))
    factors = [1.0, -alpha if name == "sub" else alpha]
    if name == "rsub":
        factors = [-alpha, 1.0]
    if name == "lerp":
        weight = _number([*args[2:3], kwargs.get("weight")])
        weight = float(inputs[2].about.get("mean", math.nan)) if math.isnan(weight) and len(inputs) > 2 else weight
        inputs, factors = inputs[:2], [1 - weight, weight]
    if name == "addcmul":
        value = float(kwargs.get("value", 1.0))
        product = multiplied("mul", inputs[1:3], shape, names)
        inputs, factors = [inputs[0], product], [1.0, value]
    if name in ("index_add", "scatter_add", "scatter_reduce"):
        inputs = [inputs[0], inputs[-1]]
    pairs = [(node, factor) for node, factor in zip(inputs, factors, strict=False) if not node.fixed]
    fixed = tuple(node for node in inputs if node.fixed and node.parameters)
    about: dict[str, Any] = {"fixed": fixed} if fixed else {}
    return Node(
        "sum", tuple(node for node, _ in pairs), shape, name, names, tuple(factor for _, factor in pairs), about=about
    )
