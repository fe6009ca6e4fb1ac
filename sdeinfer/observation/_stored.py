"""Hidden states in files, read layer by layer."""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xarray as xr

from sdeinfer._files import ZARR, InputError, first_line, readable
from sdeinfer.covariance import EVERY_TOKEN, Pattern
from sdeinfer.observation._library import library
from sdeinfer.observation._observer import Observer
from sdeinfer.observation._store import ENGINES

AT_ONCE = 2**30
"""Largest size, in bytes of float64, of one layer plus all covariances of the networks that are observed together."""

VARIABLE = "hidden_states"
"""Name of the hidden states in a file of several variables."""


class StoredStates(NamedTuple):
    """Hidden states that are read from their file on demand.

    Attributes:
        shape: shape of one layer: (networks, tokens, width), or (networks, prompts, tokens, width).
        layers: the layers' numbers.
        read: maps the index of a layer and a slice of networks to their hidden states.
    """

    shape: tuple[int, ...]
    layers: np.ndarray
    read: Callable[[int, slice], Any]


def observe_file(
    path: str | Path, *, width: int | None = None, prompts: Any = None, pattern: Pattern = EVERY_TOKEN
) -> Iterator[xr.Dataset]:
    """Observe hidden states in a file, with some networks and one layer in memory at a time.

    The file holds one array of shape (networks, layers, tokens, width) or (networks, layers, prompts, tokens, width),
    or one array per layer, in the order of their names ("layer_10" comes after "layer_9"):

    - `.npy`: one array; `.npz`: either. A single array in an `.npz` is loaded completely.
    - `.safetensors`: either.
    - `.nc` (NetCDF-3 is loaded completely) and `.zarr`, as xarray writes them: the variable `hidden_states`, or the
      only one. Dimensions `network` and `layer` may be at any position; a coordinate `layer` holds the layer numbers.

    Arguments:
        path: the file.
        width: n; None for the last dimension of the hidden states.
        prompts: the prompts to observe, if networks have several, as in `observe`.
        pattern: which tokens each token attends to, as in `observe`.

    Yields:
        Datasets as `observe` returns them, of successive networks.

    Raises:
        InputError: if the file is missing, damaged or of an unknown type, and as `observe`.
    """
    path = readable(path)
    with _opened(path) as stored:
        if len(stored.shape) not in (3, 4) or 0 in stored.shape:
            raise InputError(
                f"{path}: a layer of shape (networks, tokens, width) or (networks, prompts, tokens, width) is needed, "
                f"got {stored.shape}"
            )
        *_, tokens, features = stored.shape
        observed = tokens * (stored.shape[1] if len(stored.shape) == 4 else 1)
        each = 8 * observed * (features + len(stored.layers) * observed)
        at_once = max(1, AT_ONCE // each)
        for first in range(0, stored.shape[0], at_once):
            observer = Observer(width, prompts=prompts, pattern=pattern, first_network=first)
            for layer in range(len(stored.layers)):
                state = stored.read(layer, slice(first, min(first + at_once, stored.shape[0])))
                observer.add(state)
            yield observer.dataset(layers=stored.layers)


@contextmanager
def _opened(path: Path) -> Iterator[StoredStates]:
    openers = {".npy": _npy, ".npz": _npz, ".safetensors": _safetensors, ".nc": _netcdf, ZARR: _zarr}
    if path.suffix not in openers:
        known = ", ".join(openers)
        raise InputError(
            f"{path}: hidden states are read from {known}, not from {path.suffix or 'a file without a suffix'}"
        )
    with ExitStack() as stack:
        with _read_errors(path):
            stored = openers[path.suffix](path, stack)

        def read(layer: int, networks: slice) -> Any:
            # A truncated file may open, and fail only where it ends.
            with _read_errors(path):
                return stored.read(layer, networks)

        yield stored._replace(read=read)


@contextmanager
def _read_errors(path: Path) -> Iterator[None]:
    """Raise an `InputError` for any error of reading a file."""
    try:
        yield
    except (InputError, MemoryError):
        raise
    except Exception as error:
        raise InputError(f"{path}: cannot be read as {path.suffix} ({first_line(error)})") from error


def _npy(path: Path, stack: ExitStack) -> StoredStates:
    del stack
    return _from_array(np.load(path, mmap_mode="r", allow_pickle=False), path)


def _npz(path: Path, stack: ExitStack) -> StoredStates:
    # Opened here, because NumPy does not close a file that is not an archive.
    arrays = stack.enter_context(np.load(stack.enter_context(path.open("rb")), allow_pickle=False))
    names = _sorted_names(arrays.files, path)
    if len(names) == 1:
        return _from_array(arrays[names[0]], path)
    return StoredStates(
        arrays[names[0]].shape, np.arange(len(names)), lambda layer, networks: arrays[names[layer]][networks]
    )


def _safetensors(path: Path, stack: ExitStack) -> StoredStates:
    file = stack.enter_context(library("safetensors").safe_open(path, framework="numpy"))
    names = _sorted_names(file.keys(), path)
    shapes = [tuple(file.get_slice(name).get_shape()) for name in names]
    if len(names) == 1:
        return _from_array(_Slices(shapes[0], file.get_slice(names[0])), path)
    return StoredStates(
        shapes[0], np.arange(len(names)), lambda layer, networks: file.get_slice(names[layer])[networks]
    )


class _Slices(NamedTuple):
    """A slice of safetensors with the attribute `shape` of an array."""

    shape: tuple[int, ...]
    tensor: Any

    def __getitem__(self, index: Any) -> Any:
        return self.tensor[index]


def _netcdf(path: Path, stack: ExitStack) -> StoredStates:
    reasons = []
    for engine, options in ENGINES.items():
        try:
            file = stack.enter_context(closing(xr.open_dataset(path, engine=engine, **options)))
        except Exception as error:
            reasons.append(error)
        else:
            return _from_dataset(file, path)
    raise reasons[0]


def _zarr(path: Path, stack: ExitStack) -> StoredStates:
    zarr = library("zarr")
    file = stack.enter_context(closing(xr.open_zarr(path, chunks=None, consolidated=False)))
    stored = _from_dataset(file, path)
    array = zarr.open_group(path, mode="r")[_variable(file, path)]
    if array.nchunks_initialized < array.nchunks:
        # Zarr reads a missing chunk as zeros.
        raise InputError(f"{path}: {array.nchunks - array.nchunks_initialized} of {array.nchunks} chunks are missing")
    return stored


def _from_array(array: Any, path: Path) -> StoredStates:
    shape = tuple(array.shape)
    if len(shape) not in (4, 5):
        raise InputError(
            f"{path}: shape (networks, layers, tokens, width) or (networks, layers, prompts, tokens, width) is needed, "
            f"got {shape}"
        )
    return StoredStates((shape[0], *shape[2:]), np.arange(shape[1]), lambda layer, networks: array[networks, layer])


def _from_dataset(file: xr.Dataset, path: Path) -> StoredStates:
    array = file[_variable(file, path)]
    if {"network", "layer"} <= set(array.dims):
        array = array.transpose("network", "layer", ...)
    # Loaded on reading, so that damage raises there.
    stored = _from_array(array, path)._replace(read=lambda layer, networks: array[networks, layer].values)
    if "layer" in array.coords:
        stored = stored._replace(layers=array["layer"].values)
    return stored


def _variable(file: xr.Dataset, path: Path) -> str:
    names = [str(name) for name in file.data_vars]
    if VARIABLE in names:
        return VARIABLE
    if len(names) != 1:
        raise InputError(f"{path}: no variable `{VARIABLE}`, only {', '.join(sorted(names)) or 'none'}")
    return names[0]


def _sorted_names(names: Sequence[str], path: Path) -> list[str]:
    """Names sorted by the numbers in them."""
    if not names:
        raise InputError(f"{path}: holds no array")
    return sorted(
        names, key=lambda name: [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", name)]
    )
