"""Shaped attention in the limit, Theorem 4.2: the drift θ₁ B₁ and the noise κ² 𝒜, of any attention pattern.

Tests: `tests/layers/test_limits.py`.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from sdeinfer.covariance import Pattern
from sdeinfer.covariance._batched import diagonal, gram, matmul, total, transpose
from sdeinfer.covariance._diffusion import centred_gram
from sdeinfer.covariance._matrix import centre
from sdeinfer.covariance._pattern import EVERY_TOKEN, centring
from sdeinfer.covariance._pattern_noise import attended_mean, constant_like, differences, overlap
from sdeinfer.terms._attention_noise import attention_noise_flow
from sdeinfer.terms._base import AbstractTerm, AddedKernel, Kernel, where_present


class AttentionStrength(NamedTuple):
    """The coefficient of `Attention`: θ₁ = γ²/τ0² of B₁, at least κ²; and κ² of 𝒜."""

    drift: Float[Any, "..."]
    noise: Float[Any, "..."]


@dataclasses.dataclass(frozen=True)
class Attention(AbstractTerm):
    """Attention's drift and noise; the coefficient is an `AttentionStrength`.

    B₁ = V ∘ T + (v sV + (v sV)ᵀ)/2, see `attention_drift`, is split as follows.

    - The noise contributes κ² V ∘ T to the drift of V; `noise` is without drift on X.
    - The rest of the first part, (θ₁ − κ²) V ∘ T, is positive semi-definite, as the entrywise product of two such
      matrices (Schur), and is added to V as a kernel. Without a pattern it is a multiple of V and moves X instead.
    - The second part moves X by (θ₁/2) v s X.

    Attributes:
        pattern: which tokens each token attends to.
        as_kernel: whether the first part is a kernel also without a pattern, as between prompts.
    """

    pattern: Pattern = EVERY_TOKEN
    as_kernel: bool = False

    @property
    def columns(self) -> int:
        """Two normals per entry: G and U of `attention_noise_flow`."""
        return 2

    def of_prompts(self) -> "Attention":
        """With the first part as a kernel."""
        return Attention(self.pattern, as_kernel=True)

    def drift(self, c: AttentionStrength, V):
        """θ₁ B₁(V)."""
        return c.drift * attention_drift(V, self.pattern)

    def flow(self, c: AttentionStrength, X, h):
        """The parts that move X, by the midpoint rule."""

        def velocity(X):
            parts = AttentionDrift.at(self.pattern, X)
            turned = c.drift * parts.turn(X)
            return turned if self._has_kernel else (c.drift - c.noise) / 2 * parts.overlap * X + turned

        return where_present(c, lambda X: X + h * velocity(X + h / 2 * velocity(X)), X)

    def noise(self, c: AttentionStrength, X, h, G):
        """See `attention_noise_flow`."""
        return where_present(c, lambda X: attention_noise_flow(self.pattern, c.noise, X, h, G), X)

    def change(self, c: AttentionStrength, X, h):
        """The change by θ₁ h B₁, relative to V: an upper bound with a pattern."""
        return AttentionDrift.at(self.pattern, X).change(h * c.drift, X)

    def kernel(self, c: AttentionStrength) -> AddedKernel | None:
        """(θ₁ − κ²) V ∘ T."""
        if not self._has_kernel:
            return None
        strength = c.drift - c.noise

        def of_tokens(V):
            between = differences(self.pattern, transpose(differences(self.pattern, V)))
            return strength * V * overlap(self.pattern, len(V), between)

        def of_tangents(S):
            return strength * (Kernel.of(S) * self._overlap_of_prompts(S)).joint

        return AddedKernel(strength > 0, jnp.zeros_like(strength), of_tokens, of_tangents)

    @property
    def _has_kernel(self) -> bool:
        return self.as_kernel or not self.pattern.everything

    def _overlap_of_prompts(self, S: Float[Array, "rows rows ..."]) -> Kernel:
        """The kernel T_αβ = N̂ (F ∘ F) N̂ᵀ, from F = R V Rᵀ."""
        half = len(S) // 2

        def of_both(Z):
            return jnp.concatenate([differences(self.pattern, Z[:half]), differences(self.pattern, Z[half:])])

        F = Kernel.of(of_both(transpose(of_both(S))))
        selected = constant_like(centring(self.pattern, half).selected, S)
        return Kernel(*(matmul(matmul(selected, part), transpose(selected)) for part in F * F))


class AttentionDrift(NamedTuple):
    """The parts of B₁ at a factor X of V: T, diag V/m_α and s; without a pattern T is one number and s a vector."""

    overlap: Float[Array, "..."]
    v: Float[Array, "m ..."]
    s: Float[Array, "..."]

    @classmethod
    def at(cls, pattern: Pattern, X: Float[Array, "m k ..."]) -> "AttentionDrift":
        """The parts at a factor."""
        tokens, norms = len(X), total(X * X, axis=1)
        if pattern.everything:
            centred, K = centred_gram(X)
            distances = total(centred * centred, axis=1)  # squared, to the mean of the tokens
            return cls(total(total(K * K)) / tokens**2, norms / tokens, distances - total(distances) / tokens)
        size = centring(pattern, tokens).size.astype(X.dtype).reshape(-1, *(1,) * (X.ndim - 2))
        # s does not depend on a common shift of all tokens; removing the shift avoids its rounding.
        _, s = attention_drift_vectors(gram(X - total(X) / tokens), pattern)
        return cls(overlap(pattern, tokens, gram(differences(pattern, X))), norms / size, s)

    def turn(self, X: Float[Array, "m k ..."]) -> Float[Array, "m k ..."]:
        """The move v s X/2 of a factor by the second part."""
        moved = matmul(self.s, X) if self.s.ndim == X.ndim else total(self.s[:, None] * X)[None]
        return self.v[:, None] * moved / 2

    def change(self, theta_h: Float[Array, "..."], X: Float[Array, "m k ..."]) -> Float[Array, "..."]:
        """The change of V over a step, relative to V, from θ₁ h: growth by the first part and twice ‖ΔX‖/‖X‖.

        ‖V ∘ T‖ is at most ‖V‖ times the largest entry of T, which is on its diagonal.
        """
        largest = self.overlap if self.s.ndim < X.ndim else jnp.max(diagonal(self.overlap), axis=0)
        growth, turned, X = jax.lax.stop_gradient((theta_h * largest, theta_h * self.turn(X), X))
        size = total(total(X * X))
        return growth + 2 * jnp.sqrt(total(total(turned * turned)) / jnp.where(size > 0, size, 1.0))


def attention_drift[T: (Array, np.ndarray)](
    V: Float[T, "m m ..."], pattern: Pattern = EVERY_TOKEN
) -> Float[T, "m m ..."]:
    """B₁(V) = V ∘ T + (v sV + (v sV)ᵀ)/2, with b = (γ²/τ0²) B₁ in Theorem 4.2, for any attention pattern; in O(m³).

    In row α the double sum of S₁ and the sum of S₂ (Theorem 4.2) run over the m_α tokens to which α attends, centred
    by H_α. The first gives T_αβ = tr(V H_α V H_β)/(m_α m_β); in the second, v = diag V/m_α scales the rows of s
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
