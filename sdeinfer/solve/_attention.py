"""Attention's drift at a factor X of V: V ∘ T + (v sV + (v sV)ᵀ)/2 in units of θ₁ (Theorem 4.2)."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from sdeinfer.covariance import Pattern, centred_gram, centring, diagonal, differences, gram, matmul, overlap, total
from sdeinfer.layers import Limit, attention_drift_vectors


class AttentionDrift(NamedTuple):
    """The parts of attention's drift in units of θ₁.

    Attributes:
        overlap: T, one number without a pattern, else shape (m, m, ...).
        v: diag V/m_α, shape (m, ...).
        s: the vector s without a pattern, else its rows; shape (m, ...) or (m, m, ...).
    """

    overlap: Float[Array, "..."]
    v: Float[Array, "m ..."]
    s: Float[Array, "..."]

    @classmethod
    def at(cls, pattern: Pattern, X: Float[Array, "m m ..."]) -> "AttentionDrift":
        """The parts at a factor."""
        tokens, norms = len(X), total(X * X, axis=1)
        if pattern.everything:
            centred, K = centred_gram(X)
            centred_norms = total(centred * centred, axis=1)
            return cls(total(total(K * K)) / tokens**2, norms / tokens, centred_norms - total(centred_norms) / tokens)
        size = centring(pattern, tokens).size.astype(X.dtype).reshape(-1, *(1,) * (X.ndim - 2))
        # s does not depend on a common shift of all tokens; removing the shift avoids its rounding.
        _, s = attention_drift_vectors(gram(X - total(X) / tokens), pattern)
        return cls(overlap(pattern, tokens, gram(differences(pattern, X))), norms / size, s)

    def turn(self, X: Float[Array, "m m ..."]) -> Float[Array, "m m ..."]:
        """The move v s X/2 of a factor by the second term."""
        moved = matmul(self.s, X) if self.s.ndim == X.ndim else total(self.s[:, None] * X)[None]
        return self.v[:, None] * moved / 2

    def where(self, condition: Array) -> "AttentionDrift":
        """The drift of the paths for which the condition holds, 0 of the others."""
        return jax.tree.map(lambda x: jnp.where(condition, x, 0.0), self)

    def change(self, theta: Float[Array, "..."], X: Float[Array, "m m ..."]) -> Float[Array, "..."]:
        """The change of V by θ₁ h of the drift, relative to V.

        ‖V ∘ T‖ is at most ‖V‖ times the largest entry of T, which is on its diagonal.
        """
        largest = self.overlap if self.s.ndim < X.ndim else jnp.max(diagonal(self.overlap), axis=0)
        return relative_change(theta * largest, theta * self.turn(X), X)


def attention_change(limit: Limit, X: Float[Array, "m m ..."], h: Float[Array, ""]) -> Float[Array, "..."]:
    """The change of V by attention's drift over a step of length h, relative to V: an upper bound with a pattern."""
    return AttentionDrift.at(limit.pattern, X).change(h * limit.attention_drift, X)


def relative_change(growth: Array, turned: Array, X: Array) -> Float[Array, "..."]:
    """Relative growth of V by the first term of attention's drift, plus twice ‖change of X‖/‖X‖ by the second."""
    growth, turned, X = jax.lax.stop_gradient((growth, turned, X))
    size = total(total(X * X))
    return growth + 2 * jnp.sqrt(total(total(turned * turned)) / jnp.where(size > 0, size, 1.0))
