"""The first pass over data in chunks: which networks are damaged, and where transitions start."""

from functools import partial
from typing import NamedTuple

import numpy as np
import xarray as xr
from jaxtyping import Bool, Float, UInt64

from sdeinfer._files import InputError
from sdeinfer._map_reduce import in_parts, map_chunks
from sdeinfer.covariance import Pattern, singular
from sdeinfer.infer._range import attention_growth, logit_spread, relu_growth
from sdeinfer.infer._reduce import form_of
from sdeinfer.likelihood import (
    ATTENTION_GROWTH,
    GROWTH,
    LARGEST,
    SINGULAR,
    SPREAD,
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
from sdeinfer.observation import Chunk, chunks_of, last_marks, refuse, require_different

KEPT, KEPT_BYTES = 256, 2**27
"""Largest number of networks, and of bytes, that a posterior of data in chunks keeps, for predictions and checks."""

COMPARED = 16
"""Number of networks of which a part of a job compares its data with those of other parts."""

DAMAGED = "damaged_networks"
"""Attribute of a posterior: the number of networks that were damaged and left out."""


def require_one_layer(model: AbstractModel, data: xr.Dataset, assumptions: Assumptions, *, compressed: bool) -> None:
    """Check that a model can be fitted to data in chunks.

    Raises:
        InputError: unless the model is one of a single layer for networks observed at every layer.
    """
    what = "data in chunks (Dask) are for"
    if not isinstance(model, EveryLayer) or not compressed:
        raise InputError(f"model: {what} models.full_path, compressed; load the data, as data.load()")
    if not form_of(model, data.sizes["network"], data.sizes["token_a"], assumptions).pooled:
        raise InputError(f"model: {what} one layer for all networks, which {model.name} has not; load the data")
    if (np.diff(data["layer"].values) != 1).any():
        raise InputError(f"layer: {what} networks of which every layer was observed; load the data")


def survey(data: xr.Dataset, *, spreads: bool, leave_out_damaged: bool) -> xr.Dataset:
    """Examine data in chunks, in one pass.

    Arguments:
        data: the observed networks.
        spreads: whether the model has attention, so that the spreads of the logits are needed.
        leave_out_damaged: leave out networks that cannot be read or are no covariances.

    Returns:
        The covariances, still in chunks, with the variables `used`, `SINGULAR`, `LARGEST`, `GROWTH` and, if asked for,
        `SPREAD` and `ATTENTION_GROWTH`, in memory: 14 or 30 bytes for each transition. The attribute `DAMAGED` counts
        the networks that were left out.

    Raises:
        InputError: for damaged networks, unless they are left out, and for a network that was recorded twice.
    """
    function = partial(_survey, pattern=Pattern.in_attributes(data.attrs), spreads=spreads)
    parts = [_Labelled(chunk, data) for chunk in chunks_of(data)]
    found = map_chunks(function, parts, name="survey")
    if not leave_out_damaged:
        refuse([fault for each in found for fault in each.faults])
    damaged, marks = (np.concatenate([getattr(each, name) for each in found]) for name in ("damaged", "marks"))
    require_different(np.where(damaged, np.uint64(0), marks), np.arange(len(damaged)))
    _require_marks(data, marks, damaged)
    if damaged.all():
        raise InputError(f"covariance: every network is damaged: {found[0].faults[0]}")
    used = used_of(data) & ~damaged[:, None]
    examined = with_used(data[["covariance"]], used)
    for name in (SINGULAR, LARGEST, GROWTH, *([SPREAD, ATTENTION_GROWTH] if spreads else [])):
        whole = np.concatenate([getattr(each, name) for each in found])
        examined = examined.assign({name: (("network", "layer"), _with_last(whole))})
    return examined.assign_attrs({DAMAGED: int(damaged.sum())} if damaged.any() else {})


def _require_marks(data: xr.Dataset, marks: UInt64[np.ndarray, " networks"], damaged: Bool[np.ndarray, " networks"]):
    """Check some networks against their marks, which other parts of a job may have read from other data."""
    sound = np.flatnonzero(~damaged)
    if not in_parts() or not len(sound):
        return
    for number in sound[np.linspace(0, len(sound) - 1, COMPARED).round().astype(int)]:
        V = data["covariance"].isel(network=[number]).compute(scheduler="synchronous").values
        if last_marks(V) != marks[number]:
            raise InputError(
                f"covariance: network {number} is not the one of which the folder holds a part: parts of other data "
                "are there; remove them"
            )


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
    counts = {"networks": data.sizes["network"], "used_transitions": int(np.count_nonzero(used_of(data)))}
    source = {"source": str(data.encoding["source"])} if "source" in data.encoding else {}
    return {**counts, "kept_networks": kept.sizes["network"], **source}


class Surveyed(NamedTuple):
    """What one chunk holds, see `survey`."""

    damaged: Bool[np.ndarray, " networks"]
    faults: tuple[str, ...]
    marks: UInt64[np.ndarray, " networks"]
    singular: Bool[np.ndarray, "networks transitions"]
    largest_variance: Float[np.ndarray, "networks transitions"]
    relu_growth: Float[np.ndarray, "networks transitions"]
    logit_spread: Float[np.ndarray, "networks transitions"] | None
    attention_growth: Float[np.ndarray, "networks transitions"] | None


class _Labelled:
    """A chunk with its networks' widths."""

    def __init__(self, chunk: Chunk, data: xr.Dataset):
        self.chunk, self.width = chunk, repeated_once(data["width"].values[chunk.first : chunk.last])


def _survey(part: _Labelled, *, pattern: Pattern, spreads: bool) -> Surveyed:
    V, damaged, faults = part.chunk.inspected()
    starts = V[:, :-1]
    width = part.width[:, None]
    of_attention = (
        (logit_spread(starts, width, pattern), attention_growth(starts, width, pattern)) if spreads else (None, None)
    )
    flat = np.stack([singular(starts[:, layer]) for layer in range(starts.shape[1])], axis=1)
    growth = relu_growth(starts, width)
    return Surveyed(damaged, faults, last_marks(V), flat, largest_variances(V[:, 1:]), growth, *of_attention)


def _with_last(values: np.ndarray) -> np.ndarray:
    """Values over transitions as values over layers."""
    return np.concatenate([values, np.zeros_like(values[:, :1])], axis=1)
