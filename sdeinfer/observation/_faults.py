"""Faults of covariances as observations of independent networks: no covariance at all, or one recorded twice."""

import hashlib

import numpy as np
import xarray as xr
from jaxtyping import Float, UInt64

from sdeinfer._files import InputError
from sdeinfer.covariance._matrix import covariance_fault


def first_fault(V: Float[np.ndarray, "networks layers m m"]) -> tuple[int, int, str] | None:
    """The first network and layer with a fault, and the fault; None without one."""
    # Layer by layer, because the temporaries of a check are larger than its input.
    for layer in range(V.shape[1]):
        fault = covariance_fault(V[:, layer])
        if fault is not None:
            return fault[0][0], layer, fault[1]
        zero = ~(np.abs(V[:, layer]) >= np.finfo(V.dtype).tiny).any(axis=(-2, -1))
        if zero.any():
            what = "the covariance is zero: the hidden states are, or are so small that XXᵀ/n is"
            return int(np.argmax(zero)), layer, what
    same = np.stack([(V[:, i] == V[:, i + 1]).all(axis=(-2, -1)) for i in range(V.shape[1] - 1)], axis=1)
    if same.any():
        network, layer = map(int, np.argwhere(same)[0])
        if same.shape[1] > 1 and same[network].all():
            what = (
                "the covariance is the same after every layer: networks are in the place of layers, or these layers do "
                "nothing; the axes are (networks, layers, tokens, …)"
            )
        else:
            what = (
                "the covariance of the next layer is the same: a layer was recorded twice, as by two hooks; keep one "
                "of each, as by data.isel(layer=slice(None, None, 2))"
            )
        return network, layer, what
    squares = np.diagonal(V, axis1=-2, axis2=-1)
    constant = (np.ptp(squares, axis=1) <= 1e-6 * squares.max(axis=1)).all(axis=-1)  # up to the rounding of float32
    if constant.any():
        what = (
            "no token changes its norm in any layer: these are correlations, or states after a normalisation; the "
            "covariances XXᵀ/n of the residual stream are needed"
        )
        return int(np.argmax(constant)), 0, what
    return None


def last_marks(V: Float[np.ndarray, "networks layers m m"]) -> UInt64[np.ndarray, " networks"]:
    """Hashes of the last covariance of each network; 0 where it has so few bits that two may agree by chance."""
    tokens, last = V.shape[-1], np.ascontiguousarray(V[:, -1])
    if (np.finfo(V.dtype).nmant + 1) * tokens * (tokens + 1) // 2 < 48:
        return np.zeros(len(V), np.uint64)
    digests = (hashlib.blake2b(each.tobytes(), digest_size=8).digest() for each in last)
    return np.frombuffer(b"".join(digests), np.uint64)


def require_different(marks: UInt64[np.ndarray, " networks"], labels: np.ndarray) -> None:
    """Check that no two networks have one covariance at their last layer."""
    order = np.argsort(marks, kind="stable")
    same = (np.diff(marks[order]) == 0) & (marks[order][1:] > 0)
    if same.any():
        one, other = np.sort(order[int(np.argmax(same)) :][:2])
        one, other = (labels[one], labels[other]) if labels[one] != labels[other] else (one, other)
        raise InputError(
            f"covariance: networks {one} and {other}: the same covariance after the last layer, so that one network "
            "was recorded twice; every network needs weights of its own"
        )


def labels_of(data: xr.Dataset) -> np.ndarray:
    """Labels of the networks: their coordinate, or their numbers."""
    return data["network"].values if "network" in data.coords else np.arange(data.sizes["network"])
