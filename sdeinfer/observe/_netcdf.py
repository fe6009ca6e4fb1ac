"""NetCDF files of covariances and of posteriors."""

from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import xarray as xr

from sdeinfer._files import InputError, first_line, readable, staged_file
from sdeinfer.observe._dataset import validate

ENGINES = ("h5netcdf", "scipy")
"""NetCDF-4, which is written, and NetCDF-3, which is read too."""

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
    for group, variables in GROUPS.items():
        if group not in tree.children or not set(variables) <= set(tree[group].data_vars):
            needed = " with ".join([f"group `{group}`", *(f"`{name}`" for name in variables)])
            raise InputError(f"{path}: holds no {needed}, so it is not the result of a fit")
    if "architecture" not in tree.attrs:
        raise InputError(f"{path}: does not name its architecture, so it is not the result of a fit")
    return tree


def _loaded[T: (xr.Dataset, xr.DataTree)](path: str | Path, opened: Callable[..., T]) -> T:
    path = readable(path)
    reasons = []
    for engine in ENGINES:
        try:
            with closing(opened(path, engine=engine)) as file:
                return file.load()
        except Exception as error:
            reasons.append(first_line(error))
    raise InputError(f"{path}: cannot be read as NetCDF ({reasons[0]})")


def write(data: xr.Dataset | xr.DataTree, path: str | Path) -> None:
    """Write to NetCDF; the file is there whole or not at all."""
    with staged_file(path) as temporary:
        data.to_netcdf(temporary, engine=ENGINES[0])
