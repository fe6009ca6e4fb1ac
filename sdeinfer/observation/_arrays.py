"""Arrays of any library as NumPy arrays of real numbers, and optional libraries.

Tests: `tests/observation/test_observe.py`.
"""

import importlib
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import xarray as xr

from sdeinfer._files import InputError, first_line


def as_array(values: Any, name: str) -> np.ndarray:
    """Read an array through `__array__` or DLPack, in its own type, without a copy if its library allows."""
    if isinstance(values, str | Path):
        raise InputError(f"{name}: an array is needed, got the path {str(values)!r}: read it first, as by numpy.load")
    if isinstance(values, Mapping):
        raise InputError(f"{name}: an array is needed, got a dict of {', '.join(map(str, values)) or 'nothing'}")
    values = _on_host(values, name)
    if isinstance(values, list | tuple) and any(hasattr(value, "shape") for value in values):
        values = [as_array(value, name) for value in values]
        shapes = list(dict.fromkeys(value.shape for value in values))
        if len(shapes) > 1:
            raise InputError(f"{name}: a list of arrays of one shape is needed, got {shapes[0]} and {shapes[1]}")
    masked = int(np.ma.count_masked(values)) if isinstance(values, np.ma.MaskedArray) else 0
    if masked:
        raise InputError(f"{name}: {masked} entries are masked: leave out their networks, layers or tokens")
    reasons = []
    # NumPy's own DLPack reader does not support bfloat16.
    for read in (np.asarray, lambda values: np.asarray(jax.dlpack.from_dlpack(values))):
        try:
            array = read(values)
        except Exception as error:
            reasons.append(first_line(error))
            continue
        if array.dtype.kind in "iu" or jnp.issubdtype(array.dtype, jnp.floating):
            return array
        if array.dtype != object:
            raise InputError(f"{name}: real numbers are needed, got {array.dtype}")
    raise InputError(f"{name}: cannot be read as an array ({reasons[0]})")


def in_order(array: xr.DataArray, names: tuple[str, ...], where: str) -> xr.DataArray:
    """The array with its dimensions in the order of their names, "prompt" being optional; unchanged without names."""
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
    labels = {name: coord for name, coord in coords.items() if coord.dims == ("network",) and name != "width"}
    return {name: ("network", coord.values) for name, coord in labels.items()}


def library(name: str, extra: str | None = None) -> Any:
    """Import an optional library, which an extra of its name or another one installs."""
    package = name.partition(".")[0]
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        raise InputError(f"{package}: not installed; pip install 'sdeinfer[{extra or package}]'") from error


def _on_host(values: Any, name: str) -> Any:
    """A PyTorch tensor as both protocols need it: detached, in main memory, dense and contiguous; others unchanged."""
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(values, torch.Tensor):
        return values
    if values.is_meta:
        raise InputError(f"{name}: a tensor on the device meta has a shape and no values: run the network on another")
    values = values.detach().cpu()
    return (values if values.layout == torch.strided else values.to_dense()).contiguous()
