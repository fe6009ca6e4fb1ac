"""Input that is refused in one line, and files that are written whole or not at all."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


class InputError(ValueError):
    """Something that the user gave cannot be used; the message is one line that says what and where."""


ZARR = ".zarr"
"""The suffix of what is a folder of many files, and is read and written as if it were one."""


def readable(path: str | Path) -> Path:
    """Check that a file is there; with the suffix .zarr, a folder.

    Raises:
        InputError: where it is not.
    """
    path = Path(path)
    if not path.exists():
        raise InputError(f"{path}: no such file")
    if path.is_dir() and path.suffix != ZARR:
        raise InputError(f"{path}: is a folder, not a file")
    if path.suffix == ZARR and not path.is_dir():
        raise InputError(f"{path}: is a file, not a folder as Zarr has it")
    return path


@contextmanager
def staged_file(path: str | Path) -> Iterator[Path]:
    """A temporary file beside `path` to write, renamed to it at the end: the file is there whole or not at all.

    With the suffix .zarr, both are folders.

    Raises:
        InputError: at once, where `path` could not be written; later, where the disk refuses.
    """
    path = Path(path)
    if path.suffix == ZARR:
        with _staged_store(path) as store:
            yield store
        return
    if path.exists() and not path.is_file():
        raise InputError(f"{path}: is not a file that could be replaced")
    try:
        handle, name = tempfile.mkstemp(prefix=f".{path.stem}-", suffix=path.suffix, dir=path.parent)
        os.close(handle)
    except OSError as error:
        raise InputError(f"{path}: cannot be written ({error.strerror})") from error
    temporary = Path(name)
    try:
        yield temporary
        temporary.chmod(0o666 & ~_umask())
        temporary.replace(path)
    except OSError as error:
        raise InputError(f"{path}: cannot be written ({error.strerror or first_line(error)})") from error
    finally:
        with suppress(FileNotFoundError):
            temporary.unlink()


@contextmanager
def _staged_store(path: Path) -> Iterator[Path]:
    replaceable = path.is_dir() and ({".zgroup", "zarr.json"} & {file.name for file in path.iterdir()})
    if path.exists() and not replaceable and not _is_empty_folder(path):
        raise InputError(f"{path}: is not a Zarr folder that could be replaced")
    try:
        temporary = Path(tempfile.mkdtemp(prefix=f".{path.stem}-", suffix=ZARR, dir=path.parent))
        old = Path(tempfile.mkdtemp(prefix=f".{path.stem}-", dir=path.parent))
    except OSError as error:
        raise InputError(f"{path}: cannot be written ({error.strerror})") from error
    try:
        yield temporary
        temporary.chmod(0o777 & ~_umask())
        if path.exists():
            path.replace(old / path.name)
        temporary.replace(path)
    except OSError as error:
        raise InputError(f"{path}: cannot be written ({error.strerror or first_line(error)})") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)


def _is_empty_folder(path: Path) -> bool:
    return path.is_dir() and not any(path.iterdir())


@contextmanager
def staged_folder(path: str | Path) -> Iterator[Path]:
    """A temporary folder beside `path` to fill, whose files move to `path` when all is done.

    On an error nothing appears at `path`. Files already there are kept, except those of the same names.

    Raises:
        InputError: at once, where the folder could not be written; at the end, where something is in the way.
    """
    path = Path(path)
    if path.exists() and not path.is_dir():
        raise InputError(f"{path}: is a file, not a folder")
    missing = [folder for folder in path.parents if not folder.exists()]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        stage = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=path if path.exists() else path.parent))
    except OSError as error:
        raise InputError(f"{path}: cannot be written ({error.strerror})") from error
    try:
        yield stage
        files = {file: path / file.relative_to(stage) for file in sorted(stage.rglob("*")) if file.is_file()}
        for target in files.values():
            if target.is_dir() or (target.parent.exists() and not target.parent.is_dir()):
                raise InputError(f"{target}: cannot be written (something else of this name is there)")
        for file, target in files.items():
            target.parent.mkdir(parents=True, exist_ok=True)
            file.replace(target)
    finally:
        shutil.rmtree(stage, ignore_errors=True)
        for folder in missing:
            with suppress(OSError):  # not empty: the results are in it
                folder.rmdir()


def first_line(error: Exception) -> str:
    """The first line of an error's message, or its type where it has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
