"""Files: NetCDF, read with one clear line where that fails, and written whole or not at all."""

import os
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import xarray as xr

from sdeinfer.observe._dataset import validate


class FileError(ValueError):
    """A file or folder that cannot be read or written; the message names it and says why."""


def read(path: str | Path) -> xr.Dataset:
    """Read and validate a Dataset of covariances from a NetCDF file, also one written without this package.

    Raises:
        FileError: where the file is missing or is not NetCDF.
        ValueError: where its content is not valid, see `validate`; the message starts with the file.
    """
    path = readable(path)
    try:
        with xr.open_dataset(path, engine="h5netcdf") as file:
            data = file.load()
    except Exception as error:
        raise FileError(f"{path}: cannot be read as NetCDF ({first_line(error)})") from error
    try:
        return validate(data)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def read_tree(path: str | Path) -> xr.DataTree:
    """Read a posterior from a NetCDF file.

    Raises:
        FileError: where the file is missing, is not NetCDF, or holds no posterior.
    """
    path = readable(path)
    try:
        with xr.open_datatree(path, engine="h5netcdf") as file:
            tree = file.load()
    except Exception as error:
        raise FileError(f"{path}: cannot be read as NetCDF ({first_line(error)})") from error
    if "posterior" not in tree:
        raise FileError(f"{path}: holds no group `posterior`, so it is not the result of a fit")
    return tree


def write(data: xr.Dataset | xr.DataTree, path: str | Path) -> None:
    """Write to NetCDF, atomically."""
    written(path, lambda temporary: data.to_netcdf(temporary, engine="h5netcdf"))


def written(path: str | Path, write_to: Callable[[Path], object]) -> None:
    """Let `write_to` write a temporary file beside `path`, then rename it: the file is there whole or not at all.

    Raises:
        FileError: where the folder does not exist or cannot be written to.
    """
    path = Path(path)
    try:
        handle, name = tempfile.mkstemp(prefix=f".{path.stem}-", suffix=path.suffix, dir=path.parent)
        os.close(handle)
    except OSError as error:
        raise FileError(f"{path}: cannot be written ({error.strerror})") from error
    temporary = Path(name)
    try:
        write_to(temporary)
        temporary.chmod(0o666 & ~_umask())
        temporary.replace(path)
    except OSError as error:
        raise FileError(f"{path}: cannot be written ({error.strerror or first_line(error)})") from error
    finally:
        with suppress(FileNotFoundError):
            temporary.unlink()


def readable(path: str | Path) -> Path:
    """Check that a file is there.

    Raises:
        FileError: where it is not.
    """
    path = Path(path)
    if not path.exists():
        raise FileError(f"{path}: no such file")
    if path.is_dir():
        raise FileError(f"{path}: is a folder, not a file")
    return path


def first_line(error: Exception) -> str:
    """The first line of an error's message, or its type where it has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
