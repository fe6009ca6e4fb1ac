"""Networks larger than memory: Dask reads them in chunks, and adds the statistics of the chunks.

Some networks, evenly spaced, are in memory. They determine the range of the law, the layout of the statistics and the
adjustment of the likelihood. All networks determine the posterior: its statistics, and its mode under the uncompressed
law.
"""

import dataclasses
import itertools
from collections.abc import Callable
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
from sdeinfer.likelihood._transitions import Path, used_of
from sdeinfer.observation import validate
from sdeinfer.observation._doubts import first_fault, last_marks, require_different
from sdeinfer.terms import AbstractTerm

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
    return problem.prepare(data, largest_logit)


def _prepared_from_chunks(
    problem: AbstractCovariances, data: xr.Dataset, largest_logit: float, *, leave_out_damaged: bool
) -> Prepared:
    message = "data in chunks (Dask) are for"
    if not isinstance(problem, Networks) or problem.model.needs_networks:
        name = problem.model.name
        raise InputError(f"model: {message} one layer for all networks, as models.full_path, not for {name}; load them")
    if (np.diff(data["layer"].values) != 1).any():
        raise InputError(f"layer: {message} networks of which every layer was observed; load them")
    phase("examining the data")
    sample, networks = examined(data, problem.assumptions.other_terms, leave_out_damaged=leave_out_damaged)
    phase("finding the range of the law")
    times = int(networks.used.any(axis=1).sum()) / sample.sizes["network"]
    sample = validate(sample)
    path, attributes, bounds = range_to_fit(problem, sample, problem.transitions(sample), largest_logit, times)
    path.require_densities()
    # Transitions are used within 1.5 times the range of log e: of normals, the largest of 10⁸ is 1.5 times that of 10⁴.
    layout = path_layout(path, margin=1.5)
    networks = networks.within(bounds, layout, problem)
    phase("preparing the data")
    transitions, kind = int(np.count_nonzero(networks.used)), problem.adjusted_kind
    widths = np.unique(networks.width)
    sums = networks.total(partial(sums_of, layout=layout, widths=widths), "statistics")
    of_all = statistics_of_sums(sums, layout, widths, pattern=path.pattern, assumptions=problem.assumptions)

    def scores(u: np.ndarray) -> Scores:
        assert kind is not None
        return networks.total(partial(scores_of, law=law_at(kind, u, widths=widths)), "exact")

    of_all, times = problem.unadjusted(of_all), transitions / len(path)
    joint = problem.adjusted(path, layout, of_all, times=times, scores=scores)
    statistics = dataclasses.replace(problem.statistics(path, layout, pooled=False), adjustment=joint.adjustment)
    attributes |= {
        "largest_logit": largest_logit,
        "networks": data.sizes["network"],
        "kept_networks": sample.sizes["network"],
        "used_transitions": transitions,
        "left_out": 1 - transitions / networks.used.size,
    }
    attributes |= {"source": str(data.encoding["source"])} if "source" in data.encoding else {}
    attributes |= {"damaged_networks": int(networks.damaged.sum())} if networks.damaged.any() else {}
    return Prepared(joint, statistics, sample, path.used, attributes)


class Chunk:
    """Some successive networks of a Dataset, first to last, read where they are needed."""

    def __init__(self, data: xr.Dataset, first: int, last: int):
        self.first, self.last = first, last
        self.source = f"{data.encoding['source']}: " if "source" in data.encoding else ""
        covariance = data["covariance"].isel(network=slice(first, last)).drop_vars("width", errors="ignore")
        if "network" in covariance.coords and np.array_equal(covariance["network"], np.arange(first, last)):
            covariance = covariance.drop_vars("network")
        self.covariance = covariance

    def read(self) -> Float[np.ndarray, "networks layers m m"]:
        """The covariances."""
        try:
            # On the worker itself, in the thread of the task.
            return np.require(self.covariance.compute(scheduler="synchronous").values, requirements="W")
        except MemoryError:
            raise
        except Exception as error:
            raise InputError(f"{self.source}{self.name} cannot be read ({first_line(error)})") from error

    def inspected(self) -> tuple[np.ndarray, Bool[np.ndarray, " networks"], list[str]]:
        """The covariances, with identities for networks that are damaged; which ones are, and what is wrong if any."""
        try:
            V = self.read()
        except InputError as error:
            identities = np.broadcast_to(np.eye(self.covariance.shape[-1]), self.covariance.shape)
            return identities, np.ones(len(identities), bool), [str(error)]
        faults = [] if first_fault(V) is None else [first_fault(network[None]) for network in V]
        damaged = np.array([fault is not None for fault in faults] or np.zeros(len(V), bool))
        if not damaged.any():
            return V, damaged, []
        V[damaged] = np.eye(V.shape[-1])
        first = int(np.argmax(damaged))
        _, layer, reason = next(fault for fault in faults if fault is not None)
        where = f"network {self._label(first)}, layer {self.covariance['layer'].values[layer]}"
        suffix = f", and {damaged.sum() - 1} more of its chunk, {self.name}" if damaged.sum() > 1 else ""
        return V, damaged, [f"{self.source}covariance: {where}: {reason}{suffix}"]

    @property
    def name(self) -> str:
        """Its networks."""
        return f"networks {self._label(0)} to {self._label(self.last - self.first - 1)}"

    def _label(self, number: int) -> object:
        return self.covariance["network"].values[number] if "network" in self.covariance.coords else self.first + number


