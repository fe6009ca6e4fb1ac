"""What remains of an architecture in the limit n, d → ∞: four numbers.

Every shaped architecture has the drift θ₁ B₁(V) + θ₂ B₂(V) and the diffusion a Σ_lin(V) + κ² 𝒜(V), with B₁, B₂, Σ_lin
and 𝒜 the same for all. Stacking layers adds drifts and diffusions, so it adds these numbers (Corollary 4.3).
"""

import equinox as eqx
from jaxtyping import Array, Float

from sdeinfer.covariance import Diffusion, centre, diagonal, spectrum, total, transpose
from sdeinfer.layers._relu import relu_drift


class Limit(eqx.Module):
    """Coefficients of the neural covariance SDE dV = b(V) dt + Σ(V)^{1/2} dB (Eq. 12).

    Attributes:
        attention_drift: θ₁, of the drift θ₁ B₁ of attention (Theorem 4.2).
        relu_drift: θ₂, of the drift θ₂ B₂ of a shaped ReLU (Theorem 3.2).
        linear_noise: a, of Σ_lin.
        attention_noise: κ², of 𝒜.
    """

    attention_drift: Float[Array, ""]
    relu_drift: Float[Array, ""]
    linear_noise: Float[Array, ""]
    attention_noise: Float[Array, ""]

    def __add__(self, other: "Limit") -> "Limit":
        """The limit of one layer stacked on another."""
        return Limit(
            self.attention_drift + other.attention_drift,
            self.relu_drift + other.relu_drift,
            self.linear_noise + other.linear_noise,
            self.attention_noise + other.attention_noise,
        )

    def drift(self, V: Float[Array, "m m"]) -> Float[Array, "m m"]:
        """b(V), per unit of depth-time."""
        return self.attention_drift * attention_drift(V) + self.relu_drift * relu_drift(V)

    def diffusion(self, V: Float[Array, "m m"]) -> Diffusion:
        """Σ(V)^{1/2} in spectral form, per root of depth-time; V must be positive definite."""
        return Diffusion(spectrum(V), self.linear_noise, self.attention_noise)


def attention_drift(V: Float[Array, "m m ..."]) -> Float[Array, "m m ..."]:
    """B₁(V), with b = (γ²/τ0²) B₁ in Theorem 4.2: V tr(VC)/m² + (v sᵀV + V s vᵀ)/(2m), in O(m³).

    The first term is the double sum over S₁ of Eq. 10, the second the sum over S₂, whose part free of V_αα is s.
    """
    tokens = V.shape[0]
    v, s = attention_drift_vectors(V)
    outer = v[:, None] * total(V * s[None], axis=1)[None]
    return V * total(total(V * centre(V))) / tokens**2 + (outer + transpose(outer)) / (2 * tokens)


def attention_drift_vectors(V: Float[Array, "m m ..."]) -> tuple[Float[Array, "m ..."], Float[Array, "m ..."]]:
    """The v and s of the second attention-drift term: v = diag V, S₂^{αδ} = v_α s_δ (Eq. 10)."""
    tokens = V.shape[0]
    v, row = diagonal(V), total(V, axis=1) / tokens
    return v, v - 2 * row + (2 * total(row) - total(v)) / tokens
