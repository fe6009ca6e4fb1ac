"""Files of covariances and of posteriors: NetCDF, or Zarr if the suffix is .zarr."""

import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr

from sdeinfer._arguments import checked
from sdeinfer._files import ZARR, InputError, first_line, readable, staged_file
from sdeinfer.observation._arrays import library
from sdeinfer.observation._branches import validate_branches
from sdeinfer.observation._dataset import SHORTCUT, validate, validate_labels, validate_tokens

ZARR_FORMAT: dict[str, Any] = {"zarr_format": 2, "consolidated": False}
"""Zarr version 2 supports text, and reads a missing chunk as NaN, which is refused; version 3 would read it as zero."""


@checked
def read(path: str | Path) -> xr.Dataset:
    """Read and validate a Dataset of covariances, of branches or of tokens, of any program.

    Raises:
        InputError: if the file is missing, cannot be read, or holds no valid data, see `validate` and
            `validate_branches` and `validate_tokens`.
    """
    path = readable(path)
    with reading(path), closing(opened(path, xr.open_dataset)) as file:
        data = file.load()
        if not data.variables:
            raise InputError("no data; the result of a fit is read by si.observation.read_posterior")
        kinds = {"increment": validate_branches, "tokens": validate_tokens}
        return next((kinds[name] for name in kinds if name in data), validate)(data)


def open_in_chunks(path: str | Path) -> xr.Dataset:
    """Open covariances in Zarr as a Dataset backed by Dask, which is read in chunks."""
    path = readable(path).resolve()
    if path.suffix != ZARR:
        raise InputError(f"{path}: data in chunks are read from Zarr ({ZARR}) only; write(read(…), …) converts")
    library("dask")
    library("zarr", "dask")
    with reading(path):
        return validate_labels(xr.open_zarr(path, consolidated=False))


@checked
def read_posterior(path: str | Path) -> xr.DataTree:
    """Read the result of a fit.

    Raises:
        InputError: if the file is missing, cannot be read, or holds no posterior.
    """
    path = readable(path)
    with reading(path), closing(opened(path, xr.open_datatree)) as file:
        tree = file.load()
    groups = {"posterior", "sample_stats", "observed_data", "constant_data"}
    if not groups <= tree.children.keys() or "identified" not in tree.attrs:
        raise InputError(f"{path}: is not the result of a fit, which has the groups {', '.join(sorted(groups))}")
    return tree


@checked
def write(data: xr.Dataset | xr.DataTree, path: str | Path, *, append: bool = False) -> None:
    """Write to NetCDF, or to Zarr if the suffix is .zarr; the file is written completely or not at all.

    Arguments:
        data: covariances, increments of branches, tokens, or the result of a fit.
        path: the file, or the Zarr folder.
        append: add networks to a Zarr folder, so that an ensemble may be larger than memory; their numbers continue
            those in the folder. An append that is killed damages the folder: append to a copy of data that cannot be
            made again.

    Raises:
        InputError: if the file cannot be written, or holds data with other layers, tokens, types or attributes.
    """
    path = Path(path)
    if append:
        return _append(data, path)
    if path.suffix == ZARR:
        library("zarr")
    with staged_file(path) as temporary:
        try:
            if path.suffix == ZARR:
                _without_encoding(data).to_zarr(temporary, mode="w", **ZARR_FORMAT)
            else:
                # HDF5 ends the process where the disk is full, so that it gets memory, of the size of the file.
                with data.to_netcdf(engine="h5netcdf") as content, temporary.open("wb") as file:
                    file.write(content)
        except (TypeError, ValueError) as error:  # of an attribute that the format does not hold
            raise InputError(f"{path}: cannot be written ({first_line(error)})") from error


def _without_encoding(data: Any) -> Any:
    """The data without the compression of a file of another format; chunks are kept."""
    data = data.copy()
    for node in data.subtree if isinstance(data, xr.DataTree) else [data]:
        for variable in node.variables.values():
            variable.encoding = {name: value for name, value in variable.encoding.items() if name == "chunks"}
    return data


