"""Σ(V) = a Σ_lin(V) + κ² 𝒜(V) without forming a p×p matrix.

Let V = LLᵀ, Lᵀ H_m L = U diag(δ) Uᵀ and Q = LU. In the coordinates Z = Q⁻¹ dV Q⁻ᵀ the entries Z_ij, i ≤ j, are
independent for *every* a and κ², with

    var Z_ij = (1 + [i = j]) (a + κ² e_ij),    e_ij = (δ_i² + δ_j²)/m².

Why: Q diagonalises V (to I) and the centred covariance together: with C = H V H, Q⁻¹ V C V Q⁻ᵀ = Qᵀ C Q = diag(δ²), so
Σ_lin(αβ,δω) = V_αδ V_βω + V_αω V_βδ and 𝒜, which replaces one of the four V by W = V C V, both become diagonal.
"""

from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from sdeinfer.covariance._batched import matmul, total, transpose
from sdeinfer.covariance._factors import cholesky_of, eigh_of, log_volume_of, whiten_by
from sdeinfer.covariance._matrix import pairs, unvech, vech
from sdeinfer.covariance._pattern import EVERY_TOKEN, Pattern
from sdeinfer.covariance._pattern_noise import PatternSpectrum, pattern_spectrum


class Spectrum(eqx.Module):
    """The coordinates Q in which the noise of Σ(V) is independent for every a and κ²; they depend on V alone.

    For one V, or for stacks along leading axes.

    Attributes:
        cholesky: L, shape (m, m).
        rotation: eigenvectors U of Lᵀ H_m L, shape (m, m).
        delta: eigenvalues δ of Lᵀ H_m L, shape (m,).
    """

    cholesky: Float[Any, "... m m"]
    rotation: Float[Any, "... m m"]
    delta: Float[Any, "... m"]

    def whiten[T: (Array, np.ndarray)](self, S: Float[T, "... m m"]) -> Float[T, "... m m"]:
        """Q⁻¹ S Q⁻ᵀ for a symmetric S."""
        return self.rotation.mT @ whiten_by(self.cholesky, S) @ self.rotation

    def colour[T: (Array, np.ndarray)](self, Z: Float[T, "... m m"]) -> Float[T, "... m m"]:
        """Q Z Qᵀ: the inverse of `whiten`."""
        Q = self.cholesky @ self.rotation
        return Q @ Z @ Q.mT

    @property
    def tokens(self) -> int:
        """The number of tokens m."""
        return self.cholesky.shape[-1]

    @property
    def log_volume(self) -> Float[Array | np.ndarray, "..."]:
        """Σ_i log L_ii = ½ log det V."""
        return log_volume_of(self.cholesky)

    @property
    def mixing(self) -> Float[Array | np.ndarray, "... p"]:
        """e_ij = (δ_i² + δ_j²)/m² for i ≤ j, the coefficient of κ² in the variance of Z_ij."""
        rows, columns = pairs(self.tokens)
        return (self.delta[..., rows] ** 2 + self.delta[..., columns] ** 2) / self.tokens**2


def spectrum(V: Float[Any, "... m m"]) -> Spectrum:
    """Find the coordinates Q in which Σ(V) is diagonal, in O(m³); NumPy handles NumPy arrays.

    V must be positive definite: for a singular V, where Σ has no density, the result holds NaN. The eigenvectors have
    no derivative where δ repeats.
    """
    L = cholesky_of(V)
    centred = L - L.mean(axis=-2, keepdims=True)
    delta, U = eigh_of(centred.mT @ centred)
    return Spectrum(L, U, delta)


def coordinates(V: Float[Any, "... m m"], pattern: Pattern = EVERY_TOKEN) -> Spectrum | PatternSpectrum:
    """The coordinates in which Σ(V) is diagonal for an attention pattern."""
    return spectrum(V) if pattern.everything else pattern_spectrum(pattern, V)


class Diffusion(eqx.Module):
    """Σ(V) = a Σ_lin(V) + κ² 𝒜(V) of Theorems 3.2 and 4.2, as a square root to sample from and to invert.

    Attributes:
        spectrum: the coordinates in which Σ is diagonal.
        linear: a, the strength of Σ_lin.
        attention: κ², the strength of 𝒜.
    """

    spectrum: Spectrum | PatternSpectrum
    linear: Float[Array, ""]
    attention: Float[Array, ""]

    @property
    def std(self) -> Float[Array, " p"]:
        """Standard deviations of Z_ij, i ≤ j."""
        rows, columns = pairs(self.spectrum.tokens)
        multiplicity = jnp.where(rows == columns, 2.0, 1.0).astype(self.spectrum.cholesky.dtype)
        return jnp.sqrt(multiplicity * (self.linear + self.attention * self.spectrum.mixing))

    def sample(self, xi: Float[Array, " p"]) -> Float[Array, "m m"]:
        """Σ^{1/2} ξ as a symmetric matrix, for p standard normals ξ."""
        return self.spectrum.colour(unvech(self.std * xi))

    def whiten(self, dV: Float[Any, "m m"]) -> Float[Array, " p"]:
        """Σ^{−1/2} dV, the inverse of `sample`: independent standard normals where dV ~ N(0, Σ)."""
        return vech(self.spectrum.whiten(dV)) / self.std

    def log_det(self) -> Float[Array, ""]:
        """The log-determinant of Σ, Σ_{i≤j} log var Z_ij + 2(m+1) Σ_i log L_ii, over the p entries of `vech`."""
        tokens = self.spectrum.tokens
        return 2 * jnp.sum(jnp.log(self.std)) + 2 * (tokens + 1) * self.spectrum.log_volume


def centred_gram(X: Float[Array, "m k ..."]) -> tuple[Float[Array, "m k ..."], Float[Array, "k k ..."]]:
    """The token-centred factor H_m X, and K = XᵀH_mX."""
    centred = X - total(X) / X.shape[0]
    return centred, matmul(transpose(centred), centred)
