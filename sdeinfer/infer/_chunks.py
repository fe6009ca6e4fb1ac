"""Networks larger than memory: Dask reads them in chunks, and adds the statistics of the chunks.

Some networks, evenly spaced, are in memory. They determine the range of the law, the layout of the statistics and the
adjustment of the likelihood. All networks determine the posterior: its statistics, and its mode under the uncompressed
law.
"""

import dataclasses
import functools
import itertools
from collections.abc import Iterable
from functools import partial

import jax
import numpy as np
import xarray as xr
from jaxtyping import Bool, Float, UInt64

from sdeinfer._files import InputError, first_line
from sdeinfer._map_chunks import map_chunks
from sdeinfer._progress import phase
from sdeinfer.covariance import Pattern
from sdeinfer.infer._covariances import AbstractCovariances
from sdeinfer.infer._innovations import LawAt, Scores, law_at, scores_of
from sdeinfer.infer._measures import Measure, measures_of
from sdeinfer.infer._networks import SAMPLED_TRANSITIONS, Networks
from sdeinfer.infer._problem import AbstractProblem, Prepared
from sdeinfer.infer._range import Range, range_to_fit
from sdeinfer.likelihood._reduction import Layout, Sums, path_layout, statistics_of_sums, sums_of
from sdeinfer.likelihood._transitions import Path, used_of, with_used
from sdeinfer.observation._doubts import first_fault, labels_of, last_marks, require_different
from sdeinfer.terms import AbstractTerm

NETWORKS_IN_MEMORY = 256
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
    message, others = "data in chunks (Dask) are for", problem.assumptions.other_terms
    if not isinstance(problem, Networks) or problem.model.needs_networks:
        name = problem.model.name
        raise InputError(f"model: {message} one layer for all networks, as models.full_path, not for {name}; load them")
    if (np.diff(data["layer"].values) != 1).any():
        raise InputError(f"layer: {message} networks of which every layer was observed; load them")
    phase("examining the data")
    data, damaged = examined(data, leave_out_damaged=leave_out_damaged)
    sample, chunks = some_of(data), [chunk for chunk in chunks_of(data) if used_of(chunk).any()]
    phase("finding the range of the law")
    networks_per_sample = int(used_of(data).any(axis=1).sum()) / sample.sizes["network"]
    path, attributes, bounds = range_to_fit(
        problem, sample, problem.transitions(sample), largest_logit, networks_per_sample
    )
    path.require_densities()
    # Transitions are used within 1.5 times the range of log e: of normals, the largest of 10⁸ is 1.5 times that of 10⁴.
    layout, widths = path_layout(path, margin=1.5), np.unique(data["width"].values.astype(np.float64))
    phase("preparing the data")
    summed = partial(_summed, others=others, bounds=bounds, layout=layout, widths=widths, kinds=problem.measures)
    inside, sums = zip(*map_chunks(summed, chunks, name="statistics"), strict=True)
    of_all = statistics_of_sums(_total(sums), layout, widths, pattern=path.pattern, assumptions=problem.assumptions)
    chunks = [with_used(chunk, used) for chunk, used in zip(chunks, inside, strict=True) if used.any()]
    transitions, kind = sum(int(used.sum()) for used in inside), problem.adjusted_kind

    def scores(u: np.ndarray) -> Scores:
        assert kind is not None
        law = law_at(kind, u, widths=widths)
        return _total(map_chunks(partial(_scores, others=others, law=law), chunks, name="exact"))

    some = path.thinned(SAMPLED_TRANSITIONS)
    joint = problem.adjusted_by(
        problem.with_identity_adjustment(of_all), some, scores, data_per_sample=transitions / len(some)
    )
    statistics = dataclasses.replace(problem.statistics(path, layout, pooled=False), adjustment=joint.adjustment)
    attributes |= {
        "largest_logit": largest_logit,
        "networks": data.sizes["network"],
        "kept_networks": sample.sizes["network"],
        "used_transitions": transitions,
        "left_out": 1 - transitions / used_of(data).size,
    }
    attributes |= {"source": str(data.encoding["source"])} if "source" in data.encoding else {}
    attributes |= {"damaged_networks": damaged} if damaged else {}
    return Prepared(joint, statistics, sample, path.used, attributes)


def _total[T](sums: Iterable[T]) -> T:
    """The sum of trees of arrays, in the order of the chunks, so that its bits do not depend on the workers."""
    return functools.reduce(partial(jax.tree.map, np.add), sums)


def chunks_of(data: xr.Dataset) -> list[xr.Dataset]:
    """The chunks of a Dataset in order; all but the covariances is in memory, and networks have their `number`."""
    labels, arrays = labels_of(data), {"width": data["width"].values, "number": np.arange(data.sizes["network"])}
    coords = {name: ("network", array) for name, array in arrays.items()}
    data = with_used(data[["covariance"]].reset_coords(drop=True), used_of(data))
    data = data.assign_coords({"network": labels, **coords})
    ends = itertools.accumulate(data.chunksizes["network"], initial=0)
    return [data.isel(network=slice(first, last)) for first, last in itertools.pairwise(ends)]


