"""Moments of the logarithm of a random covariance about its mean."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from sdeinfer.covariance import eigh, pairs, square_of, vech

SINGULAR = 1e-8
"""Least eigenvalue of a draw of S, relative to its mean. Two tokens that attend to one and the same token in all heads
make S singular, and its logarithm is far from normal then; this happens at temperatures near 0."""

MOST_ROTATED = 4
"""Largest number of tokens for which the package's `eigh` is used: for 4 it halves the time of an audit's table and
compiles in half a second more, for 8 it needs ten seconds more."""


class LogMoments(NamedTuple):
    """Mean and covariance of log(L⁻¹ S L⁻ᵀ) for a random covariance S with E S = L Lᵀ, packed by `vech`."""

    mean: Float[Array, " p"]
    covariance: Float[Array, "p p"]


def log_moments(mean: Float[Array, "m m"], covariance: Float[Array, "p p"]) -> LogMoments:
    """The moments of the logarithm to leading order: −E[E²]/2 and Σ, the covariance of E = L⁻¹ S L⁻ᵀ − I.

    Arguments:
        mean: E S.
        covariance: that of the entries of S, in the order of `covariance.pairs`.
    """
    whiten = _congruence(jnp.linalg.inv(jnp.linalg.cholesky(mean)))
    covariance = whiten @ covariance @ whiten.T
    (a, b), place = pairs(len(mean)), square_of(len(mean))
    # E[E²]_ab sums the covariances of the entries ac and cb over c.
    return LogMoments(-covariance[place[a], place[b]].sum(-1) / 2, covariance)


def sampled_log_moments(mean: Float[Array, "m m"], draws: Float[Array, "draws m m"]) -> LogMoments:
    """The moments of the logarithm by draws of S, for S that are too far from their mean for `log_moments`.

    The mean is that of log(I + E) − E, since E E = 0: its error is of the second order.

    Arguments:
        mean: E S.
        draws: draws of S.
    """
    inverse = jnp.linalg.inv(jnp.linalg.cholesky(mean))
    scaled = inverse @ draws @ inverse.T
    if len(mean) <= MOST_ROTATED:
        values, vectors = eigh(jnp.moveaxis(scaled, 0, -1))
        values, vectors = values.T, jnp.moveaxis(vectors, -1, 0)
    else:
        values, vectors = jnp.linalg.eigh(scaled)
    logs = jnp.log(jnp.maximum(values, SINGULAR))
    logarithm = vech((vectors * logs[:, None]) @ jnp.swapaxes(vectors, -1, -2))
    one = vech(jnp.eye(len(mean), dtype=mean.dtype))
    return LogMoments((logarithm - vech(scaled) + one).mean(0), jnp.cov(logarithm.T))


def _congruence(A: Float[Array, "m m"]) -> Float[Array, "p p"]:
    """The matrix of D ↦ A D Aᵀ on packed matrices."""
    a, b = pairs(len(A))
    straight, across = A[a[:, None], a] * A[b[:, None], b], A[a[:, None], b] * A[b[:, None], a]
    return jnp.where(a == b, straight, straight + across)
