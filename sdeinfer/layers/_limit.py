"""The limit n, d → ∞ of an architecture, given by four coefficients.

Every shaped architecture has drift θ₁ B₁(V) + θ₂ B₂(V) and diffusion a Σ_lin(V) + κ² 𝒜(V). The functions B₁, B₂, Σ_lin
and 𝒜 are common to all architectures, except that B₁ and 𝒜 depend on the attention mask. Stacking layers adds drifts
and diffusions, hence these coefficients (Corollary 4.3).
"""

from typing import Any

import equinox as eqx
import numpy as np
from jaxtyping import Array, Float

from sdeinfer.covariance import (
    Diffusion,
    causal_overlap,
    centre,
    coordinates,
    diagonal,
    lower,
    matmul,
    running_mean,
    successive_differences,
    total,
    transpose,
)
from sdeinfer.layers._relu import relu_drift


class Limit(eqx.Module):
    """Coefficients of the neural covariance SDE dV = b(V) dt + Σ(V)^{1/2} dB (Eq. 12).

    Attributes:
        attention_drift: θ₁, of the drift θ₁ B₁ of attention (Theorem 4.2).
        relu_drift: θ₂, of the drift θ₂ B₂ of a shaped ReLU (Theorem 3.2).
        linear_noise: a, of Σ_lin.
        attention_noise: κ², of 𝒜.
        causal: whether B₁ and 𝒜 are those of attention with a causal mask.
    """

    attention_drift: Float[Any, "..."]
    relu_drift: Float[Any, "..."]
    linear_noise: Float[Any, "..."]
    attention_noise: Float[Any, "..."]
    causal: bool = eqx.field(default=False, static=True)

    def __add__(self, other: "Limit") -> "Limit":
        """The limit of two stacked layers; if both have attention, they must have the same mask."""
        return Limit(
            self.attention_drift + other.attention_drift,
            self.relu_drift + other.relu_drift,
            self.linear_noise + other.linear_noise,
            self.attention_noise + other.attention_noise,
            causal=self.causal or other.causal,
        )

    def drift(self, V: Float[Array, "m m"]) -> Float[Array, "m m"]:
        """Drift b(V), per unit of depth-time."""
        of_attention = causal_attention_drift(V) if self.causal else attention_drift(V)
        return self.attention_drift * of_attention + self.relu_drift * relu_drift(V)

    def diffusion(self, V: Float[Array, "m m"]) -> Diffusion:
        """Diffusion Σ(V)^{1/2} in spectral form, per square root of depth-time; V must be positive definite."""
        return Diffusion(coordinates(V, causal=self.causal), self.linear_noise, self.attention_noise)

    def normals(self, tokens: int) -> tuple[int, int]:
        """Shape of the standard normals that advance a factor of V by one step."""
        return (tokens, 2 * tokens) if self.causal else (tokens, tokens)


def attention_drift[T: (Array, np.ndarray)](V: Float[T, "m m ..."]) -> Float[T, "m m ..."]:
    """B₁(V) = V tr(VC)/m² + (v sᵀV + V s vᵀ)/(2m), with b = (γ²/τ0²) B₁ in Theorem 4.2; in O(m³).

    The first term is the double sum over S₁ of Eq. 10, the second the sum over S₂^{αδ} = V_αα s_δ.
    """
    tokens = float(len(V))
    v, s = attention_drift_vectors(V)
    outer = v[:, None] * total(V * s[None], axis=1)[None]
    return V * total(total(V * centre(V))) / tokens**2 + (outer + transpose(outer)) / (2 * tokens)


def attention_drift_vectors[T: (Array, np.ndarray)](
    V: Float[T, "m m ..."],
) -> tuple[Float[T, "m ..."], Float[T, "m ..."]]:
    """Vectors v and s of the second term of the attention drift: v = diag V, S₂^{αδ} = v_α s_δ (Eq. 10)."""
    tokens = float(len(V))
    v, row = diagonal(V), total(V, axis=1) / tokens
    return v, v - row * 2 + (total(row) * 2 - total(v)) / tokens


def causal_attention_drift[T: (Array, np.ndarray)](V: Float[T, "m m ..."]) -> Float[T, "m m ..."]:
    """B₁(V) = V ∘ T + (v sV + (v sV)ᵀ)/2 of attention with a causal mask, in O(m³).

    In row α the sums over S₁ and S₂ of Theorem 4.2 run over the first m_α tokens, centred by H_α. The first gives
    T_αβ = tr(V H_α V H_β)/(m_α m_β); in the second, v = diag V/m_α scales the rows of s (`causal_drift_vectors`).
    """
    differences = successive_differences(transpose(successive_differences(V)))
    v, s = causal_drift_vectors(V)
    outer = v[:, None] * matmul(s, V)
    return V * causal_overlap(differences) + (outer + transpose(outer)) / 2


def causal_drift_vectors[T: (Array, np.ndarray)](
    V: Float[T, "m m ..."],
) -> tuple[Float[T, "m ..."], Float[T, "m m ..."]]:
    """V_αα/m_α, and s_αν with S₂^{αν} = V_αα s_αν, zero for ν > α; s is invariant under shifts of all tokens."""
    xp, size = V.__array_namespace__(), diagonal(V)
    row = running_mean(V)
    sizes = running_mean(xp.broadcast_to(size[:, None], V.shape))
    s = size[None] - 2 * row - sizes + 2 * diagonal(transpose(running_mean(transpose(row))))[:, None]
    count = xp.arange(1, len(V) + 1, dtype=V.dtype).reshape(-1, *(1,) * (V.ndim - 2))
    return size / count, lower(s)
