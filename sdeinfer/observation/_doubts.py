"""Doubts whether hidden states and covariances are observations of independent networks.

Rounding, networks in the place of layers; no covariance at all, or one that was recorded twice.
"""

import hashlib
import math
from collections.abc import Sequence

import ml_dtypes
import numpy as np
import xarray as xr
from jaxtyping import Float, UInt64

from sdeinfer._files import InputError
from sdeinfer.covariance._matrix import covariance_fault


class LowPrecisionWarning(UserWarning):
    """The rounding of hidden states is not small against the change from layer to layer."""


def spacing_of(dtype: np.dtype) -> float:
    """The spacing above 1 of a type's numbers if it is coarser than that of float32, otherwise 0."""
    spacing = 0.0 if dtype.kind in "iu" else float(ml_dtypes.finfo(dtype).eps)
    return spacing if spacing > np.finfo(np.float32).eps else 0.0


def rounding_share(covariances: Sequence[np.ndarray] | np.ndarray, *, width: float, spacing: float) -> float:
    """The ratio of rounding to the change between layers, both as root mean squares with equal weight for all pairs.

    A type with unit roundoff u stores x as x(1 + δ), |δ| ≤ u; over many powers of two E[(xδ)²] = σ²E[x²] with
    σ² = (2 ln 2/9) u². For nearly Gaussian features this adds to V_αβ an error of variance 2σ² (V_αα V_ββ + 2V_αβ²)/n,
    twice that on the diagonal, and to a difference of two layers twice as much; its mean σ²V_αα cancels there.
    """
    if spacing == 0:
        return 0.0
    variance = 2 * math.log(2) / 9 * (spacing / 2) ** 2
    rounded = changed = 0.0
    for V, after in zip(covariances[:-1], covariances[1:], strict=True):
        diagonal = np.diagonal(V, axis1=-2, axis2=-1)
        with np.errstate(divide="ignore", invalid="ignore"):
            scale = 1 / (diagonal[..., :, None] * diagonal[..., None, :])
            terms = (1 + 2 * V**2 * scale) * (1 + np.eye(V.shape[-1]))
            changes = (after - V) ** 2 * scale
        # A token of norm 0 has no relative error.
        finite = np.isfinite(scale)
        rounded += 4 * variance / width * np.sum(terms, where=finite)
        changed += np.sum(changes, where=finite)
    return math.sqrt(rounded / changed) if changed > 0 else math.inf


def require_layers(states: Sequence[np.ndarray], shape: tuple[int, ...]) -> None:
    """Check that networks and layers are in their places: layers are like their neighbours, networks differ."""
    X = np.stack(states)
    if min(X.shape[:2]) < 2:
        return
    same = (X[1:] == X[:1]).all(axis=(0, *range(2, X.ndim)))
    # Networks may start from the same tokens, and are the same at layer 0.
    along_layers, along_networks = _changes(X).mean(), _changes(X[1:].swapaxes(0, 1)).max()
    if (same[0] and not same.all()) or 0 < along_networks < 0.5 * along_layers:
        raise InputError(
            f"hidden_states: read as layers {shape}, but states are closer along the networks than along the layers: "
            "one array (networks, layers, tokens, width), or a list of layers (networks, tokens, width), is needed"
        )


def _changes(X: Float[np.ndarray, "..."]) -> Float[np.ndarray, "..."]:
    """1 − cos of neighbours, the mean over tokens; those that are zero do not count."""
    before, after = X[:-1], X[1:]
    norms = np.linalg.norm(before, axis=-1) * np.linalg.norm(after, axis=-1)
    cosines = (before * after).sum(axis=-1) / np.where(norms > 0, norms, 1.0)
    axes = tuple(range(1, cosines.ndim))
    return 1 - cosines.sum(axis=axes) / np.maximum((norms > 0).sum(axis=axes), 1)


def first_fault(V: Float[np.ndarray, "networks layers m m"]) -> tuple[int, int, str] | None:
    """The first network and layer with a fault, and the fault; None without one."""
    # Layer by layer, because the temporaries of a check are larger than its input.
    for layer in range(V.shape[1]):
        fault = covariance_fault(V[:, layer])
        if fault is not None:
            return fault[0][0], layer, fault[1]
        zero = ~(np.abs(V[:, layer]) >= np.finfo(V.dtype).tiny).any(axis=(-2, -1))
        if zero.any():
            reason = "the covariance is zero: the hidden states are, or are so small that XXᵀ/n is"
            return int(np.argmax(zero)), layer, reason
    same = np.stack([(V[:, i] == V[:, i + 1]).all(axis=(-2, -1)) for i in range(V.shape[1] - 1)], axis=1)
    if same.any():
        network, layer = map(int, np.argwhere(same)[0])
        if same.shape[1] > 1 and same[network].all():
            reason = (
                "the covariance is the same after every layer: networks are in the place of layers, or these layers do "
                "nothing; the axes are (networks, layers, tokens, …)"
            )
        else:
            reason = (
                "the covariance of the next layer is the same: a layer was recorded twice, as by two hooks; keep one "
                "of each, as by data.isel(layer=slice(None, None, 2))"
            )
        return network, layer, reason
    return None


def require_changing_norms(data: xr.Dataset) -> None:
    """Check that the covariances are not those of normalised tokens, of which no law of shaped networks holds."""
    squares = np.diagonal(data["covariance"].values, axis1=-2, axis2=-1)
    constant = (np.ptp(squares, axis=1) <= 1e-6 * squares.max(axis=1)).all(axis=-1)  # up to the rounding of float32
    if constant.any():
        raise InputError(
            f"covariance: network {labels_of(data)[int(np.argmax(constant))]}: no token changes its norm in any layer: "
            "these are correlations, or states after a normalisation; the covariances XXᵀ/n of the residual stream are "
            "needed"
        )


def last_marks(V: Float[np.ndarray, "networks layers m m"]) -> UInt64[np.ndarray, " networks"]:
    """Hashes of the last covariance of each network; 0 where it has so few bits that two may agree by chance."""
    tokens, last = V.shape[-1], np.ascontiguousarray(V[:, -1])
    if (np.finfo(V.dtype).nmant + 1) * tokens * (tokens + 1) // 2 < 48:
        return np.zeros(len(V), np.uint64)
    digests = (hashlib.blake2b(covariance.tobytes(), digest_size=8).digest() for covariance in last)
    return np.frombuffer(b"".join(digests), np.uint64)


def require_different(marks: UInt64[np.ndarray, " networks"], labels: np.ndarray) -> None:
    """Check that no two networks have one covariance at their last layer."""
    order = np.argsort(marks, kind="stable")
    same = (np.diff(marks[order]) == 0) & (marks[order][1:] > 0)
    if same.any():
        network, twin = np.sort(order[int(np.argmax(same)) :][:2])
        network, twin = (labels[network], labels[twin]) if labels[network] != labels[twin] else (network, twin)
        raise InputError(
            f"covariance: networks {network} and {twin}: the same covariance after the last layer, so that one network "
            "was recorded twice; every network needs weights of its own"
        )


def labels_of(data: xr.Dataset) -> np.ndarray:
    """Labels of the networks: their coordinate, or their numbers, also where parts that are joined repeat labels."""
    index = data.indexes.get("network")
    return np.arange(data.sizes["network"]) if index is None or not index.is_unique else data["network"].values