def write_parts(parts: Iterable[xr.Dataset], path: str | Path) -> Mapping[Hashable, int]:
    """Write networks that arrive in parts: to Zarr one part at a time, to NetCDF all together."""
    path = Path(path)
    with staged_file(path) as temporary:
        if path.suffix != ZARR:
            data = xr.concat(list(parts), "network")
            write(data, temporary)
            return data.sizes
        networks, sizes = 0, {}
        for part in parts:
            write(part, temporary, append=True)
            networks += part.sizes["network"]
            sizes = part.sizes
        return {**sizes, "network": networks}


def _append(data: xr.Dataset | xr.DataTree, path: Path) -> None:
    if path.suffix != ZARR or not isinstance(data, xr.Dataset) or "network" not in data.dims:
        raise InputError(f"{path}: only a Dataset of networks can be appended, and only to Zarr ({ZARR})")
    if not path.exists() or not any(path.iterdir()):
        write(data, path)
        return
    with closing(opened(path, xr.open_dataset)) as stored:
        data = _with_shortcut_as(stored, data)
        labels, (old, new) = stored["network"].values, map(_described, (stored, data))
    for name in old:
        if old[name] != new[name]:
            raise InputError(f"{path}: has other {name} than the appended data: {old[name]} and {new[name]}")
    if labels.dtype.kind in "iu":
        data = data.assign_coords(network=labels[-1] + 1 + np.arange(data.sizes["network"]))
    elif np.isin(data["network"].values, labels).any():
        raise InputError(f"{path}: has networks of the same labels as the appended data")
    with warnings.catch_warnings():  # of metadata that xarray consolidated in version 3
        warnings.filterwarnings("ignore", "Consolidated metadata")
        _without_encoding(data).to_zarr(path, append_dim="network")


def _with_shortcut_as(stored: xr.Dataset, data: xr.Dataset) -> xr.Dataset:
    """The data without their shortcuts if the stored networks have none, and with unknown ones in place of none."""
    if SHORTCUT not in stored.coords:
        return data.drop_vars(SHORTCUT, errors="ignore")
    if SHORTCUT in data.coords:
        return data
    unknown = np.full((data.sizes["network"], data.sizes.get("layer", 0)), np.nan)
    return data.assign_coords({SHORTCUT: (("network", "layer"), unknown)})


def _described(data: xr.Dataset) -> dict[str, Any]:
    """The properties that two Datasets share if one may be appended to the other."""
    return {
        "variables": set(data.variables),
        "layers": data["layer"].values.tolist() if "layer" in data.coords else [],
        "sizes": {dim: size for dim, size in data.sizes.items() if dim != "network"},
        "types": {name: variable.dtype for name, variable in data.data_vars.items()},
        "attributes": data.attrs,
    }


def opened[T: (xr.Dataset, xr.DataTree)](path: Path, opener: Callable[..., T]) -> T:
    """Open a NetCDF file or a Zarr folder."""
    if path.suffix == ZARR:
        library("zarr")
        return opener(path, engine="zarr", consolidated=False)
    with path.open("rb") as file:
        old = file.read(3) == b"CDF"
    # NetCDF 3 is not memory-mapped, because SciPy cannot close the map of a truncated file.
    return opener(path, engine="scipy", mmap=False) if old else opener(path, engine="h5netcdf")


@contextmanager
def reading(path: str | Path, form: str | None = None) -> Iterator[None]:
    """Name the file in every error of reading it; all become `InputError`s, except for a lack of memory."""
    try:
        yield
    except MemoryError:
        raise
    except InputError as error:
        raise InputError(f"{path}: {error}") from error
    except Exception as error:
        form = form or ("Zarr" if Path(path).suffix == ZARR else "NetCDF")
        raise InputError(f"{path}: cannot be read as {form} ({first_line(error)})") from error
