"""Primitives of JAX, evaluated by NumPy: JAX compiles each one for each shape, which takes longer than a pass.

Tests: `tests/auditing/test_audit.py`.
"""

import math
from typing import Any

import numpy as np
from scipy import special

ENTRIES = {
    "add": np.add,
    "add_any": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "max": np.maximum,
    "min": np.minimum,
    "pow": np.power,
    "neg": np.negative,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "eq": np.equal,
    "ne": np.not_equal,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "erf": special.erf,
    "logistic": special.expit,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "copy": np.positive,
    "stop_gradient": np.positive,
} | {name: getattr(np, name) for name in "exp exp2 log log1p expm1 tanh sin cos sqrt square abs sign floor".split()}
"""Functions of entries."""

REDUCTIONS = {"reduce_sum": np.sum, "reduce_max": np.max, "reduce_min": np.min, "reduce_prod": np.prod}


def evaluated(equation: Any, values: list[Any]) -> list[Any]:
    """The values of an equation; by JAX where NumPy has no function for it."""
    name, parameters = equation.primitive.name, equation.params
    if any(str(getattr(value, "dtype", "")).startswith("key<") for value in values):
        found = None
    else:
        with np.errstate(all="ignore"):  # masks are infinite
            found = _by_numpy(name, parameters, equation.outvars[0].aval, [_wide(value) for value in values])
    if found is None:
        found = equation.primitive.bind(*values, **parameters)
    outputs = list(found) if equation.primitive.multiple_results else [found]
    return [
        value if str(value.dtype).startswith("key<") else np.asarray(value).astype(variable.aval.dtype, copy=False)
        for value, variable in zip(outputs, equation.outvars, strict=True)
    ]


def _wide(value: Any) -> Any:
    """Half precision in single precision."""
    x = np.asarray(value)
    return x.astype(np.float32) if x.dtype.name in ("bfloat16", "float16") else x


def _by_numpy(name: str, parameters: Any, out: Any, values: list[Any]) -> Any:
    if name in ENTRIES:
        return ENTRIES[name](*values)
    if name in REDUCTIONS:
        return REDUCTIONS[name](values[0], axis=tuple(parameters["axes"]))
    match name:
        case "div" if np.issubdtype(out.dtype, np.floating):
            return values[0] / values[1]
        case "not" if out.dtype == bool:
            return ~values[0]
        case "integer_pow":
            return values[0] ** parameters["y"]
        case "convert_element_type" | "reduce_precision":
            return values[0]
        case "reshape" if parameters.get("dimensions") is None:
            return values[0].reshape(out.shape)
        case "squeeze" | "expand_dims":
            return values[0].reshape(out.shape)
        case "transpose":
            return values[0].transpose(parameters["permutation"])
        case "broadcast_in_dim":
            shape = [1] * len(out.shape)
            for size, axis in zip(values[0].shape, parameters["broadcast_dimensions"], strict=True):
                shape[axis] = size
            return np.broadcast_to(values[0].reshape(shape), out.shape)
        case "iota":
            axis = parameters["dimension"]
            return np.broadcast_to(
                np.arange(out.shape[axis]).reshape([-1] + [1] * (len(out.shape) - axis - 1)), out.shape
            )
        case "select_n" if len(values) == 3:
            return np.where(values[0], values[2], values[1])
        case "concatenate":
            return np.concatenate(values, parameters["dimension"])
        case "slice":
            bounds = zip(parameters["start_indices"], parameters["limit_indices"], strict=True)
            steps = parameters["strides"] or [1] * values[0].ndim
            return values[0][tuple(slice(*pair, step) for pair, step in zip(bounds, steps, strict=True))]
        case "split":
            return np.split(values[0], np.cumsum(parameters["sizes"])[:-1], parameters["axis"])
        case "dot_general":
            return _product(parameters["dimension_numbers"], *values).reshape(out.shape)
    return None


def _product(dimensions: Any, left: np.ndarray, right: np.ndarray) -> np.ndarray:
    (left_axes, right_axes), (left_batch, right_batch) = dimensions
    left_free = [axis for axis in range(left.ndim) if axis not in {*left_axes, *left_batch}]
    right_free = [axis for axis in range(right.ndim) if axis not in {*right_axes, *right_batch}]
    batch = math.prod(left.shape[axis] for axis in left_batch)
    inner = math.prod(left.shape[axis] for axis in left_axes)
    one = left.transpose([*left_batch, *left_free, *left_axes]).reshape(batch, -1, inner)
    other = right.transpose([*right_batch, *right_axes, *right_free]).reshape(batch, inner, -1)
    return one @ other
