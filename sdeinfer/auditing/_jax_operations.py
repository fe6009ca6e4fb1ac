"""Primitives of JAX by what they do to the accounts of a pass. Tests: `tests/auditing/test_audit.py`."""

import math
from collections.abc import Mapping
from typing import Any

from sdeinfer.auditing._record import Node, multiplied

VIEWS = frozenset(
    "reshape transpose broadcast_in_dim squeeze expand_dims convert_element_type slice dynamic_slice gather "
    "rev pad copy copy_p stop_gradient reduce_sum reduce_window_sum cumsum reduce_precision split real imag "
    "sharding_constraint name device_put sort top_k optimization_barrier mesh_cast pvary".split()
)  # fmt: skip
JOINS = frozenset("concatenate select_n dynamic_update_slice scatter complex".split())
SUMS = frozenset("add sub add_any scatter-add".split())
RANDOM = frozenset("random_bits threefry2x32 random_gamma rng_bit_generator".split())


def node_of_primitive(
    name: str, parameters: Mapping[str, Any], inputs: list[Node], shape: tuple[int, ...], values: list[Any]
) -> Node:
    """The node of what a primitive returns."""
    live = tuple(node for node in inputs if not node.fixed)
    names = tuple(dict.fromkeys(each for node in inputs if node.fixed for each in node.parameters))
    if name in RANDOM:
        return Node("random", live, shape, name)
    if not live and name in VIEWS and inputs:
        return Node("view", tuple(inputs[:1]), shape, name, names, fixed=True, about=dict(inputs[0].about))
    if not live:
        return Node("other", tuple(inputs), shape, name, names, fixed=True)
    if name == "gather" and inputs[0].fixed and inputs[0].parameters:
        return Node("embedding", live, shape, "embedding", names)
    if name == "dot_general":
        return _contracted(parameters, inputs, shape)
    if name == "conv_general_dilated":
        weight, groups = inputs[1], parameters["feature_group_count"]
        outer = weight.shape[parameters["dimension_numbers"].rhs_spec[0]]
        sizes = {"fan_in": math.prod(weight.shape) // outer, "fan_out": outer // groups, "groups": groups}
        return Node("convolution", live, shape, name, names, about=sizes)
    if name in SUMS:
        factors = [1.0, -1.0 if name == "sub" else 1.0]
        chosen = [inputs[0], inputs[-1]]
        pairs = [(node, factor) for node, factor in zip(chosen, factors, strict=True) if not node.fixed]
        return Node("sum", tuple(node for node, _ in pairs), shape, name, names, tuple(factor for _, factor in pairs))
    if name == "neg":
        return Node("scale", live, shape, name, (), (-1.0,), about={"uniform": True})
    if name in ("mul", "div"):
        return multiplied(name, inputs, shape, names)
    if name in JOINS:
        return Node("join", tuple(node for node in live if node.kind != "input" or len(live) == 1), shape, name, names)
    if name in VIEWS:
        return Node("view", live[:1], shape, name)
    return Node("other", live, shape, name, names)


def _contracted(parameters: Mapping[str, Any], inputs: list[Node], shape: tuple[int, ...]) -> Node:
    (left_axes, right_axes), (left_batch, right_batch) = parameters["dimension_numbers"]
    left, right = inputs
    parameter = next((each for each in (right, left) if each.fixed and each.parameters), None)
    if parameter is None:
        live = tuple(node for node in inputs if not node.fixed)
        size = math.prod(left.shape[axis] for axis in left_axes)
        if len(live) < 2:
            return Node("view", live, shape, "dot_general")
        return Node("contraction", live, shape, "dot_general", (), (1.0,), about={"fan_in": size, "fan_out": 0})
    axes, batch, other = (right_axes, right_batch, left) if parameter is right else (left_axes, left_batch, right)
    inner = math.prod(parameter.shape[axis] for axis in axes)
    outer = math.prod(n for axis, n in enumerate(parameter.shape) if axis not in {*axes, *batch})
    about = {"fan_in": inner, "fan_out": outer, "weight": parameter}
    return Node("product", (other,), shape, "dot_general", parameter.parameters, (1.0,), about=about)
