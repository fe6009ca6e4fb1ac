"""Files of covariances and of posteriors: NetCDF, or Zarr where the suffix is .zarr."""

from collections.abc import Callable, Hashable, Iterable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr

from sdeinfer._files import ZARR, InputError, first_line, readable, staged_file
from sdeinfer.observation._dataset import validate
from sdeinfer.observation._library import library

ENGINES: dict[str, dict[str, Any]] = {"h5netcdf": {}, "scipy": {"mmap": False}}
"""Of NetCDF-4, which is written, and of NetCDF-3, which is read too, with xarray's options for them; NetCDF-3 is not
mapped to memory, because SciPy cannot close the map of a file that was cut off."""

ZARR_ENGINE: dict[str, dict[str, Any]] = {"zarr": {"consolidated": False}}

ZARR_FORMAT: dict[str, Any] = {"zarr_format": 2, "consolidated": False}
"""Version 2 has text, and reads a part that is missing as NaN, which is refused; version 3 would read it as zero."""

GROUPS = {
    "posterior": (),
    "sample_stats": ("diverging",),
    "posterior_predictive": ("covariance",),
    "observed_data": ("covariance",),
    "constant_data": ("width",),
}
"""What a posterior file must hold to be judged and reported."""


def read(path: str | Path) -> xr.Dataset:
    """Read and validate a Dataset of covariances, also one written without this package.

    Raises:
        InputError: where the file is missing, cannot be read, or holds no valid data (see `validate`).
    """
    data = _loaded(path, xr.open_dataset)
    try:
        return validate(data)
    except InputError as error:
        raise InputError(f"{path}: {error}") from error


def read_posterior(path: str | Path) -> xr.DataTree:
    """Read the result of a fit.

    Raises:
        InputError: where the file is missing, cannot be read, or holds no posterior.
    """
    tree = _loaded(path, xr.open_datatree)
    for group, variables in GROUPS.items():
        if group not in tree.children or not set(variables) <= set(tree[group].data_vars):
            needed = " with ".join([f"group `{group}`", *(f"`{name}`" for name in variables)])
            raise InputError(f"{path}: holds no {needed}, so it is not the result of a fit")
    if "architecture" not in tree.attrs:
        raise InputError(f"{path}: does not name its architecture, so it is not the result of a fit")
    return tree


def write(data: xr.Dataset | xr.DataTree, path: str | Path, *, append: bool = False) -> None:
    """Write to NetCDF, or to Zarr where the suffix is .zarr; the file is there whole or not at all.

    Arguments:
        data: covariances, or the result of a fit.
        path: the file, or the folder of Zarr.
        append: add networks to those that the folder of Zarr holds, so that an ensemble may be larger than memory; they
            are numbered on. A write that is killed in the middle damages what was there: append to a copy of what
            cannot be made again.

    Raises:
        InputError: where the file cannot be written, or where what it holds has other layers, tokens or attributes.
    """
    path = Path(path)
    if append:
        _append(data, path)
        return
    if path.suffix == ZARR:
        library("zarr")
    with staged_file(path) as temporary:
        if path.suffix == ZARR:
            data.to_zarr(temporary, mode="w", **ZARR_FORMAT)
        else:
            data.to_netcdf(temporary, engine="h5netcdf")


def write_parts(parts: Iterable[xr.Dataset], path: str | Path) -> Mapping[Hashable, int]:
    """Write networks that come in parts, to Zarr one part after another, to NetCDF together.

    Arguments:
        parts: valid Datasets of some networks each.
        path: the file, or the folder of Zarr.

    Returns:
        How many networks, layers and tokens were written.

    Raises:
        InputError: see `write`.
    """
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
    if path.suffix != ZARR or not isinstance(data, xr.Dataset):
        raise InputError(f"{path}: only a Dataset can be appended, and only to Zarr ({ZARR})")
    if not path.exists() or not any(path.iterdir()):
        write(data, path)
        return
    with closing(xr.open_zarr(path, chunks=None, consolidated=False)) as there:
        for what, has, given in [
            ("variables", set(there.variables), set(data.variables)),
            ("tokens", there.sizes.get("token_a"), data.sizes["token_a"]),
            ("layers", there["layer"].values.tolist(), data["layer"].values.tolist()),
            ("types", there["covariance"].dtype, data["covariance"].dtype),
            ("attributes", there.attrs, data.attrs),
        ]:
            if has != given:
                raise InputError(f"{path}: has other {what} than what is appended: {has} and {given}")
        last = int(there["network"].values[-1])
    data = data.assign_coords(network=last + 1 + np.arange(data.sizes["network"]))
    data.to_zarr(path, append_dim="network", **ZARR_FORMAT)


def _loaded[T: (xr.Dataset, xr.DataTree)](path: str | Path, opened: Callable[..., T]) -> T:
    path = readable(path)
    engines = ENGINES
    if path.suffix == ZARR:
        library("zarr")
        engines = ZARR_ENGINE
    reasons = []
    for engine, options in engines.items():
        try:
            with closing(opened(path, engine=engine, **options)) as file:
                return file.load()
        except Exception as error:
            reasons.append(first_line(error))
    raise InputError(f"{path}: cannot be read as {'Zarr' if path.suffix == ZARR else 'NetCDF'} ({reasons[0]})")
