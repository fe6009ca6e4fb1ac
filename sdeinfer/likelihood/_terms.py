"""The data terms of the likelihood of transitions."""

import hashlib
import math
import threading
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import numpy as np
from jaxtyping import Float, Int

from sdeinfer.covariance import EVERY_TOKEN, Pattern, PatternSpectrum, Spectrum, coordinates, pairs, vech
from sdeinfer.layers import drift_terms, variance_terms
from sdeinfer.terms import AbstractTerm

REMEMBERED = 2**28
"""Bytes of terms that are kept."""

_TERMS: dict[bytes, "Terms"] = {}
_LOCK = threading.Lock()

ENTRIES = 2**17
"""Bound on the number of entries of the largest arrays (m³ per transition) computed at a time, to fit in a cache."""


class Terms(eqx.Module):
    """One-layer transitions V → V + dV in the spectral coordinates of V (see `covariance.Spectrum`, `PatternSpectrum`).

    Divided by √(h (1 + [i = j])), the p entries of dV in these coordinates are independent normals under the Euler
    chain of every architecture: z ~ N(θ₁ b₁ + θ₂ b₂, a + κ² e). See `FiniteWidth` for the corrections at finite width.

    Attributes:
        increments: z, shape (..., p).
        drift: b₁, b₂, … of `layers.drift_terms`, in the coordinates of z; shape (..., drifts, p).
        mixing: e, shape (..., p).
        variance: f of `layers.variance_terms`, shape (..., features, p).
        log_jacobian: log |∂z/∂dV|, to convert densities of z to densities of V; shape (...).
    """

    increments: Float[Any, "... p"]
    drift: Float[Any, "... drifts p"]
    mixing: Float[Any, "... p"]
    variance: Float[Any, "... features p"]
    log_jacobian: Float[Any, "..."]


def terms_of(
    V: Float[Any, "transitions m m"],
    after: Float[Any, "transitions m m"],
    h: Float[Any, " transitions"],
    *,
    pattern: Pattern = EVERY_TOKEN,
    others: tuple[AbstractTerm, ...] = (),
) -> Terms:
    """Terms of transitions from V to `after` over steps h; NumPy handles NumPy arrays, JAX differentiates."""
    xp, (rows, columns) = V.__array_namespace__(), pairs(V.shape[-1])
    root, step = np.where(rows == columns, math.sqrt(2), 1.0).astype(V.dtype), xp.sqrt(h)[:, None]
    at, drift = coordinates(V, pattern), drift_terms(V, pattern, others)
    moved = vech(at.whiten(xp.concatenate([(after - V)[None], drift]))) / root
    return Terms(
        increments=moved[0] / step,
        drift=(moved[1:] * step).swapaxes(0, 1),
        mixing=at.mixing,
        variance=variance_terms(V, at, drift, pattern).swapaxes(0, 1),
        log_jacobian=-(V.shape[-1] + 1) * at.log_volume - xp.log(root * step).sum(axis=1),
    )


def increments_of(
    at: Spectrum | PatternSpectrum,
    which: Int[np.ndarray, " draws"],
    dV: Float[np.ndarray, "draws m m"],
    width: Float[np.ndarray, " draws"],
) -> Float[np.ndarray, "draws p"]:
    """The increments z of `Terms` for changes dV by one layer, in the coordinates of the starts with these indices."""
    rows, columns = pairs(dV.shape[-1])
    chosen = jax.tree.map(lambda x: x[which], at)
    return vech(chosen.whiten(dV)) * np.sqrt(width[:, None] / np.where(rows == columns, 2.0, 1.0))


def remembered_terms(
    V: Float[np.ndarray, "transitions m m"],
    after: Float[np.ndarray, "transitions m m"],
    h: Float[np.ndarray, " transitions"],
    *,
    pattern: Pattern,
    others: tuple[AbstractTerm, ...] = (),
) -> Terms:
    """`terms_of` data with an attention pattern or many tokens, from the last `REMEMBERED` bytes of them.

    A fit and its check pass over the same data some ten times. A pass costs O(m⁴) per transition, and with a pattern
    O(p³).
    """
    key = hashlib.blake2b(b"".join(np.ascontiguousarray(x).tobytes() for x in (V, after, h)))
    key.update(repr((pattern, others, V.shape, V.dtype)).encode())
    with _LOCK:
        found = _TERMS.pop(key.digest(), None)
    found = terms_of(V, after, h, pattern=pattern, others=others) if found is None else found
    with _LOCK:
        _TERMS[key.digest()] = found
        while len(_TERMS) > 1 and sum(x.nbytes for terms in _TERMS.values() for x in vars(terms).values()) > REMEMBERED:
            _TERMS.pop(next(iter(_TERMS)))
    return found


def next_order_terms(V: Float[np.ndarray, "transitions m m"]) -> tuple[np.ndarray, np.ndarray]:
    """Drift terms beyond the limit and variance features of V."""
    drift = drift_terms(V)
    return drift[2:].swapaxes(0, 1), variance_terms(V, coordinates(V), drift).swapaxes(0, 1)


def in_blocks[T](function: Callable[..., T], V: Float[np.ndarray, "transitions m m"], *more: np.ndarray) -> T:
    """Apply a function to blocks of V and the other arrays, and concatenate the results."""
    size = max(1, ENTRIES // V.shape[-1] ** 3)
    # Callers raise an error that names the network if terms overflow.
    with np.errstate(all="ignore"):
        parts = [function(*(x[start : start + size] for x in (V, *more))) for start in range(0, len(V), size)]
    return parts[0] if len(parts) == 1 else jax.tree.map(lambda *each: np.concatenate(each), *parts)
