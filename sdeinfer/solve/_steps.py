"""One step of a factor X of V = XXᵀ that keeps V positive semi-definite: every term acts on X from the left or from
the right, adds to X, or adds a covariance to V.
"""  # noqa: D205

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from sdeinfer.covariance import (
    centred_gram,
    factor_noise,
    gram,
    matmul,
    pattern_noise,
    semidefinite_cholesky,
    transpose,
)
from sdeinfer.terms import AttentionDrift, Limit, relu_drift


@jax.jit
def psd_step(
    limit: Limit,
    X: Float[Array, "m m ..."],
    h: Float[Array, ""],
    G: Float[Array, "m k ..."],
) -> tuple[Float[Array, "m m ..."], Float[Array, "..."]]:
    """Advance a factor of V by h.

    Arguments:
        limit: coefficients of the SDE.
        X: factor of V.
        h: step in depth-time.
        G: independent normals of variance h, with the shape of `Limit.normals`.

    Returns:
        a factor of V after the step; and the change of V by attention's drift at the start of the step, relative to V.
        Where this change exceeds 1 the factor is finite but invalid.
    """
    step = _step_without_mask if limit.pattern.everything else _step_with_pattern
    X, change = step(limit, X, h, G)
    for term, c in limit.others.items():
        X = term.flow(c, X, h)
    return X, change


def _step_without_mask(limit: Limit, X: Array, h: Array, G: Array) -> tuple[Array, Array]:
    """Every term acts on X from the left or from the right, or is the arc-cosine kernel, and takes half the normals.

    - Noise from the right: X ← X (I + E), E with independent rows of covariance h ((a/2) I + (κ²/m²) K²), K = XᵀH_mX.
      The mean of (I + E)(I + E)ᵀ is 1 + h (a m/2 + κ² T) times I, with T = tr(K²)/m² = tr(V C)/m².
    - Dividing V by this factor keeps its mean; multiplying V by 1 + h θ₁ T is the attention drift's first term.
    - The attention drift's second term: X ← (I + h θ₁/(2m) v sᵀ) X, with v = diag V and s the centred diag C.
    - The ReLU's drift: V ← (1 − w) V + w κ₁(V) with w = 1 − e^{−hθ₂/2} and κ₁ = V + 2B₂ the arc-cosine kernel, which is
      positive semi-definite; X becomes a Cholesky factor of the sum.
    """
    seen = _attended(limit, X)
    drift, K, theta = AttentionDrift.at(limit.pattern, seen), centred_gram(seen)[1], h * limit.attention_drift
    change = drift.change(theta, X)
    goes_on = change <= 1  # not where V overflows, either
    drift, K = drift.where(goes_on), jnp.where(goes_on, K, 0.0)

    spread = limit.linear_noise * len(X) / 2 + limit.attention_noise * drift.overlap
    X = X + matmul(X, factor_noise(K, G, limit.linear_noise, limit.attention_noise))
    X = X * jnp.sqrt((1 + theta * drift.overlap) / (1 + h * spread))
    X = X + theta * drift.turn(X)
    return _align(X, -jnp.expm1(-h * limit.relu_drift / 2)), change


def _step_with_pattern(limit: Limit, X: Array, h: Array, G: Array) -> tuple[Array, Array]:
    """Every term adds to X, acts on it from the left, or adds a covariance to V.

    - Noise: X ← X + N with `pattern_noise`'s N. The mean of N Nᵀ is h ((a m/2) V + κ² V ∘ T), with the overlap
      T_αβ = tr(V H_α V H_β)/(m_α m_β), and the division X ← X/√(1 + h a m/2) cancels the first of these terms.
    - The attention drift's first term, θ₁ V ∘ T: the noise contributes κ² V ∘ T, and (θ₁ − κ²) V ∘ T, θ₁ ≥ κ², remains,
      which is positive semi-definite as the entrywise product of two such matrices (Schur).
    - The attention drift's second term: X ← (I + (h θ₁/2) v s) X, with v = diag V/m_α scaling the rows of s.
    - The ReLU's drift as without a mask; X becomes a Cholesky factor of the sum.
    """
    theta, kappa2, seen = h * limit.attention_drift, limit.attention_noise, _attended(limit, X)
    drift = AttentionDrift.at(limit.pattern, seen)
    change = drift.change(theta, X)
    goes_on = change <= 1  # not where V overflows, either
    drift = drift.where(goes_on)

    growth = (theta - h * kappa2) * gram(X) * drift.overlap
    X = X + pattern_noise(limit.pattern, X, G, limit.linear_noise, jnp.where(goes_on, kappa2, 0.0))
    X = X / jnp.sqrt(1 + h * limit.linear_noise * len(X) / 2)
    X = X + theta * drift.turn(X)
    V = gram(X) + growth
    w = -jnp.expm1(-h * limit.relu_drift / 2)
    return semidefinite_cholesky(V + 2 * w * relu_drift(V)), change


def _attended(limit: Limit, X: Float[Array, "m m ..."]) -> Float[Array, "m m ..."]:
    """The factors of paths with attention, 0 of the others, whose terms of attention must not overflow."""
    return jnp.where((limit.attention_drift > 0) | (limit.attention_noise > 0), X, 0.0)


def _align(X: Float[Array, "m m ..."], w: Float[Array, "..."]) -> Float[Array, "m m ..."]:
    """A factor of (1 − w) V + w κ₁(V) = V + 2w B₂(V); X itself where w = 0, without a factorisation."""

    def factorise(X):
        V = matmul(X, transpose(X))
        return jnp.where(w > 0, semidefinite_cholesky(V + 2 * w * relu_drift(V)), X)

    return jax.lax.cond(jnp.any(w > 0), factorise, lambda X: X, X)