def examined(data: xr.Dataset, *, leave_out_damaged: bool) -> tuple[xr.Dataset, int]:
    """The data, without the transitions of networks that are damaged, and how many are; by a pass over the chunks."""
    of_chunks = map_chunks(_examined, chunks_of(data), name="examine")
    damaged, faults, marks = (np.concatenate(arrays) for arrays in zip(*of_chunks, strict=True))
    used = used_of(data) & ~damaged[:, None]
    if len(faults) and not (leave_out_damaged and used.any()):
        raise InputError(faults[0] + (f" (and {len(faults) - 1} more such chunks)" if len(faults) > 1 else ""))
    require_different(marks, np.arange(len(marks)))
    return with_used(data, used), int(damaged.sum())


def some_of(data: xr.Dataset) -> xr.Dataset:
    """Some of the networks with used transitions, evenly spaced, in memory."""
    networks = np.flatnonzero(used_of(data).any(axis=1))
    size = 8 * int(np.prod([data.sizes[dim] for dim in ("layer", "token_a", "token_b")]))
    count = min(len(networks), NETWORKS_IN_MEMORY, max(1, 2**27 // size))  # 128 MiB
    return data.isel(network=networks[np.linspace(0, len(networks) - 1, count).round().astype(int)]).compute()


def _examined(chunk: xr.Dataset) -> tuple[Bool[np.ndarray, " networks"], list[str], UInt64[np.ndarray, " networks"]]:
    """Which networks of a chunk are damaged, what is wrong, and marks of the last layers of the others."""
    try:
        V, message = _read(chunk), ""
    except InputError as error:
        V, message = np.full(chunk["covariance"].shape, np.nan), str(error)
    fault, marks = first_fault(V), last_marks(V)
    if fault is None:
        return np.zeros(len(V), bool), [], marks
    damaged = np.array([first_fault(network[None]) is not None for network in V])
    network, layer = chunk["network"].values[fault[0]], chunk["layer"].values[fault[1]]
    more = f", and {damaged.sum() - 1} more of its chunk, {_name(chunk)}" if damaged.sum() > 1 else ""
    message = message or f"{_source(chunk)}covariance: network {network}, layer {layer}: {fault[2]}{more}"
    return damaged, [message], np.where(damaged, np.uint64(0), marks)


def _read(chunk: xr.Dataset) -> Float[np.ndarray, "networks layers m m"]:
    """The covariances of a chunk."""
    try:
        # On the worker itself, in the thread of the task.
        return chunk["covariance"].compute(scheduler="synchronous").values
    except MemoryError:
        raise
    except Exception as error:
        raise InputError(f"{_source(chunk)}{_name(chunk)} cannot be read ({first_line(error)})") from error


def _name(chunk: xr.Dataset) -> str:
    return "networks {} to {}".format(*chunk["network"].values[[0, -1]])


def _source(chunk: xr.Dataset) -> str:
    return f"{chunk.encoding['source']}: " if "source" in chunk.encoding else ""


def _path(chunk: xr.Dataset, others: tuple[AbstractTerm, ...]) -> Path:
    """The used transitions of a chunk; networks without one, which may be damaged, are identities."""
    V, used = _read(chunk), used_of(chunk)
    V = np.where(used.any(axis=1)[:, None, None, None], V, np.eye(V.shape[-1], dtype=V.dtype))
    width, gap = chunk["width"].values.astype(np.float64), np.ones(V.shape[1] - 1, int)
    pattern, first = Pattern.in_attributes(chunk.attrs), int(chunk["number"][0])
    network, layer = np.nonzero(used)
    return Path(V, width, network, layer, gap, pattern, others, first=first)


def _summed(
    chunk: xr.Dataset,
    *,
    others: tuple[AbstractTerm, ...],
    bounds: Range,
    layout: Layout,
    widths: Float[np.ndarray, " widths"],
    kinds: set[Measure],
) -> tuple[Bool[np.ndarray, "networks transitions"], Sums]:
    """The used transitions of a chunk in the range and in that of the layout, and the sums over them."""
    path = _path(chunk, others)
    path = path.take(np.flatnonzero(bounds.contains(path, measures_of(path, kinds))))
    path.require_densities()
    held = [layout.holds(e) for e in path.over_blocks(path.mixing)]
    path = path.take(np.flatnonzero(np.concatenate([*held, np.zeros(0, bool)])))
    return path.used, sums_of(path, layout=layout, widths=widths)


def _scores(chunk: xr.Dataset, *, others: tuple[AbstractTerm, ...], law: LawAt) -> Scores:
    return scores_of(_path(chunk, others), law)
