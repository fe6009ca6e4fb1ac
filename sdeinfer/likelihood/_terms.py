"""The data terms of the likelihood of transitions, and their means and variances by the law of a layer of width n.

Tests: `tests/likelihood/test_transitions.py`.
"""

import collections
import hashlib
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from sdeinfer.covariance import Pattern, coordinates
from sdeinfer.covariance._diffusion import Spectrum
from sdeinfer.covariance._matrix import engine, pairs, reciprocal, vech
from sdeinfer.covariance._pattern import EVERY_TOKEN
from sdeinfer.covariance._pattern_noise import PatternSpectrum
from sdeinfer.layers import AbstractLayer, FiniteWidth, Limit
from sdeinfer.layers._finite_width import VARIANCE_FEATURES, drift_terms, variance_terms
from sdeinfer.terms import AbstractTerm

REMEMBERED: collections.OrderedDict[bytes, "Terms"] = collections.OrderedDict()
"""Terms of the last blocks of transitions: those of 1,024 transitions of 8 tokens with a causal mask take 9 s, and a
fit and its check pass over them ten times."""

TERM_ENTRIES = 2**17
"""Bound on the number of entries of the largest arrays that are computed at a time (m³ per transition), and of those
that are reduced (m(m + 1)/2), to fit in a cache."""


