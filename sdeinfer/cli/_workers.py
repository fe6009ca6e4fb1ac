"""Workers of Dask, which read and write data in chunks."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated

import typer

import sdeinfer as si
from sdeinfer._files import first_line
from sdeinfer.cli._app import phase

CONNECT = 20
"""Seconds within which a scheduler must answer."""


@dataclass(frozen=True, kw_only=True)
class Workers:
    """Flags for workers: new ones of this machine, each with an equal share of the memory, or those of a scheduler."""

    workers: Annotated[
        int | None,
        typer.Option(help="pass over Zarr in chunks, by this number of processes (needs sdeinfer[dask])", min=1),
    ] = None
    scheduler: Annotated[
        str | None, typer.Option(help="pass over Zarr in chunks, by the workers of the Dask scheduler at this address")
    ] = None

    def __bool__(self) -> bool:
        return self.workers is not None or self.scheduler is not None


@contextmanager
def at_work(flags: Workers) -> Iterator[bool]:
    """Run passes over data on the workers; yields whether there are any."""
    if not flags:
        yield False
        return
    if flags.workers is not None and flags.scheduler is not None:
        raise si.InputError("--workers: starts processes here, --scheduler uses those of a cluster; omit one")
    distributed = si.observation.library("distributed", "dask")
    phase("starting workers" if flags.scheduler is None else "connecting to the scheduler")
    try:
        if flags.scheduler is None:
            client = distributed.Client(n_workers=flags.workers, threads_per_worker=1, dashboard_address="127.0.0.1:0")
        else:
            client = distributed.Client(flags.scheduler, timeout=CONNECT)
    except (OSError, ValueError) as error:
        raise si.InputError(f"--scheduler: {flags.scheduler} does not answer ({first_line(error)})") from error
    with client:
        yield True
