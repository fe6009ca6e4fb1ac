"""Coordinates in which Σ(V) = a Σ_lin(V) + κ² 𝒜(V) is diagonal, without forming a p×p matrix.

Let V = LLᵀ, Lᵀ H_m L = U diag(δ) Uᵀ and Q = LU. In the coordinates Z = Q⁻¹ dV Q⁻ᵀ the entries Z_ij, i ≤ j, are
independent for *every* a and κ², with

    var Z_ij = (1 + [i = j]) (a + κ² e_ij),    e_ij = (δ_i² + δ_j²)/m².

Why: Q diagonalises V (to I) and the centred covariance together: with C = H V H, Q⁻¹ V C V Q⁻ᵀ = Qᵀ C Q = diag(δ²), so
Σ_lin(αβ,δω) = V_αδ V_βω + V_αω V_βδ and 𝒜, which replaces one of the four V by W = V C V, both become diagonal.
"""

from typing import Any

import numpy as np
from jaxtyping import Array, Float

from sdeinfer.covariance._batched import matmul, total, transpose
from sdeinfer.covariance._factors import FactoredCovariance, cholesky_of, eigh_of, whiten_by
from sdeinfer.covariance._matrix import pairs
from sdeinfer.covariance._pattern import EVERY_TOKEN, Pattern
from sdeinfer.covariance._pattern_noise import PatternSpectrum, pattern_spectrum


class Spectrum(FactoredCovariance):
    """The coordinates Q of one V, or of stacks: L, and the eigenvectors U and eigenvalues δ of Lᵀ H_m L."""

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
    def mixing(self) -> Float[Array | np.ndarray, "... p"]:
        """e_ij = (δ_i² + δ_j²)/m² for i ≤ j, the coefficient of κ² in the variance of Z_ij."""
        rows, columns = pairs(self.tokens)
        return (self.delta[..., rows] ** 2 + self.delta[..., columns] ** 2) / self.tokens**2


def spectrum(V: Float[Any, "... m m"]) -> Spectrum:
    """The coordinates Q of a V, in O(m³): NaN for a singular V, where Σ has no density."""
    L = cholesky_of(V)
    centred = L - L.mean(axis=-2, keepdims=True)
    delta, U = eigh_of(centred.mT @ centred)
    return Spectrum(L, U, delta)


def coordinates(V: Float[Any, "... m m"], pattern: Pattern = EVERY_TOKEN) -> Spectrum | PatternSpectrum:
    """The coordinates in which Σ(V) is diagonal for an attention pattern."""
    return spectrum(V) if pattern.everything else pattern_spectrum(pattern, V)


def centred_gram(X: Float[Array, "m k ..."]) -> tuple[Float[Array, "m k ..."], Float[Array, "k k ..."]]:
    """The token-centred factor H_m X, and K = XᵀH_mX."""
    centred = X - total(X) / X.shape[0]
    return centred, matmul(transpose(centred), centred)
