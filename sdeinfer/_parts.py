"""Passes over chunks of data by the parts of a job array, which meet in a folder instead of a scheduler.

Every part runs the same fit up to its sampler. In each pass over the data it computes the results of its share of the
chunks and writes them to a file; once the files of all parts are there, it reads them and goes on. Passes that only
pick some transitions cost little: the first part that comes to one computes all of it.
"""

import functools
import hashlib
import io
import pickle
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import xarray as xr

from sdeinfer._files import InputError, first_line, staged_file

WHOLE = ("gather",)
"""Names of the passes that are not divided among the parts."""

POLL = 0.5
"""Seconds between looks for the files of other parts."""


class Unfinished(Exception):
    """A pass lacks the files of other parts."""


class Parts:
    """The passes of one part of a job array, or of the merge of all parts.

    Arguments:
        folder: folder of the files, which is made.
        part: number of this part, 1 to `parts`; None to merge.
        parts: number of parts; None to read it from the files.
        wait: seconds to wait for other parts in each pass.
    """

    def __init__(self, folder: Path, part: int | None, parts: int | None, *, wait: float = 0.0):
        self.folder, self.part, self.wait, self.passes = folder, part, wait, 0
        if part is not None:
            folder.mkdir(parents=True, exist_ok=True)
        elif not folder.is_dir():
            raise InputError(f"{folder}: no such folder; `sdeinfer reduce` makes it")
        self.parts = _parts_in(folder) if parts is None else parts

    def results(self, name: str, tasks: Sequence[Callable[[], Any]]) -> list[Any]:
        """The results of the tasks of one pass, by all parts.

        Raises:
            Unfinished: if files of other parts are missing.
            InputError: if a file is damaged, or belongs to other data, settings or parts.
        """
        self.passes += 1
        mark = f"{_fingerprint(name, tasks)} {'' if name in WHOLE else self.parts}"
        shares = [np.arange(len(tasks))] if name in WHOLE else np.array_split(np.arange(len(tasks)), self.parts)
        files = [self._file(name, number) for number in range(1, len(shares) + 1)]
        own = 1 if name in WHOLE else self.part
        if own is not None and not files[own - 1].exists():
            _save(files[own - 1], mark, [tasks[int(number)]() for number in shares[own - 1]])
        waited = time.monotonic() + self.wait
        while missing := [number for number, file in enumerate(files, start=1) if not file.exists()]:
            if time.monotonic() > waited:
                raise Unfinished(
                    f"pass {self.passes} ({name}) lacks part {', '.join(map(str, missing))} of {self.parts}"
                )
            time.sleep(POLL)
        return [result for file in files for result in _load(file, mark)]

    def _file(self, name: str, number: int) -> Path:
        of = "" if name in WHOLE else f"_{number}_of_{self.parts}"
        return self.folder / f"pass_{self.passes:02d}_{name.replace(' ', '_')}{of}.part"


def _parts_in(folder: Path) -> int:
    found = {file.stem.rpartition("_of_")[2] for file in folder.glob("*_of_*.part")}
    if len(found) != 1 or not (number := found.pop()).isdecimal():
        what = f"parts of different numbers, {', '.join(sorted(found))}" if len(found) > 1 else "no parts"
        raise InputError(f"{folder}: holds {what}; `sdeinfer reduce --part i/N` makes them, for one N")
    return int(number)


def _save(path: Path, mark: str, results: list[Any]) -> None:
    with staged_file(path) as temporary:
        temporary.write_bytes(pickle.dumps((mark, results)))


def _load(path: Path, mark: str) -> list[Any]:
    try:
        found, results = _Results(io.BytesIO(path.read_bytes())).load()
    except Exception as error:
        raise InputError(f"{path}: is damaged ({first_line(error)}); remove it and run its part again") from error
    if found != mark:
        raise InputError(f"{path}: is of other data, settings, versions or machines; remove it and run its part again")
    return results


class _Results(pickle.Unpickler):
    """Reads arrays and tuples, and nothing that could run code."""

    def find_class(self, module: str, name: str) -> Any:
        allowed = module.startswith("numpy") and name in ("_reconstruct", "ndarray", "dtype", "scalar", "_frombuffer")
        if not allowed and (module, name) not in {
            ("sdeinfer.infer._survey", "Surveyed"),
            ("sdeinfer.infer._exact", "Exact"),
        }:
            raise pickle.UnpicklingError(f"{module}.{name} is not a result")
        return super().find_class(module, name)


def _fingerprint(name: str, tasks: Sequence[Any]) -> str:
    """Hash of what the results of a pass depend on, but the covariances themselves."""
    digest = hashlib.sha256(name.encode())
    for task in tasks:
        _add(digest, task)
    return digest.hexdigest()


def _add(digest: Any, value: Any) -> None:
    """Add a value to a hash: arrays by their bytes, objects by their attributes, functions by their names."""
    if isinstance(value, np.ndarray | np.generic | jax.Array):
        array = np.asarray(value)
        digest.update(f"{array.dtype}{array.shape}".encode())
        digest.update(repr(array).encode() if array.dtype == object else array.tobytes())
    elif isinstance(value, xr.DataArray):
        digest.update(f"{value.name}{value.dtype}{value.shape}{value.dims}".encode())
        for coordinate in sorted(map(str, value.coords)):
            _add(digest, value.coords[coordinate].values)
    elif isinstance(value, functools.partial):
        _add(digest, (value.func, value.args, value.keywords))
    elif isinstance(value, dict):
        _add(digest, sorted(value.items()))
    elif isinstance(value, list | tuple):
        digest.update(f"{len(value)}:".encode())
        for each in value:
            _add(digest, each)
    elif hasattr(value, "__qualname__"):
        digest.update(value.__qualname__.encode())
    elif type(value).__module__.startswith("sdeinfer") and hasattr(value, "__dict__"):
        own = {name: each for name, each in vars(value).items() if name != "source"}
        _add(digest, (type(value).__qualname__, own))
    else:
        digest.update(repr(value).encode())
