"""Data in chunks on the command line: who reads them."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import sdeinfer as si
from sdeinfer._files import first_line
from sdeinfer.cli._app import phase

if TYPE_CHECKING:
    import xarray as xr

CONNECT = 20
"""Seconds within which a scheduler must answer."""


@contextmanager
def workers_of(workers: int | None, scheduler: str | None) -> Iterator[bool]:
    """Run passes over data on workers of this machine, or of a scheduler; yields whether there are any.

    Arguments:
        workers: number of processes, each with an equal share of the memory; None for none.
        scheduler: address of a Dask scheduler; None for none.
    """
    if workers is None and scheduler is None:
        yield False
        return
    if workers is not None and scheduler is not None:
        raise si.InputError("--workers: starts processes here, --scheduler uses those of a cluster; omit one")
    from sdeinfer.observation import library

    distributed = library("distributed", "dask")
    phase("starting workers" if scheduler is None else "connecting to the scheduler")
    try:
        if scheduler is None:
            client = distributed.Client(n_workers=workers, threads_per_worker=1, dashboard_address="127.0.0.1:0")
        else:
            client = distributed.Client(scheduler, timeout=CONNECT)
    except (OSError, ValueError) as error:
        raise si.InputError(f"--scheduler: {scheduler} does not answer ({first_line(error)})") from error
    with client:
        yield True


@contextmanager
def observed_in(data: Path, workers: int | None, scheduler: str | None) -> Iterator["xr.Dataset"]:
    """The data of a fit: in memory, or in chunks for workers."""
    from sdeinfer.observation import open_in_chunks

    if workers is None and scheduler is None:
        yield si.read(data)
        return
    opened = open_in_chunks(data)
    with workers_of(workers, scheduler):
        yield opened
