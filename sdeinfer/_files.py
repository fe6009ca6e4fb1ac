"""One-line errors for unusable input, and files that are written completely or not at all."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


class InputError(ValueError):
    """Unusable input from the user; the message is one line that says what is wrong and where."""


ZARR = ".zarr"
"""The suffix of a Zarr store: a folder of many files that is read and written like one file."""


def readable(path: str | Path) -> Path:
    """A path, checked to be a file; with the suffix .zarr, a folder."""
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
    """Yield a path in a temporary folder beside `path`; what is written there moves to `path` at the end, whole.

    With the suffix .zarr, both are folders. It is an InputError if `path` cannot be written.
    """
    path = Path(path)
    if path.exists() and not _is_replaceable(path):
        kind = "Zarr folder" if path.suffix == ZARR else "file"
        raise InputError(f"{path}: is not a {kind} that could be replaced")
    with _written(path), _folder_beside(path, path.parent) as name:
        folder = Path(name)
        temporary = folder / path.name
        if path.suffix == ZARR:
            temporary.mkdir()
        yield temporary
        if path.is_dir():
            path.replace(folder / "old")
        temporary.replace(path)


def write_text(path: str | Path, text: str) -> None:
    """Write a text file, see `staged_file`."""
    with staged_file(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


@contextmanager
def staged_folder(path: str | Path) -> Iterator[Path]:
    """Yield a temporary folder beside `path`, whose files move to `path` at the end; on an error none do.

    Existing files are kept, except those with the same names. It is an InputError if `path` cannot be written.
    """
    path = Path(path)
    if path.exists() and not path.is_dir():
        raise InputError(f"{path}: is a file, not a folder")
    missing = [folder for folder in path.parents if not folder.exists()]
    try:
        with _written(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            folder = _folder_beside(path, path if path.exists() else path.parent)
        with folder as name:
            yield (stage := Path(name))
            files = {file: path / file.relative_to(stage) for file in sorted(stage.rglob("*")) if file.is_file()}
            for target in files.values():
                if target.is_dir() or (target.parent.exists() and not target.parent.is_dir()):
                    raise InputError(f"{target}: cannot be written (something else of this name is there)")
            for file, target in files.items():
                target.parent.mkdir(parents=True, exist_ok=True)
                file.replace(target)
    finally:
        for empty in missing:
            with suppress(OSError):  # not empty: it holds the results
                empty.rmdir()


def first_line(error: Exception) -> str:
    """The first line of an error's message, or its type if the message is empty."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


@contextmanager
def _written(path: Path) -> Iterator[None]:
    """An `InputError` that names the path where it cannot be written."""
    try:
        yield
    except OSError as error:
        raise InputError(f"{path}: cannot be written ({error.strerror or first_line(error)})") from error


def _folder_beside(path: Path, parent: Path) -> tempfile.TemporaryDirectory:
    """A hidden temporary folder, made at once."""
    return tempfile.TemporaryDirectory(prefix=f".{path.stem}-", dir=parent, ignore_cleanup_errors=True)


def _is_replaceable(path: Path) -> bool:
    if path.suffix != ZARR:
        return path.is_file()
    files = {file.name for file in path.iterdir()} if path.is_dir() else {""}
    return not files or bool(files & {".zgroup", "zarr.json"})
