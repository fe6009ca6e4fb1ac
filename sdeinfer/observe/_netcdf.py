"""NetCDF files of covariances and of posteriors."""

from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import xarray as xr

from sdeinfer._files import InputError, first_line, readable, write_whole
from sdeinfer.observe._dataset import validate

ENGINE = "h5netcdf"


def read(path: str | Path) -> xr.Dataset:
    """Read and validate a Dataset of covariances, also one written without this package.

    Raises:
        InputError: where the file is missing, is not NetCDF, or holds no valid data (see `validate`).
    """
    data = _loaded(path, xr.open_dataset)
    try:
        return validate(data)
    except InputError as error:
        raise InputError(f"{path}: {error}") from error


def read_posterior(path: str | Path) -> xr.DataTree:
    """Read the result of a fit.

    Raises:
        InputError: where the file is missing, is not NetCDF, or holds no posterior.
    """
    tree = _loaded(path, xr.open_datatree)
    if "posterior" not in tree.children or "observed_data" not in tree.children:
        raise InputError(f"{path}: holds no groups `posterior` and `observed_data`, so it is not the result of a fit")
    return tree


def _loaded[T: (xr.Dataset, xr.DataTree)](path: str | Path, opened: Callable[..., T]) -> T:
    path = readable(path)
    try:
        with closing(opened(path, engine=ENGINE)) as file:
            return file.load()
    except Exception as error:
        raise InputError(f"{path}: cannot be read as NetCDF ({first_line(error)})") from error


def write(data: xr.Dataset | xr.DataTree, path: str | Path) -> None:
    """Write to NetCDF; the file is there whole or not at all."""
    write_whole(path, lambda temporary: data.to_netcdf(temporary, engine=ENGINE))
