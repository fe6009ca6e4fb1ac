"""One-line errors for unusable input, and files that are written completely or not at all."""

import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


class InputError(ValueError):
    """Unusable input from the user; the message is one line that says what is wrong and where."""


ZARR = ".zarr"
"""The suffix of a Zarr store: a folder of many files that is read and written like one file."""


def readable(path: str | Path) -> Path:
    """Check that a file exists; with the suffix .zarr, a folder.

    Raises:
        InputError: if it does not.
    """
    path = Path(path)
    if not path.exists():
        raise InputError(f"{path}: no such file")
    if path.is_dir() and path.suffix != ZARR:
        raise InputError(f"{path}: is a folder, not a file")
    if path.suffix == ZARR and not path.is_dir():
        raise InputError(f"{path}: is a file, not a Zarr folder")
    return path


@contextmanager
def staged_file(path: str | Path) -> Iterator[Path]:
    """Yield a temporary file beside `path` and rename it to `path` at the end, so that no partial file appears.

    With the suffix .zarr, both are folders.

    Raises:
        InputError: at the start if `path` cannot be written; later if writing fails.
    """
    path = Path(path)
    if path.suffix == ZARR:
        with _staged_store(path) as store:
            yield store
        return
    if path.exists() and not path.is_file():
        raise InputError(f"{path}: is not a file that could be replaced")
    temporary = _beside(path)
    try:
        # With the permissions of the user's new files, where `tempfile` would make private ones.
        os.close(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
    except OSError as error:
        raise InputError(f"{path}: cannot be written ({error.strerror})") from error
    try:
        yield temporary
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
    temporary = _beside(path)
    try:
        temporary.mkdir()
        old = Path(tempfile.mkdtemp(prefix=f".{path.stem}-", dir=path.parent))
    except OSError as error:
        raise InputError(f"{path}: cannot be written ({error.strerror})") from error
    try:
        yield temporary
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
    """Yield a temporary folder beside `path`, whose files move to `path` at the end.

    On an error nothing appears at `path`. Existing files are kept, except those with the same names.

    Raises:
        InputError: at the start if the folder cannot be written; at the end if a folder has the name of a file.
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
            with suppress(OSError):  # not empty: it holds the results
                folder.rmdir()


def first_line(error: Exception) -> str:
    """The first line of an error's message, or its type if the message is empty."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _beside(path: Path) -> Path:
    """A hidden path beside another, of the same type, that does not exist yet."""
    return path.with_name(f".{path.stem}-{secrets.token_hex(4)}{path.suffix}")
