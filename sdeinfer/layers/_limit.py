"""The limit n, d → ∞ of an architecture, given by four coefficients.

Every shaped architecture has drift θ₁ B₁(V) + θ₂ B₂(V) and diffusion a Σ_lin(V) + κ² 𝒜(V). The functions B₁, B₂, Σ_lin
and 𝒜 are common to all architectures, except that B₁ and 𝒜 depend on the attention pattern. Stacking layers adds drifts
and diffusions, hence these coefficients (Corollary 4.3).
"""

from typing import Any

import equinox as eqx
import jax
import numpy as np
from jaxtyping import Array, Float

from sdeinfer._compiler import padded_size
from sdeinfer.covariance import (
    EVERY_TOKEN,
    Diffusion,
    Pattern,
    attended_mean,
    centre,
    centring,
    constant_like,
    coordinates,
    diagonal,
    differences,
    matmul,
    overlap,
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
        pattern: the attention pattern of B₁ and 𝒜.
    """

    attention_drift: Float[Any, "..."]
    relu_drift: Float[Any, "..."]
    linear_noise: Float[Any, "..."]
    attention_noise: Float[Any, "..."]
    pattern: Pattern = eqx.field(default=EVERY_TOKEN, static=True)

    def __add__(self, other: "Limit") -> "Limit":
        """The limit of two stacked layers; if both have attention, they must have the same pattern."""
        return Limit(
            self.attention_drift + other.attention_drift,
            self.relu_drift + other.relu_drift,
            self.linear_noise + other.linear_noise,
            self.attention_noise + other.attention_noise,
            pattern=other.pattern if self.pattern.everything else self.pattern,
        )

    def drift(self, V: Float[Array, "m m"]) -> Float[Array, "m m"]:
        """Drift b(V), per unit of depth-time."""
        return self.attention_drift * attention_drift(V, self.pattern) + self.relu_drift * relu_drift(V)

    def diffusion(self, V: Float[Array, "m m"]) -> Diffusion:
        """Diffusion Σ(V)^{1/2} in spectral form, per square root of depth-time; V must be positive definite."""
        return Diffusion(coordinates(V, self.pattern), self.linear_noise, self.attention_noise)

    def normals(self, tokens: int) -> tuple[int, int]:
        """Shape of the standard normals that advance a factor of V by one step."""
        return (tokens, tokens) if self.pattern.everything else (tokens, 2 * tokens)

    def at(self, time: Any) -> "Limit":
        """The coefficients at a depth-time: the same at all."""
        del time
        return self


class LimitSteps(eqx.Module):
    """Coefficients that change with depth-time and are constant over intervals of it.

    Attributes:
        limit: the coefficients of each interval; their first axis is that of the intervals, a second may be of paths.
        starts: the start of each interval, increasing.
    """

    limit: Limit
    starts: Float[Any, " intervals"]

    @property
    def pattern(self) -> Pattern:
        """The attention pattern."""
        return self.limit.pattern

    def normals(self, tokens: int) -> tuple[int, int]:
        """As `Limit.normals`."""
        return self.limit.normals(tokens)

    def padded(self, dtype: np.dtype) -> "LimitSteps":
        """In a type, and padded to 64, 256, … intervals, so that few shapes are compiled."""
        count = padded_size(len(self.starts), least=64) - len(self.starts)
        limit = jax.tree.map(lambda c: np.concatenate([c, np.repeat(c[-1:], count, axis=0)]).astype(dtype), self.limit)
        return LimitSteps(limit, np.append(self.starts, np.full(count, np.inf)).astype(dtype))

    def at(self, time: Any) -> Limit:
        """The coefficients at a depth-time that is not the end of an interval."""
        number = (self.starts <= time).sum() - 1
        return jax.tree.map(lambda c: c[number], self.limit)


def attention_drift[T: (Array, np.ndarray)](
    V: Float[T, "m m ..."], pattern: Pattern = EVERY_TOKEN
) -> Float[T, "m m ..."]:
    """B₁(V) = V ∘ T + (v sV + (v sV)ᵀ)/2, with b = (γ²/τ0²) B₁ in Theorem 4.2, for any attention pattern; in O(m³).

    In row α the double sum over S₁ of Eq. 10 and the sum over S₂ run over the m_α tokens to which α attends, centred by
    H_α. The first gives T_αβ = tr(V H_α V H_β)/(m_α m_β); in the second, v = diag V/m_α scales the rows of s
    (`attention_drift_vectors`). Without a mask T and s are the same for all rows, which is cheaper.
    """
    if not pattern.everything:
        between = differences(pattern, transpose(differences(pattern, V)))
        v, s = attention_drift_vectors(V, pattern)
        outer = v[:, None] * matmul(s, V)
        return V * overlap(pattern, len(V), between) + (outer + transpose(outer)) / 2
    tokens, v = float(len(V)), diagonal(V)
    outer = v[:, None] * total(V * centred_norms(V)[None], axis=1)[None]
    return V * total(total(V * centre(V))) / tokens**2 + (outer + transpose(outer)) / (2 * tokens)


def centred_norms[T: (Array, np.ndarray)](V: Float[T, "m m ..."]) -> Float[T, "m ..."]:
    """The vector s with S₂^{αδ} = V_αα s_δ (Eq. 10), without a mask: diag(H V H) less its mean."""
    tokens = float(len(V))
    v, row = diagonal(V), total(V, axis=1) / tokens
    return v - row * 2 + (total(row) * 2 - total(v)) / tokens


def attention_drift_vectors[T: (Array, np.ndarray)](
    V: Float[T, "m m ..."], pattern: Pattern
) -> tuple[Float[T, "m ..."], Float[T, "m m ..."]]:
    """V_αα/m_α, and s with S₂^{αν} = V_αα s_αν, zero where α does not attend to ν.

    s does not change if all tokens are shifted.
    """
    xp, norms, matrices = V.__array_namespace__(), diagonal(V), centring(pattern, len(V))
    row = attended_mean(pattern, V)
    mean_norm = attended_mean(pattern, xp.broadcast_to(norms[:, None], V.shape))
    both = diagonal(transpose(attended_mean(pattern, transpose(row))))
    s = norms[None] - 2 * row - mean_norm + 2 * both[:, None]
    size = matrices.size.astype(V.dtype).reshape(-1, *(1,) * (V.ndim - 2))
    return norms / size, constant_like(np.asarray(matrices.mean > 0, float), V) * s
