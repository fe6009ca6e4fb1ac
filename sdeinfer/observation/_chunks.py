"""Data larger than memory: Datasets backed by Dask, whose covariances are read one chunk of networks at a time."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import xarray as xr
from jaxtyping import Bool, Float

from sdeinfer._files import InputError, first_line
from sdeinfer._map_reduce import map_chunks
from sdeinfer.observation._faults import first_fault, last_marks, require_different

LEAST = 2**25
"""Size in bytes of float64 up to which neighbouring chunks of a Dataset are read together."""


class Inspected(NamedTuple):
    """Covariances of a chunk, and which networks are damaged.

    Attributes:
        covariance: V, shape (networks, layers, m, m); identities for damaged networks.
        damaged: whether each network cannot be read, or is no covariance; shape (networks,).
        faults: what is wrong, one line for each range of networks.
    """

    covariance: Float[np.ndarray, "networks layers m m"]
    damaged: Bool[np.ndarray, " networks"]
    faults: tuple[str, ...]


class Chunk:
    """Some successive networks of a Dataset, read where they are needed.

    Arguments:
        data: the Dataset.
        ends: ends of the chunks of the Dataset that this one holds, as numbers of networks: first, …, last.
    """

    def __init__(self, data: xr.Dataset, ends: Sequence[int]):
        self.first, self.last = ends[0], ends[-1]
        self.ends = [end - self.first for end in ends]
        self.source = str(data.encoding.get("source", "covariance"))
        kept = data[["covariance"]].isel(network=slice(self.first, self.last))
        covariance = kept["covariance"].drop_vars("width", errors="ignore")
        if "network" in covariance.coords and np.array_equal(covariance["network"], np.arange(self.first, self.last)):
            covariance = covariance.drop_vars("network")
        self.covariance = covariance

    def __len__(self) -> int:
        return self.last - self.first

    def read(self, wanted: Bool[np.ndarray, " networks"] | None = None) -> Float[np.ndarray, "networks layers m m"]:
        """The covariances; of networks that are not wanted, they may be left out as NaN.

        Raises:
            InputError: if they cannot be read.
        """
        if wanted is None or wanted.all():
            return self._read(0, len(self))
        V = np.full(self.covariance.shape, np.nan, self.covariance.dtype)
        for start, stop in self._pieces():
            if wanted[start:stop].any():
                V[start:stop] = self._read(start, stop)
        return V

    def inspected(self) -> Inspected:
        """The covariances, with damaged ones named."""
        damaged, faults = np.zeros(len(self), bool), []
        try:
            V = self._read(0, len(self))
        except InputError:
            V = np.empty(self.covariance.shape, self.covariance.dtype)
            for start, stop in self._pieces():
                try:
                    V[start:stop] = self._read(start, stop)
                except InputError as error:
                    damaged[start:stop] = True
                    faults.append(str(error))
        V[damaged] = np.eye(V.shape[-1])
        for start, stop in self._pieces():
            if first_fault(V[start:stop]) is not None:
                faults += self._examine(V[start:stop], damaged[start:stop], start)
        return Inspected(V, damaged, tuple(faults))

    def _examine(self, V: np.ndarray, damaged: np.ndarray, start: int) -> list[str]:
        """Find the networks of a piece that are no covariances; replaces and marks them in place."""
        faults = []
        for number in range(len(V)):
            fault = first_fault(V[number : number + 1])
            if fault is not None:
                damaged[number], V[number] = True, np.eye(V.shape[-1])
                faults.append((number, fault))
        number, (_, layer, what) = faults[0]
        where = f"network {self._labels(start + number)}, layer {self.covariance['layer'].values[layer]}"
        more = "" if len(faults) == 1 else f", and {len(faults) - 1} more of its chunk, {self._name(start, len(V))}"
        return [f"{self.source}: covariance: {where}: {what}{more}"]

    def _read(self, start: int, stop: int) -> np.ndarray:
        part = self.covariance.isel(network=slice(start, stop))
        try:
            # On the worker itself, in the thread of the task.
            return np.require(part.compute(scheduler="synchronous").values, requirements="W")
        except MemoryError:
            raise
        except Exception as error:
            raise InputError(
                f"{self.source}: {self._name(start, stop - start)} cannot be read ({first_line(error)})"
            ) from error

    def _pieces(self) -> list[tuple[int, int]]:
        return list(zip(self.ends[:-1], self.ends[1:], strict=True))

    def _labels(self, number: int) -> object:
        return self.covariance["network"].values[number] if "network" in self.covariance.coords else self.first + number

    def _name(self, start: int, count: int) -> str:
        return f"networks {self._labels(start)} to {self._labels(start + count - 1)}"


def in_chunks(data: xr.Dataset) -> bool:
    """Whether covariances are backed by Dask, so that they are read in chunks."""
    return data["covariance"].chunks is not None


def chunks_of(data: xr.Dataset) -> list[Chunk]:
    """The chunks of a Dataset in order, at least `LEAST` bytes each; they depend on its own chunks alone."""
    array = data["covariance"]
    assert array.chunks is not None
    each = 8 * int(np.prod([size for dim, size in array.sizes.items() if dim != "network"]))
    sizes = array.chunks[array.dims.index("network")]
    found, ends = [], [0]
    for size in sizes:
        ends.append(ends[-1] + size)
        if (ends[-1] - ends[0]) * each >= LEAST:
            found.append(ends)
            ends = [ends[-1]]
    if len(ends) > 1:
        found.append(ends)
    return [Chunk(data, own) for own in found]


def require_undamaged(data: xr.Dataset) -> None:
    """Check every covariance of a Dataset in chunks.

    Raises:
        InputError: naming the networks that cannot be read, are no covariances, or were recorded twice.
    """
    found = map_chunks(_faults_and_marks, chunks_of(data), name="validate")
    refuse([fault for faults, _ in found for fault in faults])
    require_different(np.concatenate([marks for _, marks in found]), np.arange(data.sizes["network"]))


def refuse(faults: Sequence[str]) -> None:
    """Raise an InputError for the first fault, if there is one."""
    if faults:
        more = f" (and {len(faults) - 1} more such chunks)" if len(faults) > 1 else ""
        raise InputError(faults[0] + more)


def require_loaded(data: xr.Dataset, where: str) -> None:
    """Check that data are in memory.

    Raises:
        InputError: if they are in chunks.
    """
    if "covariance" in data and in_chunks(data):
        raise InputError(
            f"{where}: data in chunks (Dask) are for fit with models.full_path; load them, or some networks, as "
            " data.isel(network=slice(1000)).load()"
        )


def _faults_and_marks(chunk: Chunk) -> tuple[tuple[str, ...], np.ndarray]:
    V, _, faults = chunk.inspected()
    return faults, last_marks(V)
