"""The linear noise a Σ_lin of a Gaussian linear map, Σ_lin^{αβ,γδ} = V_αγ V_βδ + V_αδ V_βγ (Theorem 3.2).

Tests: `tests/solve/test_splitting.py`.
"""

import dataclasses

import jax.numpy as jnp

from sdeinfer.covariance._batched import diagonal, identity_like, matmul, total
from sdeinfer.covariance._matrix import safe_sqrt
from sdeinfer.terms._base import AbstractTerm


@dataclasses.dataclass(frozen=True)
class LinearNoise(AbstractTerm):
    """The noise a Σ_lin, without drift; its coefficient is a."""

    def drift(self, c, V):
        """The zero matrix: the noise keeps E V."""
        del c
        return jnp.zeros_like(V)

    @property
    def columns(self) -> int:
        """One normal per entry: G."""
        return 1

    def noise(self, c, X, h, G):
        """X ← X M, with a random matrix M whose law does not depend on X.

        The SDE is dX = √(a/2) X dG − (a k/4) X dt. The trace of G scales X, exactly. Its traceless part G₀ enters by
        Talay's scheme of weak order 2, I + G₀ + (G₀² − E G₀²)/2 with the increments √(a/2) G₀. That scheme also needs
        independent noises along the commutators of the E_ij. Their covariance, ((a h/2)²/4) (k Σ_ij E_ij ⊗ E_ij −
        I ⊗ I), is a multiple of G₀'s own: G₀ times √(1 + a k h/8) replaces them. The division by the root of the
        mean square E tr(M Mᵀ)/k keeps E V exactly.
        """
        a, k, variance = c, X.shape[1], c * h / 2
        root, identity = safe_sqrt(a / 2), identity_like(G)
        stretch = 1 + variance * k / 4
        mean = total(diagonal(G)) / k
        G0 = root * jnp.sqrt(stretch) * (G - mean * identity)
        start = 1 - variance * (1 - 1 / k) / 2
        M = start * identity + G0 + matmul(G0, G0) / 2
        # For standard normals E tr G₀G₀ᵀ = k² − 1, E tr G₀² = k − 1 and E tr G₀²(G₀²)ᵀ = k³ − 2k − 2 + 3/k.
        second = stretch * variance * (k - 1 / k + start * (1 - 1 / k))
        mean_square = start**2 + second + (stretch * variance) ** 2 * (k**2 - 2 - 2 / k + 3 / k**2) / 4
        return matmul(X, M) * (jnp.exp(root * mean - variance / k) / jnp.sqrt(mean_square))
