"""One-line errors for arguments of another type than a public function is annotated with."""

import functools
import inspect
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Union, get_args, get_origin

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import PRNGKeyArray

from sdeinfer._compiler import make_room
from sdeinfer._files import InputError

NEEDED = {
    "NoneType": "",
    "int": "a whole number",
    "float": "a number",
    "str": "a name",
    "Path": "a path",
    "tuple": "a pair",
    "Mapping": "a dict",
    "Sequence": "a list",
    "Callable": "a model, as si.models.full_path, or a NumPyro program",
    "type": "the type of a layer",
    "key": "a key, as jax.random.key(0),",
    "Dataset": "a Dataset, as of si.observe or si.read,",
    "DataTree": "the result of a fit, of a file by si.observation.read_posterior,",
    "AbstractLayer": "a layer, as si.ShapedAttention(gamma=0.5, tau0=1.0),",
    "Pattern": "a pattern, as si.CAUSAL or si.Pattern.of_mask(matrix),",
    "AbstractSampler": "a sampler, as si.NUTS(),",
    "Tuned": "the result of si.tune",
}
"""The types that are checked, by the name of the class in the annotation, in words."""


def checked[**P, T](function: Callable[P, T]) -> Callable[P, T]:
    """Wrap a public function: a wrong type that `NEEDED` has is an `InputError`, and there is room for its programs."""
    signature = inspect.signature(function)
    known = {name: _types(parameter.annotation) for name, parameter in signature.parameters.items()}
    known = {name: kinds for name, kinds in known.items() if all(kind in NEEDED for kind, _ in kinds)}

    @functools.wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> T:
        for name, value in signature.bind_partial(*args, **kwargs).arguments.items():
            if name in known and not any(_is_a(value, *pair) for pair in known[name]):
                needed = " or ".join(dict.fromkeys(NEEDED[kind] for kind, _ in known[name] if NEEDED[kind]))
                raise InputError(f"{name}: {needed} is needed, got {_received(value)}")
        make_room()
        return function(*args, **kwargs)

    return wrapped


def at_least_one(**sizes: Any) -> None:
    """Check that sizes, by name, are whole numbers of at least 1."""
    for name, size in sizes.items():
        if not whole_number(size) or size < 1:
            got = int(size) if whole_number(size) else shown(size)
            raise InputError(f"{name}: a whole number of at least 1 is needed, got {got}")


def given(**values: Any) -> dict[str, Any]:
    """Those values by name that are not None."""
    return {name: value for name, value in values.items() if value is not None}


def shown(value: Any) -> str:
    """A value in an error, on one line; its type if that is long."""
    text = repr(value)
    return text if len(text) <= 60 and "\n" not in text else f"a {type(value).__name__}"


def _received(value: Any) -> str:
    """A value of a wrong type; a DataTree lacks its group, since another function of trees has taken one out."""
    if type(value).__name__ != "DataTree":
        return shown(value)
    return "a DataTree without the group posterior, as of az.thin; post.isel(draw=slice(None, None, 2)) keeps all"


def whole_number(value: Any) -> bool:
    """Whether a value is an integer of Python, NumPy or JAX."""
    if isinstance(value, int | np.integer):
        return True
    array = isinstance(value, np.ndarray | jax.Array) and not isinstance(value, Tracer)
    return array and value.ndim == 0 and jnp.issubdtype(value.dtype, jnp.integer)


def _types(annotation: Any) -> list[tuple[str, Any]]:
    """The types of an annotation: their names in `NEEDED`, and the classes."""
    if annotation == PRNGKeyArray:
        return [("key", annotation)]
    origin = get_origin(annotation)
    if origin in (Union, types.UnionType):
        return [kind for member in get_args(annotation) for kind in _types(member)]
    kind = annotation if origin is None else origin
    of = get_args(annotation)[0] if kind is type and origin else kind
    return [(getattr(kind, "__name__", ""), of)]


def _is_a(value: Any, name: str, kind: Any) -> bool:
    match name:
        case "key":
            dtype, dims = getattr(value, "dtype", np.float64), getattr(value, "ndim", 0)
            return (dims == 0 and jnp.issubdtype(dtype, jax.dtypes.prng_key)) or (dims, dtype) == (1, np.uint32)
        case "int":
            return whole_number(value)
        case "float":
            return hasattr(value, "__float__") and np.ndim(value) == 0 and not isinstance(value, Tracer)
        case "str" | "Path":
            return isinstance(value, str) or hasattr(value, "__fspath__")
        case "tuple":
            return isinstance(value, tuple | list)
        case "Mapping" | "Sequence":
            return isinstance(value, Mapping if name == "Mapping" else Sequence)
        case "Callable":
            return type(value).__name__ not in ("Dataset", "DataTree")  # others have messages of their own
        case "type":
            return isinstance(value, type) and issubclass(value, kind)
        case "DataTree":
            return isinstance(value, kind) and "posterior" in value.children
        case _:
            return isinstance(value, kind)
