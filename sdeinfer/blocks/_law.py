"""The law of an increment: the density of a covariance near its mean."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float, Int

from sdeinfer.blocks._logarithm import LogMoments, log_moments
from sdeinfer.blocks._moments import fourth_moments
from sdeinfer.covariance import tokens_of, vech


class LogMatrixNormal(NamedTuple):
    """A random covariance D whose logarithm about its mean, log(L⁻¹ D L⁻ᵀ) with L Lᵀ = E D, is nearly normal.

    A factor of D, such as g², shifts the logarithm, so that the density tells of it by its place only, as the exact one
    does; a normal density of D itself would count its width too. With E = L⁻¹ D L⁻ᵀ − I of the covariance Σ, the
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

    Arguments:
        D: ΔΔᵀ/n.
        mean: K = E S = L Lᵀ.
        hidden: moments of log(L⁻¹ S L⁻ᵀ).
        width: n.
    """
    one = jnp.eye(len(mean), dtype=mean.dtype)
    of_wishart = log_moments(one, fourth_moments(one[None]) / width)
    both = LogMoments(hidden.mean + of_wishart.mean, hidden.covariance + of_wishart.covariance)
    return LogMatrixNormal.about(D, mean, both)
