"""What remains of an architecture in the limit n, d → ∞: four numbers.

Every shaped architecture has the drift θ₁ B₁(V) + θ₂ B₂(V) and the diffusion a Σ_lin(V) + κ² 𝒜(V), with B₁, B₂, Σ_lin
and 𝒜 the same for all, but for the mask of attention, on which B₁ and 𝒜 depend. Stacking layers adds drifts and
diffusions, so it adds these numbers (Corollary 4.3).
"""

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

    attention_drift: Float[Array, ""]
    relu_drift: Float[Array, ""]
    linear_noise: Float[Array, ""]
    attention_noise: Float[Array, ""]
    causal: bool = eqx.field(default=False, static=True)

    def __add__(self, other: "Limit") -> "Limit":
        """The limit of one layer stacked on another; of the two, those with attention have one mask."""
        return Limit(
            self.attention_drift + other.attention_drift,
            self.relu_drift + other.relu_drift,
            self.linear_noise + other.linear_noise,
            self.attention_noise + other.attention_noise,
            causal=self.causal or other.causal,
        )

    def drift(self, V: Float[Array, "m m"]) -> Float[Array, "m m"]:
        """b(V), per unit of depth-time."""
        of_attention = causal_attention_drift(V) if self.causal else attention_drift(V)
        return self.attention_drift * of_attention + self.relu_drift * relu_drift(V)

    def diffusion(self, V: Float[Array, "m m"]) -> Diffusion:
        """Σ(V)^{1/2} in spectral form, per root of depth-time; V must be positive definite."""
        return Diffusion(coordinates(V, causal=self.causal), self.linear_noise, self.attention_noise)

    def normals(self, tokens: int) -> tuple[int, int]:
        """The shape of the standard normals that move a factor of V by one step."""
        return (tokens, 2 * tokens) if self.causal else (tokens, tokens)


def attention_drift[T: (Array, np.ndarray)](V: Float[T, "m m ..."]) -> Float[T, "m m ..."]:
    """B₁(V), with b = (γ²/τ0²) B₁ in Theorem 4.2: V tr(VC)/m² + (v sᵀV + V s vᵀ)/(2m), in O(m³).

    The first term is the double sum over S₁ of Eq. 10, the second the sum over S₂, whose part free of V_αα is s.
    """
    tokens = float(len(V))
    v, s = attention_drift_vectors(V)
    outer = v[:, None] * total(V * s[None], axis=1)[None]
    return V * total(total(V * centre(V))) / tokens**2 + (outer + transpose(outer)) / (2 * tokens)


def attention_drift_vectors[T: (Array, np.ndarray)](
    V: Float[T, "m m ..."],
) -> tuple[Float[T, "m ..."], Float[T, "m ..."]]:
    """The v and s of the second attention-drift term: v = diag V, S₂^{αδ} = v_α s_δ (Eq. 10)."""
    tokens = float(len(V))
    v, row = diagonal(V), total(V, axis=1) / tokens
    return v, v - row * 2 + (total(row) * 2 - total(v)) / tokens


def causal_attention_drift[T: (Array, np.ndarray)](V: Float[T, "m m ..."]) -> Float[T, "m m ..."]:
    """B₁(V) of attention with a causal mask, in O(m³): V ∘ T + (v sV + (v sV)ᵀ)/2.

    The sums over S₁ and S₂ of Theorem 4.2 are then over the first m_α tokens in row α, which H_α centres: the first has
    T_αβ = tr(V H_α V H_β)/(m_α m_β), and for the second v = diag V/m_α scales the rows of s (`causal_drift_vectors`).
    """
    differences = successive_differences(transpose(successive_differences(V)))
    v, s = causal_drift_vectors(V)
    outer = v[:, None] * matmul(s, V)
    return V * causal_overlap(differences) + (outer + transpose(outer)) / 2


def causal_drift_vectors[T: (Array, np.ndarray)](
    V: Float[T, "m m ..."],
) -> tuple[Float[T, "m ..."], Float[T, "m m ..."]]:
    """V_αα/m_α, and the s_αν of S₂^{αν} = V_αα s_αν, zero for ν > α; a common shift of all tokens leaves s alone."""
    xp, size = V.__array_namespace__(), diagonal(V)
    row = running_mean(V)
    sizes = running_mean(xp.broadcast_to(size[:, None], V.shape))
    s = size[None] - 2 * row - sizes + 2 * diagonal(transpose(running_mean(transpose(row))))[:, None]
    count = xp.arange(1, len(V) + 1, dtype=V.dtype).reshape(-1, *(1,) * (V.ndim - 2))
    return size / count, lower(s)