def chunks_of(data: xr.Dataset) -> list[Chunk]:
    """The chunks of a Dataset in order."""
    array = data["covariance"]
    assert array.chunks is not None
    ends = np.cumsum([0, *array.chunks[array.dims.index("network")]]).tolist()
    return [Chunk(data, first, last) for first, last in itertools.pairwise(ends)]


@dataclasses.dataclass(frozen=True, eq=False)
class EveryNetwork:
    """The networks of a Dataset in chunks, with the attention pattern and the terms beside the package's."""

    chunks: list[Chunk]
    width: Float[np.ndarray, " networks"]
    used: Bool[np.ndarray, "networks transitions"]
    damaged: Bool[np.ndarray, " networks"]
    pattern: Pattern
    others: tuple[AbstractTerm, ...] = ()

    def within(self, bounds: Range, layout: Layout, problem: Networks) -> "EveryNetwork":
        """The transitions that start in the range of the law, and of the layout."""
        function = partial(_within, bounds=bounds, layout=layout, kinds=problem.measures)
        return dataclasses.replace(self, used=np.concatenate(map_chunks(function, self.parts, name="range")))

    @property
    def parts(self) -> "list[Part]":
        """The used transitions of each chunk."""
        slices = [(chunk, slice(chunk.first, chunk.last)) for chunk in self.chunks]
        return [Part(chunk, self.width[some], self.used[some], self.pattern, self.others) for chunk, some in slices]

    def total[T](self, function: Callable[[Path], T], name: str) -> T:
        """The sum of a function of the used transitions of each chunk that has some, by a tree over their numbers."""
        parts = [part for part in self.parts if part.used.any()]
        return reduce_chunks(lambda part: function(part.read()), parts, added, name=name)


@dataclasses.dataclass(frozen=True, eq=False)
class Part:
    """The used transitions of a chunk, which a worker reads."""

    chunk: Chunk
    width: Float[np.ndarray, " networks"]
    used: Bool[np.ndarray, "networks transitions"]
    pattern: Pattern
    others: tuple[AbstractTerm, ...]

    def read(self) -> Path:
        """The transitions; networks without one, which may be damaged, are identities."""
        shape, wanted = self.chunk.covariance.shape, self.used.any(axis=1)
        V = self.chunk.read() if wanted.any() else np.empty(shape)
        V[~wanted] = np.eye(shape[-1])
        network, layer = np.nonzero(self.used)
        gap = np.ones(shape[1] - 1, int)
        return Path(V, self.width, network, layer, gap, self.pattern, self.others, first=self.chunk.first)


def _within(part: Part, *, bounds: Range, layout: Layout, kinds: set) -> np.ndarray:
    """Which of the used transitions of a part are in the range, and in that of the layout."""
    path, used = part.read(), np.zeros_like(part.used)
    if not len(path):
        return used
    path = path.take(np.flatnonzero(bounds.contains(path, measures_of(path, kinds))))
    path.require_densities()
    for block, e in path.over_blocks(lambda block: (block, path.mixing(block))):
        used[path.network[block], path.layer[block]] = layout.holds(e)
    return used


def examined(
    data: xr.Dataset, others: tuple[AbstractTerm, ...] = (), *, leave_out_damaged: bool = False
) -> tuple[xr.Dataset, EveryNetwork]:
    """Some networks of data in chunks, in memory, and all that are not damaged, by one pass over them."""
    chunks, used, width = chunks_of(data), used_of(data), data["width"].values.astype(np.float64)
    size = 8 * int(np.prod([data.sizes[dim] for dim in ("layer", "token_a", "token_b")]))
    with_some = np.flatnonzero(used.any(axis=1))
    count = min(len(with_some), KEPT, max(1, 2**27 // size))  # 128 MiB
    chosen = with_some[np.linspace(0, len(with_some) - 1, count).round().astype(int)]
    parts = [(chunk, chosen[(chosen >= chunk.first) & (chosen < chunk.last)] - chunk.first) for chunk in chunks]
    of_chunks = map_chunks(_inspected, parts, name="examine")
    damaged, faults, marks, V = (np.concatenate(arrays) for arrays in zip(*of_chunks, strict=True))
    if len(faults) and not leave_out_damaged:
        raise InputError(faults[0] + (f" (and {len(faults) - 1} more such chunks)" if len(faults) > 1 else ""))
    require_different(np.where(damaged, np.uint64(0), marks), np.arange(len(damaged)))
    whole = ~damaged[chosen]
    if not whole.any():
        raise InputError(f"covariance: every network is damaged: {faults[0]}")
    sample = data.drop_vars("covariance").isel(network=chosen[whole])
    sample = sample.assign(covariance=(data["covariance"].dims, V[whole]))
    pattern = Pattern.in_attributes(data.attrs)
    return sample, EveryNetwork(chunks, width, used & ~damaged[:, None], damaged, pattern, others)


def _inspected(part: tuple[Chunk, np.ndarray]) -> tuple[np.ndarray, list[str], np.ndarray, np.ndarray]:
    """Which networks of a chunk are damaged, what is wrong, marks of their last layers, and the chosen networks."""
    chunk, chosen = part
    V, damaged, faults = chunk.inspected()
    return damaged, faults, last_marks(V), V[chosen]
