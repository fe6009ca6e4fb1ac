"""Networks larger than memory: Dask reads them in chunks, and adds the statistics of the chunks.

Some networks, evenly spaced, are in memory. They determine the range of the law, the layout of the statistics and the
adjustment of the likelihood. All networks determine the posterior: its statistics, and its mode under the exact law.
"""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import xarray as xr
from jaxtyping import Bool, Float

from sdeinfer._files import InputError, first_line
from sdeinfer._map_reduce import added, map_chunks, reduce_chunks
from sdeinfer._progress import phase
from sdeinfer.covariance import Pattern
from sdeinfer.infer._covariances import AbstractCovariances
from sdeinfer.infer._innovations import Scores, law_at, scores_of
from sdeinfer.infer._measures import measures_of
from sdeinfer.infer._networks import Networks
from sdeinfer.infer._problem import AbstractProblem, Prepared
from sdeinfer.infer._range import Range, range_to_fit
from sdeinfer.likelihood._reduction import Layout, path_layout, statistics_of_sums, sums_of
from sdeinfer.likelihood._transitions import Path, observed_path, used_of
from sdeinfer.observation._doubts import first_fault, last_marks, require_different
from sdeinfer.terms import AbstractTerm

LEAST = 2**25
"""Size in bytes of float64 up to which neighbouring chunks of a Dataset are read together."""

KEPT = 256
"""Largest number of networks in memory, which a posterior keeps for predictions and checks."""


def prepared_of(
    problem: AbstractProblem, data: xr.Dataset, largest_logit: float, *, leave_out_damaged: bool = False
) -> Prepared:
    """The transitions in the range of the law, reduced; of data backed by Dask, some networks and the sums over all."""
    if isinstance(problem, AbstractCovariances) and data["covariance"].chunks is not None:
        return _prepared_from_chunks(problem, data, largest_logit, leave_out_damaged=leave_out_damaged)
    if leave_out_damaged:
        raise InputError("leave_out_damaged: is for data in chunks (Dask), as of xarray.open_zarr")
    marked, attributes = problem.select(data, largest_logit)
    phase("preparing the data")
    return problem.prepare(marked)._replace(attributes=attributes)


def _prepared_from_chunks(
    problem: AbstractCovariances, data: xr.Dataset, largest_logit: float, *, leave_out_damaged: bool
) -> Prepared:
    what = "data in chunks (Dask) are for"
    if not isinstance(problem, Networks) or problem.model.each:
        name = problem.model.name
        raise InputError(f"model: {what} one layer for all networks, as models.full_path, not for {name}; load them")
    if (np.diff(data["layer"].values) != 1).any():
        raise InputError(f"layer: {what} networks of which every layer was observed; load them")
    phase("examining the data")
    kept, every = examined(data, problem.assumptions.other_terms, leave_out_damaged=leave_out_damaged)
    phase("finding the range of the law")
    times = int(every.used.any(axis=1).sum()) / kept.sizes["network"]
    kept, attributes, found = range_to_fit(problem, kept, largest_logit, times)
    path = observed_path(kept, every.others)
    # Transitions are used within 1.5 times the range of log e: of normals, the largest of 10⁸ is 1.5 times that of 10⁴.
    layout = path_layout(path, margin=1.5)
    every = every.within(found, layout, problem)
    phase("preparing the data")
    transitions, kind = int(np.count_nonzero(every.used)), problem.adjusted_kind
    widths = np.unique(every.width)
    sums = every.total(partial(sums_of, layout=layout, widths=widths), "statistics")
    of_all = statistics_of_sums(sums, layout, widths, pattern=path.pattern, assumptions=problem.assumptions)

    def scores(u: np.ndarray) -> Scores:
        assert kind is not None
        return every.total(partial(scores_of, law=law_at(kind, u, widths=widths)), "exact")

    of_all, times = problem.unadjusted(of_all), transitions / len(path)
    joint = problem.adjusted(path, layout, of_all, times=times, scores=scores)
    each = dataclasses.replace(problem.statistics(path, layout, pooled=False), adjustment=joint.adjustment)
    attributes |= {
        "largest_logit": largest_logit,
        "networks": data.sizes["network"],
        "kept_networks": kept.sizes["network"],
        "used_transitions": transitions,
        "left_out": 1 - transitions / every.used.size,
    }
    attributes |= {"source": str(data.encoding["source"])} if "source" in data.encoding else {}
    attributes |= {"damaged_networks": int(every.damaged.sum())} if every.damaged.any() else {}
    return Prepared(joint, each, kept, attributes)


