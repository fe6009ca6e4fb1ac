"""Hidden states in files, read layer by layer."""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xarray as xr

from sdeinfer._files import ZARR, InputError, first_line, readable
from sdeinfer.observation._library import library
from sdeinfer.observation._observer import Observer
from sdeinfer.observation._store import ENGINES

AT_ONCE = 2**30
"""How many bytes one layer and all covariances of the networks that are observed together may have, in float64."""

VARIABLE = "hidden_states"
"""What hidden states are called in a file of several variables."""


class StoredStates(NamedTuple):
    """Hidden states that are still in their file.

    Attributes:
        shape: of one layer: (networks, tokens, width), or (networks, prompts, tokens, width).
        layers: the layers' numbers.
        read: the hidden states of some networks after the layer at a position.
    """

    shape: tuple[int, ...]
    layers: np.ndarray
    read: Callable[[int, slice], Any]


def observe_file(path: str | Path, *, width: int | None = None, prompt: int | None = None) -> Iterator[xr.Dataset]:
    """Observe hidden states in a file, some networks and one layer in memory at a time.

    The file holds one array of shape (networks, layers, tokens, width) or (networks, layers, prompts, tokens, width),
    or one array a layer, in the order of their names ("layer_10" comes after "layer_9"):

    - `.npy`: one array; `.npz`: either. A single array in an `.npz` is read whole.
    - `.safetensors`: either.
    - `.nc` (NetCDF-3 is read whole) and `.zarr`, as xarray writes them: the variable `hidden_states`, or the only one.
      Dimensions called `network` and `layer` may be anywhere, and a coordinate `layer` gives the numbers of the layers.

    Arguments:
        path: the file.
        width: n; the last dimension where None.
        prompt: which prompt of every network, where there are several.

    Yields:
        Datasets as `observe` returns them, of networks that follow each other.

    Raises:
        InputError: where the file is missing, of an unknown type or damaged, for several prompts of which none was
            chosen, and see `observe`.
    """
    path = readable(path)
    with _opened(path) as stored:
        if len(stored.shape) not in (3, 4) or 0 in stored.shape:
            raise InputError(
                f"{path}: a layer of shape (networks, tokens, width) or (networks, prompts, tokens, width) is needed, "
                f"got {stored.shape}"
            )
        prompts = stored.shape[1] if len(stored.shape) == 4 else None
        if prompts is None and prompt is not None:
            raise InputError(f"prompt: {path} has no dimension of prompts")
        if prompts is not None and (prompt is None or not 0 <= prompt < prompts):
            raise InputError(
                f"prompt: {path} has {prompts} prompts of each network, which are not independent networks: choose one "
                f"of 0 to {prompts - 1}, got {prompt}"
            )
        tokens, features = stored.shape[-2:]
        each = 8 * tokens * ((prompts or 1) * features + len(stored.layers) * tokens)
        at_once = max(1, AT_ONCE // each)
        for first in range(0, stored.shape[0], at_once):
            observer = Observer(width, first_network=first)
            for layer in range(len(stored.layers)):
                state = stored.read(layer, slice(first, min(first + at_once, stored.shape[0])))
                observer.add(state if prompt is None else state[:, prompt])
            yield observer.dataset(layers=stored.layers)


@contextmanager
def _opened(path: Path) -> Iterator[StoredStates]:
    openers = {".npy": _npy, ".npz": _npz, ".safetensors": _safetensors, ".nc": _netcdf, ZARR: _zarr}
    if path.suffix not in openers:
        known = ", ".join(openers)
        raise InputError(
            f"{path}: hidden states are read from {known}, not from {path.suffix or 'a file of no suffix'}"
        )
    with ExitStack() as stack:
        with _refused(path):
            stored = openers[path.suffix](path, stack)

        def read(layer: int, networks: slice) -> Any:
            # A file that was cut off may open, and fail only where it ends.
            with _refused(path):
                return stored.read(layer, networks)

        yield stored._replace(read=read)


@contextmanager
def _refused(path: Path) -> Iterator[None]:
    try:
        yield
    except (InputError, MemoryError):
        raise
    except Exception as error:
        raise InputError(f"{path}: cannot be read as {path.suffix} ({first_line(error)})") from error


def _npy(path: Path, stack: ExitStack) -> StoredStates:
    del stack
    return _of_one(np.load(path, mmap_mode="r", allow_pickle=False), path)


def _npz(path: Path, stack: ExitStack) -> StoredStates:
    # Opened here, because NumPy leaves a file open that is no archive.
    arrays = stack.enter_context(np.load(stack.enter_context(path.open("rb")), allow_pickle=False))
    names = _in_order(arrays.files, path)
    if len(names) == 1:
        return _of_one(arrays[names[0]], path)
    return StoredStates(
        arrays[names[0]].shape, np.arange(len(names)), lambda layer, networks: arrays[names[layer]][networks]
    )


def _safetensors(path: Path, stack: ExitStack) -> StoredStates:
    file = stack.enter_context(library("safetensors").safe_open(path, framework="numpy"))
    names = _in_order(file.keys(), path)
    shapes = [tuple(file.get_slice(name).get_shape()) for name in names]
    if len(names) == 1:
        return _of_one(_Slices(shapes[0], file.get_slice(names[0])), path)
    return StoredStates(
        shapes[0], np.arange(len(names)), lambda layer, networks: file.get_slice(names[layer])[networks]
    )


class _Slices(NamedTuple):
    """A tensor of safetensors with its shape, as arrays have it."""

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
            return _of_file(file, path)
    raise reasons[0]


def _zarr(path: Path, stack: ExitStack) -> StoredStates:
    zarr = library("zarr")
    file = stack.enter_context(closing(xr.open_zarr(path, chunks=None, consolidated=False)))
    stored = _of_file(file, path)
    array = zarr.open_group(path, mode="r")[_variable(file, path)]
    if array.nchunks_initialized < array.nchunks:
        # Zarr reads a chunk that is missing as zeros.
        raise InputError(f"{path}: {array.nchunks - array.nchunks_initialized} of {array.nchunks} chunks are missing")
    return stored


def _of_one(array: Any, path: Path) -> StoredStates:
    shape = tuple(array.shape)
    if len(shape) not in (4, 5):
        raise InputError(
            f"{path}: shape (networks, layers, tokens, width) or (networks, layers, prompts, tokens, width) is needed, "
            f"got {shape}"
        )
    return StoredStates((shape[0], *shape[2:]), np.arange(shape[1]), lambda layer, networks: array[networks, layer])


def _of_file(file: xr.Dataset, path: Path) -> StoredStates:
    array = file[_variable(file, path)]
    if {"network", "layer"} <= set(array.dims):
        array = array.transpose("network", "layer", ...)
    # Loaded where it is read, so that what is damaged is noticed there.
    stored = _of_one(array, path)._replace(read=lambda layer, networks: array[networks, layer].values)
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


def _in_order(names: Sequence[str], path: Path) -> list[str]:
    """Names in the order of the numbers in them."""
    if not names:
        raise InputError(f"{path}: holds no array")
    return sorted(
        names, key=lambda name: [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", name)]
    )
