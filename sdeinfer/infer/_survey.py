"""The first pass over data in chunks: which networks are damaged, and where transitions start."""

from functools import partial
from typing import NamedTuple

import numpy as np
import xarray as xr
from jaxtyping import Bool, UInt64

from sdeinfer._files import InputError
from sdeinfer._map_reduce import map_chunks
from sdeinfer._progress import phase
from sdeinfer.covariance import Pattern, singular
from sdeinfer.infer._measures import Measures, measures_of, names_of, with_measures
from sdeinfer.infer._reduce import form_of
from sdeinfer.layers import Architecture
from sdeinfer.likelihood import (
    LARGEST,
    SINGULAR,
    USED,
    AbstractModel,
    Assumptions,
    EveryLayer,
    gathered_networks,
    largest_variances,
    repeated_once,
    used_of,
    with_used,
)
from sdeinfer.observation import Chunk, chunks_of, in_chunks, last_marks, refuse, require_different

KEPT, KEPT_BYTES = 256, 2**27
"""Largest number of networks, and of bytes, that a posterior of data in chunks keeps, for predictions and checks."""

DAMAGED = "damaged_networks"
"""Attribute of a posterior: the number of networks that were damaged and left out."""


def examined(
    model: AbstractModel,
    data: xr.Dataset,
    assumptions: Assumptions,
    kind: Architecture | None,
    *,
    leave_out_damaged: bool = False,
) -> xr.Dataset:
    """Data in chunks after a first pass over them; data in memory unchanged, which `assume` has validated.

    Raises:
        InputError: for data in chunks unless the model is one of a single layer for networks observed at every layer;
            and as `survey`.
    """
    if not in_chunks(data):
        if leave_out_damaged:
            raise InputError("leave_out_damaged: is for data in chunks (Dask), as of xarray.open_zarr")
        return data
    phase("examining the data")
    what = "data in chunks (Dask) are for"
    if not isinstance(model, EveryLayer):
        raise InputError(f"model: {what} models.full_path; load the data, as data.load()")
    if not form_of(model, data.sizes["network"], data.sizes["token_a"], assumptions).pooled:
        raise InputError(f"model: {what} one layer for all networks, which {model.name} has not; load the data")
    if (np.diff(data["layer"].values) != 1).any():
        raise InputError(f"layer: {what} networks of which every layer was observed; load the data")
    return survey(data, names_of(kind), leave_out_damaged=leave_out_damaged)


def survey(data: xr.Dataset, names: set[str], *, leave_out_damaged: bool) -> xr.Dataset:
    """Examine data in chunks, in one pass.

    Arguments:
        data: the observed networks.
        names: the measures that the range of the law needs, see `measures_of`.
        leave_out_damaged: leave out networks that cannot be read or are no covariances.

    Returns:
        The covariances, still in chunks, with the variables `used`, `SINGULAR`, `LARGEST` and the measures, in memory:
        6 to 30 bytes for each transition. The attribute `DAMAGED` counts the networks that were left out.

    Raises:
        InputError: for damaged networks, unless they are left out, and for a network that was recorded twice.
    """
    function = partial(_survey, pattern=Pattern.in_attributes(data.attrs), names=names)
    found = map_chunks(function, [_Labelled(chunk, data) for chunk in chunks_of(data)], name="survey")
    if not leave_out_damaged:
        refuse([fault for each in found for fault in each.faults])
    damaged, marks = (np.concatenate([getattr(each, name) for each in found]) for name in ("damaged", "marks"))
    require_different(np.where(damaged, np.uint64(0), marks), np.arange(len(damaged)))
    if damaged.all():
        raise InputError(f"covariance: every network is damaged: {found[0].faults[0]}")
    measures = {name: np.concatenate([each.measures[name] for each in found]) for name in found[0].measures}
    result = with_measures(with_used(data[["covariance"]], used_of(data) & ~damaged[:, None]), measures)
    return result.assign_attrs({DAMAGED: int(damaged.sum())} if damaged.any() else {})


def kept_networks(data: xr.Dataset) -> xr.Dataset:
    """Some of the networks of data in chunks, in memory: evenly spaced ones among those with used transitions."""
    each = 8 * int(np.prod([data.sizes[dim] for dim in ("layer", "token_a", "token_b")]))
    with_some = np.flatnonzero(used_of(data).any(axis=1))
    count = min(len(with_some), KEPT, max(1, KEPT_BYTES // each))
    chosen = with_some[np.linspace(0, len(with_some) - 1, count).round().astype(int)]
    V = gathered_networks(tuple(chunks_of(data)), chosen, None)
    kept = data.drop_vars("covariance").isel(network=chosen)
    return kept.assign(covariance=(data["covariance"].dims, V))[["covariance", USED]]


def attributes_of_chunks(data: xr.Dataset, kept: xr.Dataset) -> dict[str, int | str]:
    """Attributes of the posterior of data in chunks: how many networks and transitions there are, and where."""
    if not in_chunks(data):
        return {}
    counts = {"networks": data.sizes["network"], "used_transitions": int(np.count_nonzero(used_of(data)))}
    source = {"source": str(data.encoding["source"])} if "source" in data.encoding else {}
    return {**counts, "kept_networks": kept.sizes["network"], **source}


class Surveyed(NamedTuple):
    """What one chunk holds, see `survey`."""

    damaged: Bool[np.ndarray, " networks"]
    faults: tuple[str, ...]
    marks: UInt64[np.ndarray, " networks"]
    measures: Measures


class _Labelled:
    """A chunk with its networks' widths."""

    def __init__(self, chunk: Chunk, data: xr.Dataset):
        self.chunk, self.width = chunk, repeated_once(data["width"].values[chunk.first : chunk.last])


def _survey(part: _Labelled, *, pattern: Pattern, names: set[str]) -> Surveyed:
    V, damaged, faults = part.chunk.inspected()
    measures = measures_of(V[:, :-1], part.width[:, None], pattern, names)
    measures[SINGULAR] = np.stack([singular(V[:, layer]) for layer in range(V.shape[1] - 1)], axis=1)
    measures[LARGEST] = largest_variances(V[:, 1:])
    return Surveyed(damaged, faults, last_marks(V), measures)
