"""Hidden states in files, read layer by layer."""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xarray as xr

from sdeinfer._files import ZARR, InputError, readable
from sdeinfer.observation._arrays import library
from sdeinfer.observation._observer import Observer
from sdeinfer.observation._store import opened, reading

BYTES_AT_ONCE = 2**30
"""Largest size, in bytes of float64, of two layers plus all covariances of the networks that are observed together."""


class StoredStates(NamedTuple):
    """Hidden states that are read from their file on demand."""

    shape: tuple[int, ...]
    layers: np.ndarray
    read: Callable[[int, slice], Any]


def observe_file(path: str | Path, *, prompts: Any = None) -> Iterator[xr.Dataset]:
    """Observe hidden states in a file, with some networks and two layers in memory at a time."""
    path = readable(path)
    with ExitStack() as stack:
        with reading(path, path.suffix):
            stored = _opened(path, stack)
        *_, tokens, features = stored.shape
        observed = tokens * (stored.shape[1] if len(stored.shape) == 4 else 1)
        network_bytes = 8 * observed * (2 * features + len(stored.layers) * observed)
        at_once = max(1, BYTES_AT_ONCE // network_bytes)
        for first in range(0, stored.shape[0], at_once):
            observer = Observer(prompts=prompts, first_network=first)
            for layer in range(len(stored.layers)):
                with reading(path, path.suffix):  # a truncated file may open, and fail only where it ends
                    state = stored.read(layer, slice(first, min(first + at_once, stored.shape[0])))
                observer.add(state)
            yield observer.dataset(layers=stored.layers)


def _opened(path: Path, stack: ExitStack) -> StoredStates:
    openers = {".npy": _npy, ".npz": _npz, ".safetensors": _safetensors, ".nc": _xarray, ZARR: _xarray}
    if path.suffix not in openers:
        known, suffix = ", ".join(openers), path.suffix or "a file without a suffix"
        raise InputError(f"hidden states are read from {known}, not from {suffix}")
    stored = openers[path.suffix](path, stack)
    if len(stored.shape) not in (3, 4) or 0 in stored.shape:
        raise InputError(
            "layers of shape (networks, tokens, width) or (networks, prompts, tokens, width) are needed, or one array "
            f"with layers as the second axis; got layers of shape {stored.shape}"
        )
    return stored


def _npy(path: Path, _: ExitStack) -> StoredStates:
    return _of_array(np.load(path, mmap_mode="r", allow_pickle=False))


def _npz(path: Path, stack: ExitStack) -> StoredStates:
    # Opened here, because NumPy does not close a file that is not an archive.
    arrays = stack.enter_context(np.load(stack.enter_context(path.open("rb")), allow_pickle=False))
    return _of_names(arrays.files, arrays.__getitem__)


def _safetensors(path: Path, stack: ExitStack) -> StoredStates:
    file = stack.enter_context(library("safetensors").safe_open(path, framework="numpy"))
    return _of_names(list(file.keys()), lambda name: _Slices(file.get_slice(name)))


class _Slices(NamedTuple):
    """A tensor of safetensors, of which slices are read, with the shape of an array."""

    tensor: Any

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.get_shape())

    def __getitem__(self, index: Any) -> Any:
        return self.tensor[index]


def _xarray(path: Path, stack: ExitStack) -> StoredStates:
    file = stack.enter_context(closing(opened(path, xr.open_dataset)))
    names = sorted(map(str, file.data_vars))
    name = names[0] if len(names) == 1 else "hidden_states"
    if name not in names:
        raise InputError(f"no variable `hidden_states`, only {', '.join(names) or 'none'}")
    if path.suffix == ZARR:
        chunks = library("zarr").open_group(path, mode="r")[name]
        missing = chunks.nchunks - chunks.nchunks_initialized
        if missing:  # Zarr reads a missing chunk as zeros
            raise InputError(f"{missing} of {chunks.nchunks} chunks are missing")
    array = file[name]
    if {"network", "layer"} <= set(array.dims):
        array = array.transpose("network", "layer", ...)
    # Loaded on reading, so that damage raises there.
    stored = _of_array(array)._replace(read=lambda layer, networks: array[networks, layer].values)
    return stored._replace(layers=array["layer"].values) if "layer" in array.coords else stored


def _of_names(names: Sequence[str], array_of: Callable[[str], Any]) -> StoredStates:
    """One array of all layers, or one of each layer, sorted by the numbers in their names."""
    if not names:
        raise InputError("holds no array")
    if len(names) == 1:
        return _of_array(array_of(names[0]))
    names = sorted(
        names, key=lambda name: [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", name)]
    )
    shape = tuple(array_of(names[0]).shape)
    return StoredStates(shape, np.arange(len(names)), lambda layer, networks: array_of(names[layer])[networks])


def _of_array(array: Any) -> StoredStates:
    first, *sizes = array.shape
    layers = np.arange(sizes[0] if sizes else 0)
    return StoredStates((first, *sizes[1:]), layers, lambda layer, networks: array[networks, layer])