class Terms(eqx.Module):
    """One-layer transitions V → V + dV in the spectral coordinates of V (see `covariance.Spectrum`, `PatternSpectrum`).

    Divided by √(h (1 + [i = j])), the p entries of dV in these coordinates are independent normals under the Euler
    chain of every architecture: z ~ N(θ₁ b₁ + θ₂ b₂, a + κ² e). See `FiniteWidth` for the corrections at finite width.
    The fields are z, the b of `layers.drift_terms`, e, the f of `layers.variance_terms`, and log |∂z/∂dV|.
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
    spectrum, drift = coordinates(V, pattern), drift_terms(V, pattern, others)
    moved = vech(spectrum.whiten(xp.concatenate([(after - V)[None], drift]))) / root
    return Terms(
        increments=moved[0] / step,
        drift=(moved[1:] * step).swapaxes(0, 1),
        mixing=spectrum.mixing,
        variance=variance_terms(V, spectrum, drift, pattern).swapaxes(0, 1),
        log_jacobian=-(V.shape[-1] + 1) * spectrum.log_volume - xp.log(root * step).sum(axis=1),
    )


def increments_of(
    spectrum: Spectrum | PatternSpectrum,
    indices: Int[np.ndarray, " draws"],
    dV: Float[np.ndarray, "draws m m"],
    width: Float[np.ndarray, " draws"],
) -> Float[np.ndarray, "draws p"]:
    """The increments z of `Terms` for changes dV by one layer, in the coordinates of the starts with these indices."""
    rows, columns = pairs(dV.shape[-1])
    chosen = jax.tree.map(lambda x: x[indices], spectrum)
    return vech(chosen.whiten(dV)) * np.sqrt(width[:, None] / np.where(rows == columns, 2.0, 1.0))


def remembered_terms(
    V: Float[np.ndarray, "transitions m m"],
    after: Float[np.ndarray, "transitions m m"],
    h: Float[np.ndarray, " transitions"],
    *,
    pattern: Pattern,
    others: tuple[AbstractTerm, ...] = (),
) -> Terms:
    """`terms_of` data with an attention pattern or many tokens, remembered."""
    hashed = hashlib.blake2b(b"".join(np.ascontiguousarray(x).tobytes() for x in (V, after, h)))
    hashed.update(repr((pattern, others, V.shape, V.dtype)).encode())
    key = hashed.digest()
    terms = REMEMBERED.pop(key, None)
    REMEMBERED[key] = terms_of(V, after, h, pattern=pattern, others=others) if terms is None else terms
    while len(REMEMBERED) > 32:  # of at most 12 MB each, see `Path.blocks`
        REMEMBERED.popitem(last=False)
    return REMEMBERED[key]


def over_covariances[T](function: Callable[..., T], V: Float[np.ndarray, "transitions m m"], *arrays: np.ndarray) -> T:
    """Apply a function to blocks of V and the other arrays, and concatenate the results."""
    size = max(1, TERM_ENTRIES // V.shape[-1] ** 3)
    # Callers raise an error that names the network if terms overflow.
    with np.errstate(all="ignore"):
        parts = [function(*(x[start : start + size] for x in (V, *arrays))) for start in range(0, len(V), size)]
    return parts[0] if len(parts) == 1 else jax.tree.map(lambda *leaves: np.concatenate(leaves), *parts)


class Moments(eqx.Module):
    """z_p ~ N(Σ_s θ_s b_s, v), with v = noise + mixing · e + Σ_k (w_k + w′_k e)(f_k − f̄_k), for each pair p.

    The contributions of the means f̄ are part of `noise` and `mixing`; the fields `variance` and `variance_mixing` are w
    and w′. Every field may have leading axes.
    """

    drift: Float[Any, "... drifts"]
    noise: Float[Any, "... p"]
    mixing: Float[Any, "... p"]
    variance: Float[Any, "... features"]
    variance_mixing: Float[Any, "... features"]

    def at(self, width: np.ndarray) -> "Moments":
        """The moments at an array of indices into the leading axis of widths."""
        return jax.tree.map(lambda x: x[width], self)

    def mean_and_variance(self, terms: Terms) -> tuple[Float[Any, "... p"], Float[Any, "... p"]]:
        """Mean and variance of each increment, by moments of features with f̄ = 0."""
        mean = (self.drift[..., None] * terms.drift).sum(axis=-2)
        common = self.noise + self.mixing * terms.mixing
        weight = self.variance[..., None] + self.variance_mixing[..., None] * terms.mixing[..., None, :]
        own = (weight * terms.variance).sum(axis=-2)
        return mean, common * at_least_a_quarter(own / common)


def moments_of(law: FiniteWidth, centre: Float[Any, "features p"] | None = None) -> Moments:
    """The moments by a law, with its leading axes, for features f − f̄ of means f̄ = `centre`, or f̄ = 0.

    In the tails of the prior, where the expansion in 1/n fails, negative feature means could make v negative; their
    reduction is bounded by half of the limit's variance.
    """
    limit = law.limit
    centre = np.zeros((len(VARIANCE_FEATURES), 1)) if centre is None else centre
    return Moments(
        drift=law.drift,
        noise=_raised(limit.linear_noise, law.variance[..., None] * centre),
        mixing=_raised(limit.attention_noise, law.variance_mixing[..., None] * centre),
        variance=law.variance,
        variance_mixing=law.variance_mixing,
    )


def at_least_a_quarter(change: Any) -> Any:
    """1 + x for x ≥ −½, where the expansion in 1/n holds; for smaller x a function above ¼, with one derivative."""
    xp = change.__array_namespace__()
    below = xp.minimum(change + 0.5, xp.zeros_like(change))
    return xp.maximum(1 + change, xp.full_like(change, 0.5)) - 0.25 + 0.25 * xp.exp(4 * below)


def bounded(x: Any) -> Any:
    """(1 + x⁴)^{−1/4}: x times this factor is at most 1, and equals x for small x up to a relative x⁴/4."""
    return _bounded(x) if isinstance(x, jax.Array) else (1 + x**4) ** -0.25


@jax.custom_jvp
def _bounded(x: Array) -> Array:
    return jax.lax.rsqrt(jnp.sqrt(1 + (x * x) ** 2))


@_bounded.defjvp
def _bounded_jvp(primals: tuple[Any], tangents: tuple[Any]) -> tuple[Array, Array]:
    (x,), (dx,) = primals, tangents
    y = _bounded(x)
    # x y is at most 1 where x³ overflows.
    return y, -((x * y) ** 3) * (y * y) * dx


def _raised(base: Float[Any, "..."], features: Float[Any, "... features p"]) -> Float[Any, "... p"]:
    """Sum of base and features, where negative features subtract at most half of the base."""
    xp, base = engine(base, features), base[..., None]
    above = xp.maximum(features, 0.0).sum(axis=-2)
    below = -xp.minimum(features, 0.0).sum(axis=-2)
    present = base > 0
    inverse = reciprocal(xp.where(present, base / 2, 1.0))
    return base + above - xp.where(present, below * bounded(below * inverse), 0.0)


def of_limits(limit: Limit, widths: int) -> FiniteWidth:
    """A limit, whose coefficients are scalars or of each width, as the law of every width."""
    return FiniteWidth.of_limit(jax.tree.map(lambda x: engine(x).broadcast_to(x, widths), limit))


def laws_on_host(
    kind: AbstractLayer, u: Float[np.ndarray, "points coordinates"], widths: Float[np.ndarray, " widths"], law: str
) -> FiniteWidth:
    """The laws of a layer at points of its coordinates, by NumPy in float64; the leading axes are of points and widths.

    Of a kind with formulas for JAX alone they are computed operation by operation.
    """
    features = (len(VARIANCE_FEATURES),)
    axes: dict[str, tuple[int, ...]] = {"variance": features, "variance_mixing": features}

    def of_width(layer: AbstractLayer, width: np.floating) -> FiniteWidth:
        coefficients = layer.finite_width(width) if law == "finite-width" else FiniteWidth.of_limit(layer.limit())
        # A coefficient may be the same at all points.
        shapes = {name: (len(u), *axes.get(name, ())) for name in vars(coefficients)}
        fields = {
            name: jax.tree.map(partial(np.broadcast_to, shape=shape), getattr(coefficients, name))
            for name, shape in shapes.items()
        }
        return FiniteWidth(**fields)

    # Without it parameters in float64 would become arrays of JAX, in float32.
    with jax.enable_x64(True):  # noqa: FBT003
        layer = kind.with_coordinates(np.asarray(u, float).T)
        return jax.tree.map(lambda *leaves: np.stack(leaves, axis=1), *(of_width(layer, width) for width in widths))
