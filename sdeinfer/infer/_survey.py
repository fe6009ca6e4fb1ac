"""The first pass over data in chunks: which networks are damaged, and where transitions start."""

from functools import partial
from typing import NamedTuple

import numpy as np
import xarray as xr
from jaxtyping import Bool, UInt64

from sdeinfer._files import InputError
from sdeinfer._map_reduce import map_chunks
from sdeinfer.covariance import Pattern, singular
from sdeinfer.infer._measures import Measures, measures_of, with_measures
from sdeinfer.likelihood import (
    LARGEST,
    SINGULAR,
    USED,
    gathered_networks,
    largest_variances,
    repeated_once,
    used_of,
    with_used,
)
from sdeinfer.observation import Chunk, chunks_of, last_marks, refuse, require_different

KEPT, KEPT_BYTES = 256, 2**27
"""Largest number of networks, and of bytes, that a posterior of data in chunks keeps, for predictions and checks."""

DAMAGED = "damaged_networks"
"""Attribute of a posterior: the number of networks that were damaged and left out."""


def survey(data: xr.Dataset, names: set[str], *, leave_out_damaged: bool) -> xr.Dataset:
    """Examine data in chunks, in one pass, with the measures of these names, which the range of the law needs.

    Returns:
        The covariances, still in chunks, with the variables `used`, `SINGULAR`, `LARGEST` and the measures, in memory:
        6 to 30 bytes for each transition. The attribute `DAMAGED` counts the networks that were left out.

    Raises:
        InputError: for networks that cannot be read or are no covariances, unless they are left out, and for a network
            that was recorded twice.
    """
    function = partial(_survey, pattern=Pattern.in_attributes(data.attrs), names=names)
    widths = data["width"].values
    parts = [(chunk, repeated_once(widths[chunk.first : chunk.last])) for chunk in chunks_of(data)]
    found = map_chunks(function, parts, name="survey")
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


class Surveyed(NamedTuple):
    """The measures and marks of one chunk, see `survey`."""

    damaged: Bool[np.ndarray, " networks"]
    faults: tuple[str, ...]
    marks: UInt64[np.ndarray, " networks"]
    measures: Measures


def _survey(part: tuple[Chunk, np.ndarray], *, pattern: Pattern, names: set[str]) -> Surveyed:
    """Examine a chunk, given the widths of its networks."""
    chunk, width = part
    V, damaged, faults = chunk.inspected()
    measures = measures_of(V[:, :-1], width[:, None], pattern, names)
    measures[SINGULAR] = np.stack([singular(V[:, layer]) for layer in range(V.shape[1] - 1)], axis=1)
    measures[LARGEST] = largest_variances(V[:, 1:])
    return Surveyed(damaged, faults, last_marks(V), measures)
