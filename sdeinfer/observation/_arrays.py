"""Arrays of any library as NumPy arrays of real numbers."""

import re
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import xarray as xr

from sdeinfer._files import InputError, first_line


def as_array(values: Any, name: str) -> np.ndarray:
    """Read an array through `__array__` or DLPack, in its own type, without a copy if its library allows.

    Arguments:
        values: an array of NumPy, JAX, PyTorch, or any other library with one of the two protocols; or a list of them.
        name: name of the array in errors.

    Raises:
        InputError: for anything but an array of real numbers, and for masked entries, whose values are not meant.
    """
    values = _on_host(values, name)
    if isinstance(values, list | tuple) and any(hasattr(each, "shape") for each in values):
        values = [as_array(each, name) for each in values]
        shapes = list(dict.fromkeys(each.shape for each in values))
        if len(shapes) > 1:
            raise InputError(f"{name}: a list of arrays of one shape is needed, got {shapes[0]} and {shapes[1]}")
    masked = int(np.ma.count_masked(values)) if isinstance(values, np.ma.MaskedArray) else 0
    if masked:
        raise InputError(f"{name}: {masked} entries are masked: leave out their networks, layers or tokens")
    reasons = []
    for read in (np.asarray, _through_dlpack):
        try:
            array = read(values)
        except Exception as error:
            reasons.append(first_line(error))
            continue
        if array.dtype != object:
            return real(array, name)
    raise InputError(f"{name}: cannot be read as an array ({reasons[0]})")


def in_order(array: xr.DataArray, names: tuple[str, ...], where: str) -> xr.DataArray:
    """The array with its dimensions in the order of their names, "prompt" being optional; unchanged without names.

    Raises:
        InputError: for other dimensions.
    """
    dims = tuple(map(str, array.dims))
    if all(re.fullmatch(r"dim_\d+", name) for name in dims):  # xarray's names of dimensions without one
        return array
    order = [name for name in names if name in dims or name != "prompt"]
    if sorted(order) != sorted(dims):
        raise InputError(f"{where}: dimensions {', '.join(order)} are needed, got {', '.join(dims)}")
    return array.transpose(*order)


def labels_of_networks(array: Any) -> dict[Any, Any]:
    """The coordinates of networks that an array brings, such as labels and groups; none of other arrays."""
    coords = array.coords if isinstance(array, xr.DataArray) else {}
    own = {name: each for name, each in coords.items() if each.dims == ("network",) and name != "width"}
    return {name: ("network", each.values) for name, each in own.items()}


def real(array: np.ndarray, name: str) -> np.ndarray:
    """Check that an array holds floating-point numbers or integers.

    Raises:
        InputError: for complex numbers, booleans, strings and other types.
    """
    if array.dtype.kind not in "iu" and not jnp.issubdtype(array.dtype, jnp.floating):
        raise InputError(f"{name}: real numbers are needed, got {array.dtype}")
    return array


def _on_host(values: Any, name: str) -> Any:
    """A PyTorch tensor as both protocols need it: detached, in main memory, dense and contiguous; others unchanged."""
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(values, torch.Tensor):
        return values
    if getattr(values, "is_meta", False):
        raise InputError(f"{name}: a tensor on the device meta has a shape and no values: run the network on another")
    values = values.detach().cpu()
    return (
        values.to_dense() if getattr(values, "layout", None) != getattr(torch, "strided", None) else values
    ).contiguous()


def _through_dlpack(values: Any) -> np.ndarray:
    # NumPy's own DLPack reader does not support bfloat16.
    return np.asarray(jax.dlpack.from_dlpack(values))
