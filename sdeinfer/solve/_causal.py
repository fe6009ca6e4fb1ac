"""One step of a factor of V for attention with a causal mask."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from sdeinfer.covariance import (
    causal_factor_noise,
    causal_overlap,
    diagonal,
    gram,
    matmul,
    semidefinite_cholesky,
    successive_differences,
    total,
)
from sdeinfer.layers import Limit, causal_drift_vectors, relu_drift


@jax.jit
def causal_psd_step(
    limit: Limit,
    X: Float[Array, "m m ..."],
    h: Float[Array, ""],
    G: Float[Array, "m 2*m ..."],
) -> tuple[Float[Array, "m m ..."], Float[Array, "..."]]:
    """Advance a factor of V by h; every term adds to X, acts on it from the left, or adds a covariance to V.

    - Noise: X ← X + N with `causal_factor_noise`'s N. The mean of N Nᵀ is h ((a m/2) V + κ² V ∘ T), with the overlap
      T_αβ = tr(V H_α V H_β)/(m_α m_β), and the division X ← X/√(1 + h a m/2) cancels the first of these terms.
    - The attention drift's first term, θ₁ V ∘ T: the noise contributes κ² V ∘ T, and (θ₁ − κ²) V ∘ T, θ₁ ≥ κ², remains,
      which is positive semi-definite as the entrywise product of two such matrices (Schur).
    - The attention drift's second term: X ← (I + (h θ₁/2) v s) X, with v = diag V/m_α scaling the rows of s.
    - The ReLU's drift as without a mask (`psd_step`); X becomes a Cholesky factor of the sum.

    Arguments and result are those of `psd_step`, except that G holds 2m normals of variance h for each token.
    """
    tokens = len(X)
    theta, kappa2 = limit.attention_drift, limit.attention_noise
    # Without attention these terms do not enter the step and must not overflow.
    seen = jnp.where((theta > 0) | (kappa2 > 0), X, 0.0)
    overlap = causal_overlap(gram(successive_differences(seen)))
    # s does not depend on a common shift of all tokens; removing the shift avoids its rounding.
    _, s = causal_drift_vectors(gram(seen - total(seen) / tokens))
    count = jnp.arange(1, tokens + 1, dtype=X.dtype).reshape(-1, *(1,) * (X.ndim - 2))
    push = h * theta / 2 * total(X * X, axis=1) / count

    change = _relative_change(h * theta * overlap, push, s, X)
    explodes = ~(change <= 1)  # NaN, where V overflows, counts as more than 1
    overlap, push, s = (jnp.where(explodes, 0.0, x) for x in (overlap, push, s))

    growth = h * (theta - kappa2) * gram(X) * overlap
    X = X + causal_factor_noise(X, G, limit.linear_noise, jnp.where(explodes, 0.0, kappa2))
    X = X / jnp.sqrt(1 + h * limit.linear_noise * tokens / 2)
    X = X + push[:, None] * matmul(s, X)
    V = gram(X) + growth
    w = -jnp.expm1(-h * limit.relu_drift / 2)
    return semidefinite_cholesky(V + 2 * w * relu_drift(V)), change


def _relative_change(growth, push, s, X):
    """Relative growth of V by the first term of attention's drift, plus twice that of X by the second term."""
    growth, push, s, X = jax.lax.stop_gradient((growth, push, s, X))
    size, turned = total(total(X * X)), push[:, None] * matmul(s, X)
    # ‖V ∘ T‖ is at most ‖V‖ times the largest entry of T, which is on its diagonal.
    largest = jnp.max(diagonal(growth), axis=0)
    return largest + 2 * jnp.sqrt(total(total(turned * turned)) / jnp.where(size > 0, size, 1.0))