class Chunk:
    """Some successive networks of a Dataset, read where they are needed.

    Arguments:
        data: the Dataset.
        ends: ends of the chunks of the Dataset that this one holds, as numbers of networks: first, …, last.
    """

    def __init__(self, data: xr.Dataset, ends: Sequence[int]):
        self.first, self.last = ends[0], ends[-1]
        self.ends = [end - self.first for end in ends]
        self.source = f"{data.encoding['source']}: " if "source" in data.encoding else ""
        covariance = data["covariance"].isel(network=slice(self.first, self.last)).drop_vars("width", errors="ignore")
        if "network" in covariance.coords and np.array_equal(covariance["network"], np.arange(self.first, self.last)):
            covariance = covariance.drop_vars("network")
        self.covariance = covariance

    def __len__(self) -> int:
        return self.last - self.first

    def read(self, wanted: Bool[np.ndarray, " networks"]) -> Float[np.ndarray, "networks layers m m"]:
        """The covariances; identities for networks that are not wanted, some of which are not read."""
        V = np.empty(self.covariance.shape, self.covariance.dtype)
        for start, stop in self._pieces():
            if wanted[start:stop].any():
                V[start:stop] = self._read(start, stop)
        V[~wanted] = np.eye(V.shape[-1])
        return V

    def inspected(self) -> tuple[np.ndarray, Bool[np.ndarray, " networks"], list[str]]:
        """The covariances, which networks are damaged, and what is wrong, one line for each piece.

        A damaged network cannot be read, or is no covariance; it is replaced by identities.
        """
        V = np.empty(self.covariance.shape, self.covariance.dtype)
        damaged, faults = np.zeros(len(self), bool), []
        for start, stop in self._pieces():
            try:
                V[start:stop] = self._read(start, stop)
            except InputError as error:
                damaged[start:stop] = True
                faults.append(str(error))
                continue
            if first_fault(V[start:stop]) is not None:
                faults.append(self._examine(V[start:stop], damaged[start:stop], start))
        V[damaged] = np.eye(V.shape[-1])
        return V, damaged, faults

    def _examine(self, V: np.ndarray, damaged: np.ndarray, start: int) -> str:
        """Mark the networks of a piece that are no covariances, and say what is wrong with the first."""
        found = [(number, first_fault(V[number : number + 1])) for number in range(len(V))]
        faults = [(number, fault) for number, fault in found if fault is not None]
        damaged[[number for number, _ in faults]] = True
        number, (_, layer, what) = faults[0]
        where = f"network {self._label(start + number)}, layer {self.covariance['layer'].values[layer]}"
        more = "" if len(faults) == 1 else f", and {len(faults) - 1} more of its chunk, {self._name(start, len(V))}"
        return f"{self.source}covariance: {where}: {what}{more}"

    def _read(self, start: int, stop: int) -> np.ndarray:
        part = self.covariance.isel(network=slice(start, stop))
        try:
            # On the worker itself, in the thread of the task.
            return np.require(part.compute(scheduler="synchronous").values, requirements="W")
        except MemoryError:
            raise
        except Exception as error:
            raise InputError(
                f"{self.source}{self._name(start, stop - start)} cannot be read ({first_line(error)})"
            ) from error

    def _pieces(self) -> list[tuple[int, int]]:
        return list(zip(self.ends[:-1], self.ends[1:], strict=True))

    def _label(self, number: int) -> object:
        return self.covariance["network"].values[number] if "network" in self.covariance.coords else self.first + number

    def _name(self, start: int, count: int) -> str:
        return f"networks {self._label(start)} to {self._label(start + count - 1)}"


def chunks_of(data: xr.Dataset) -> list[Chunk]:
    """The chunks of a Dataset in order, at least `LEAST` bytes each; they depend on its own chunks alone."""
    array = data["covariance"]
    assert array.chunks is not None
    each = 8 * int(np.prod([size for dim, size in array.sizes.items() if dim != "network"]))
    found, ends = [], [0]
    for size in array.chunks[array.dims.index("network")]:
        ends.append(ends[-1] + size)
        if (ends[-1] - ends[0]) * each >= LEAST:
            found.append(ends)
            ends = [ends[-1]]
    if len(ends) > 1:
        found.append(ends)
    return [Chunk(data, own) for own in found]


@dataclasses.dataclass(frozen=True, eq=False)
class EveryNetwork:
    """The networks of a Dataset in chunks, with the attention pattern and the terms beside the package's."""

    chunks: list[Chunk]
    width: Float[np.ndarray, " networks"]
    used: Bool[np.ndarray, "networks transitions"]
    damaged: Bool[np.ndarray, " networks"]
    pattern: Pattern
    others: tuple[AbstractTerm, ...] = ()

    def within(self, found: Range, layout: Layout, problem: Networks) -> "EveryNetwork":
        """The transitions that start in the range of the law, and of the layout."""
        function = partial(_within, found=found, layout=layout, which=problem.measures)
        used = [
            part.unpacked(bits)
            for part, bits in zip(self.parts, map_chunks(function, self.parts, name="range"), strict=True)
        ]
        return dataclasses.replace(self, used=np.concatenate(used))

    @property
    def parts(self) -> "list[Part]":
        """The used transitions of each chunk."""
        return [Part(self, chunk) for chunk in self.chunks]

    def total[T](self, function: Callable[[Path], T], name: str) -> T:
        """The sum of a function of the used transitions of each chunk that has some, by a tree over their numbers."""
        parts = [part for part in self.parts if part.used.any()]
        return reduce_chunks(partial(_of_path, function), parts, added, name=name)


