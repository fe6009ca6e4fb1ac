"""The law of an increment: moments of random covariances and of their logarithms, and a density near the mean."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float, Int

from sdeinfer.covariance._eigen import eigh
from sdeinfer.covariance._matrix import pairs, square_of, tokens_of, vech

LEAST_EIGENVALUE = 1e-8
"""Least eigenvalue of a draw of S, relative to its mean. Two tokens that attend to one and the same token in all heads
make S singular, and its logarithm is far from normal then; this happens at temperatures near 0."""


class MatrixMoments(NamedTuple):
    """Mean and covariance of a random symmetric matrix, such as S = hhᵀ/u of a branch's u hidden features h.

    Attributes:
        mean: the mean, K of S.
        covariance: covariance of the entries on and above the diagonal, in the order of `covariance.pairs`; Ξ of S.
    """

    mean: Float[Array, "m m"]
    covariance: Float[Array, "p p"]


def moments_of_draws(packed: Float[Array, "draws p"]) -> MatrixMoments:
    """The mean and the covariance of draws of a symmetric matrix, packed by `vech`."""
    mean = packed.mean(0)
    centred = packed - mean
    return MatrixMoments(mean[square_of(tokens_of(len(mean)))], centred.T @ centred / len(packed))


def fourth_moments(P: Float[Array, "parts m m"]) -> Float[Array, "p p"]:
    """The sum over parts of P_ac P_bd + P_ad P_bc for entries ab and cd, as of products of normals (Isserlis)."""
    m = P.shape[-1]
    flat = P.reshape(-1, m * m)
    T = (flat.T @ flat).reshape(m, m, m, m)
    a, b = pairs(m)
    rows = a[:, None], b[:, None]
    return T[rows[0], a, rows[1], b] + T[rows[0], b, rows[1], a]


class LogMoments(NamedTuple):
    """Mean and covariance of log(L⁻¹ S L⁻ᵀ) for a random covariance S with E S = L Lᵀ, packed by `vech`."""

    mean: Float[Array, " p"]
    covariance: Float[Array, "p p"]


def log_moments(mean: Float[Array, "m m"], covariance: Float[Array, "p p"]) -> LogMoments:
    """The moments of the logarithm to leading order: −E[E²]/2 and Σ, the covariance of E = L⁻¹ S L⁻ᵀ − I."""
    whiten = _congruence(jnp.linalg.inv(jnp.linalg.cholesky(mean)))
    covariance = whiten @ covariance @ whiten.T
    (a, b), place = pairs(len(mean)), square_of(len(mean))
    # E[E²]_ab sums the covariances of the entries ac and cb over c.
    return LogMoments(-covariance[place[a], place[b]].sum(-1) / 2, covariance)


def sampled_log_moments(mean: Float[Array, "m m"], draws: Float[Array, "draws m m"]) -> LogMoments:
    """The moments of the logarithm by draws of S, for S that are too far from their mean for `log_moments`.

    The mean is that of log(I + E) − E, since E E = 0: its error is of the second order.
    """
    inverse = jnp.linalg.inv(jnp.linalg.cholesky(mean))
    scaled = inverse @ draws @ inverse.T
    # For 4 tokens the package's `eigh` halves the time of an audit's table; for 8 it compiles ten seconds longer.
    if len(mean) <= 4:
        values, vectors = eigh(jnp.moveaxis(scaled, 0, -1))
        values, vectors = values.T, jnp.moveaxis(vectors, -1, 0)
    else:
        values, vectors = jnp.linalg.eigh(scaled)
    logs = jnp.log(jnp.maximum(values, LEAST_EIGENVALUE))
    logarithm = vech((vectors * logs[:, None]) @ jnp.swapaxes(vectors, -1, -2))
    unit = vech(jnp.eye(len(mean), dtype=mean.dtype))
    return LogMoments((logarithm - vech(scaled) + unit).mean(0), jnp.cov(logarithm.T))


def _congruence(A: Float[Array, "m m"]) -> Float[Array, "p p"]:
    """The matrix of D ↦ A D Aᵀ on packed matrices."""
    a, b = pairs(len(A))
    straight, across = A[a[:, None], a] * A[b[:, None], b], A[a[:, None], b] * A[b[:, None], a]
    return jnp.where(a == b, straight, straight + across)


class LogMatrixNormal(NamedTuple):
    """A random covariance D whose logarithm about its mean, log(L⁻¹ D L⁻ᵀ) with L Lᵀ = E D, is nearly normal.

    A factor of D, such as g², shifts the logarithm: it changes the density's location only, as in the exact law. In a
    normal density of D itself it would change the width too. With E = L⁻¹ D L⁻ᵀ − I of the covariance Σ, the
    logarithm E − E²/2 + … has the mean −E[E²]/2 and the covariance Σ up to terms of higher order in Σ.

    Attributes:
        logarithm: log(L⁻¹ D L⁻ᵀ) at the observed D, packed by `vech`.
        expected: its mean.
        covariance: its covariance.
        log_volume: logarithm of the density's factor from entries of the logarithm to entries of D,
            det D^{−(m+1)/2} Π_{i<j} (δ/2)/sinh(δ/2) ≈ … e^{−Σ δ²/24} for differences δ of eigenvalues of the logarithm,
            and of (2π)^{−p/2}.
    """

    logarithm: Float[Array, " p"]
    expected: Float[Array, " p"]
    covariance: Float[Array, "p p"]
    log_volume: Float[Array, ""]

    @classmethod
    def about(cls, D: Float[Array, "m m"], mean: Float[Array, "m m"], logarithm: LogMoments) -> "LogMatrixNormal":
        """The law with a mean, and with moments of the logarithm about it, at an observed D."""
        m = len(D)
        inverse = jnp.linalg.inv(jnp.linalg.cholesky(mean))
        values, vectors = jnp.linalg.eigh(inverse @ D @ inverse.T)
        logs = jnp.log(values)
        log_det = logs.sum() - 2 * jnp.log(jnp.diagonal(inverse)).sum()
        volume = -(m * jnp.square(logs).sum() - jnp.square(logs.sum())) / 24 - (m + 1) / 2 * log_det
        volume -= m * (m + 1) / 4 * jnp.log(2 * jnp.pi)
        return cls(vech((vectors * logs) @ vectors.T), logarithm.mean, logarithm.covariance, volume)

    def log_density(self, log_factor: ArrayLike = 0.0) -> Float[Array, ""]:
        """Log density of D if its mean is multiplied by e^`log_factor`."""
        residual = self.standardised(log_factor)
        return -residual @ residual / 2 + self.log_volume - self._whitened()[1]

    def in_factor(self) -> Float[Array, "4"]:
        """The log density as a polynomial in the logarithm ℓ of a factor of the mean, such as log g².

        The coefficients of ℓ⁰, ℓ and ℓ² of −χ²/2, the sum of squares of `standardised`; and what is left, which does
        not depend on ℓ.
        """
        (residual, along), log_det = self._whitened()
        return jnp.stack([-residual @ residual / 2, residual @ along, -along @ along / 2, self.log_volume - log_det])

    def standardised(self, log_factor: ArrayLike) -> Float[Array, " p"]:
        """Independent standard normals, at the logarithm ℓ of a factor of the mean."""
        (residual, along), _ = self._whitened()
        return residual - log_factor * along

    def _whitened(self) -> tuple[Float[Array, "2 p"], Float[Array, ""]]:
        """The residual for ℓ = 0 and its change with ℓ, whitened; and half the log determinant of the covariance."""
        root = jnp.linalg.cholesky(self.covariance)
        unit = vech(jnp.eye(tokens_of(len(self.logarithm)), dtype=root.dtype))
        both = jnp.stack([self.logarithm - self.expected, unit], axis=1)
        whitened = jax.scipy.linalg.solve_triangular(root, both, lower=True).T
        return whitened, jnp.log(jnp.diagonal(root)).sum()


def increment_law(
    D: Float[Array, "m m"], mean: Float[Array, "m m"], hidden: LogMoments, *, width: Int[Array, ""] | int
) -> LogMatrixNormal:
    """The law of ΔΔᵀ/n for an increment of strength 1, at an observed D.

    Given S, D is S^{1/2} W S^{1/2} with W ~ Wishart_m(n, I)/n. To leading order in the fluctuations of W its logarithm
    about K is the sum of those of S and of W, which are independent.
    """
    identity = jnp.eye(len(mean), dtype=mean.dtype)
    of_wishart = log_moments(identity, fourth_moments(identity[None]) / width)
    both = LogMoments(hidden.mean + of_wishart.mean, hidden.covariance + of_wishart.covariance)
    return LogMatrixNormal.about(D, mean, both)