class Part:
    """The used transitions of a chunk, which a worker reads."""

    def __init__(self, every: EveryNetwork, chunk: Chunk):
        own = slice(chunk.first, chunk.last)
        width, self.shape = every.width[own], every.used[own].shape
        self.chunk, self.pattern, self.others = chunk, every.pattern, every.others
        self.used = np.packbits(every.used[own])
        # What workers are sent is small.
        self.width = width[:1] if (width == width[0]).all() else width

    def unpacked(self, bits: np.ndarray) -> Bool[np.ndarray, "networks transitions"]:
        """Marks of the transitions from their bits."""
        return np.unpackbits(bits, count=self.shape[0] * self.shape[1]).astype(bool).reshape(self.shape)

    def read(self) -> Path:
        """The transitions."""
        used = self.unpacked(self.used)
        network, layer = np.nonzero(used)
        V, width = self.chunk.read(used.any(axis=1)), np.broadcast_to(self.width, self.shape[:1])
        gap = np.ones(self.shape[1], int)
        return Path(V, width, network, layer, gap, self.pattern, self.others, first=self.chunk.first)


def _of_path[T](function: Callable[[Path], T], part: Part) -> T:
    return function(part.read())


def _within(part: Part, *, found: Range, layout: Layout, which: set) -> np.ndarray:
    """Bits that say which of the used transitions of a part are in the range, and in that of the layout."""
    path, at_once = part.read(), 1024  # networks, as measures take several times their memory
    pieces = [slice(start, start + at_once) for start in range(0, len(path.width), at_once)]
    measures = (measures_of(path.covariance[some], path.width[some], path.pattern, which) for some in pieces)
    inside = np.concatenate([found.contains(each) for each in measures])
    path = path.take(np.flatnonzero(inside[path.network, path.layer]))
    path.require_densities()
    used = np.zeros(part.shape, bool)
    for block, e in path.over_blocks(lambda block: (block, path.mixing(block))):
        used[path.network[block], path.layer[block]] = layout.holds(e)
    return np.packbits(used)


def examined(
    data: xr.Dataset, others: tuple[AbstractTerm, ...] = (), *, leave_out_damaged: bool = False
) -> tuple[xr.Dataset, EveryNetwork]:
    """Some networks of data in chunks, in memory, and all that are not damaged, by one pass over them."""
    chunks, used, width = chunks_of(data), used_of(data), data["width"].values.astype(np.float64)
    each = 8 * int(np.prod([data.sizes[dim] for dim in ("layer", "token_a", "token_b")]))
    with_some = np.flatnonzero(used.any(axis=1))
    count = min(len(with_some), KEPT, max(1, 2**27 // each))  # 128 MiB
    chosen = with_some[np.linspace(0, len(with_some) - 1, count).round().astype(int)]
    parts = [(chunk, chosen[(chosen >= chunk.first) & (chosen < chunk.last)] - chunk.first) for chunk in chunks]
    of_chunks = map_chunks(_inspected, parts, name="examine")
    damaged, faults, marks, V = (np.concatenate(each) for each in zip(*of_chunks, strict=True))
    if len(faults) and not leave_out_damaged:
        raise InputError(faults[0] + (f" (and {len(faults) - 1} more such chunks)" if len(faults) > 1 else ""))
    require_different(np.where(damaged, np.uint64(0), marks), np.arange(len(damaged)))
    whole = ~damaged[chosen]
    if not whole.any():
        raise InputError(f"covariance: every network is damaged: {faults[0]}")
    kept = data.drop_vars("covariance").isel(network=chosen[whole])
    kept = kept.assign(covariance=(data["covariance"].dims, V[whole]))
    pattern = Pattern.in_attributes(data.attrs)
    return kept, EveryNetwork(chunks, width, used & ~damaged[:, None], damaged, pattern, others)


def _inspected(part: tuple[Chunk, np.ndarray]) -> tuple[np.ndarray, list[str], np.ndarray, np.ndarray]:
    """Which networks of a chunk are damaged, what is wrong, marks of their last layers, and the chosen networks."""
    chunk, chosen = part
    V, damaged, faults = chunk.inspected()
    return damaged, faults, last_marks(V), V[chosen]
