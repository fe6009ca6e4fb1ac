"""The flows of which `PSDSplitting` composes a step: parts of the covariance SDE, each of weak order 2.

Every flow maps a factor X of V = XXᵀ to a factor. The noises leave E V unchanged: their flows have no drift, in the
sense of Itô, on X (attention) or on V (linear).
"""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from sdeinfer.covariance import (
    Pattern,
    attended_mean,
    centred_gram,
    centring,
    constant_like,
    diagonal,
    differences,
    gram,
    identity_like,
    matmul,
    overlap,
    safe_sqrt,
    semidefinite_cholesky,
    total,
    transpose,
)
from sdeinfer.layers import Limit, relu_drift
from sdeinfer.solve._attention import AttentionDrift


def linear_noise_flow(
    limit: Limit, X: Float[Array, "m m ..."], h: Float[Array, ""], G: Float[Array, "m m ..."]
) -> Float[Array, "m m ..."]:
    """The noise a Σ_lin: X ← X M, with a random matrix M whose law does not depend on X.

    The SDE is dX = √(a/2) X dG − (a m/4) X dt. The trace of G scales X, exactly. Its traceless part G₀ enters by
    Talay's scheme of weak order 2, I + G₀ + (G₀² − E G₀²)/2 with the increments √(a/2) G₀. That scheme also needs
    independent noises along the commutators of the E_ij. Their covariance, ((a h/2)²/4) (m Σ_ij E_ij ⊗ E_ij − I ⊗ I),
    is a multiple of G₀'s own: G₀ times √(1 + a m h/8) replaces them. The division by the root of c = E tr(M Mᵀ)/m keeps
    E V exactly.

    Arguments:
        limit: coefficients of the SDE.
        X: factor of V.
        h: step in depth-time.
        G: independent normals of variance h.
    """
    m, variance = len(X), limit.linear_noise * h / 2
    root, identity = safe_sqrt(limit.linear_noise / 2), identity_like(X)
    stretch = 1 + variance * m / 4
    mean = total(diagonal(G)) / m
    G0 = root * jnp.sqrt(stretch) * (G - mean * identity)
    start = 1 - variance * (1 - 1 / m) / 2
    M = start * identity + G0 + matmul(G0, G0) / 2
    # For standard normals E tr G₀G₀ᵀ = m² − 1, E tr G₀² = m − 1 and E tr G₀²(G₀²)ᵀ = m³ − 2m − 2 + 3/m.
    second = stretch * variance * (m - 1 / m + start * (1 - 1 / m))
    c = start**2 + second + (stretch * variance) ** 2 * (m**2 - 2 - 2 / m + 3 / m**2) / 4
    return matmul(X, M) * (jnp.exp(root * mean - variance / m) / jnp.sqrt(c))


def attention_noise_flow(
    limit: Limit, X: Float[Array, "m m ..."], h: Float[Array, ""], G: Float[Array, "m 2*m ..."]
) -> Float[Array, "m m ..."]:
    """The noise of attention, dX = b(X)[dG], whose drift on V is κ² V ∘ T.

    Talay's scheme of weak order 2 for an SDE without drift in the sense of Itô, with b linear in the increments,

        X + b[G] + ½ (Db[G] b[G] − h Σ_j Db_j b_j) + (h/4) Σ_j D²b[G](b_j, b_j) + ½ Σ_jk V_jk Db_k b_j.

    The antisymmetric V_jk = (G_j U_k − G_k U_j)/√2, with independent normals U, have the moments that the scheme needs,
    and the expectation over U of D²b[G](b[U], b[U]) is the sum of the second derivatives. Hence no sum over the
    m² noises remains except the deterministic one, which has a closed form.

    Arguments:
        limit: coefficients of the SDE.
        X: factor of V.
        h: step in depth-time.
        G: the increments G and U, independent normals of variance h, side by side.
    """
    m, kappa = len(X), safe_sqrt(limit.attention_noise)
    G, U = G[:, :m], G[:, m:]
    if limit.pattern.everything:
        return matmul(X, _attention_multiplier(centred_gram(X)[1], kappa / m, h, G, U))
    first = attention_noise(limit.pattern, X, G)
    aside = attention_noise(limit.pattern, X, U)
    _, turned = jax.jvp(lambda X: attention_noise(limit.pattern, X, G + U / math.sqrt(2)), (X,), (first,))
    # ¼ b(X − √2 b[U])[G] = ¼ b[G] − Db[G] b[U]/(2√2) + ¼ D²b[G](b[U], b[U]) + terms that do not matter
    beside = attention_noise(limit.pattern, X - math.sqrt(2) * kappa * aside, G)
    second = turned - h * attention_noise_square(limit.pattern, X)
    return X + kappa * (0.75 * first + 0.25 * beside) + limit.attention_noise / 2 * second


def _attention_multiplier(K: Array, scale: Array, h: Array, G: Array, U: Array) -> Array:
    """M of X ← X M without a pattern, where b(X)[G] = X E with E = (κ/m) G K.

    A move of X by X F takes K to (I + F)ᵀ K (I + F). The step is that with a pattern, with two thirds of the products.
    """
    E, F, identity = scale * matmul(G, K), scale * matmul(U, K), identity_like(K)
    moved, KE = identity - math.sqrt(2) * F, matmul(K, E)
    beside = scale * matmul(moved, matmul(G, matmul(transpose(moved), matmul(K, moved))))
    turned = matmul(E, E + F / math.sqrt(2)) + scale * matmul(G + U / math.sqrt(2), KE + transpose(KE))
    square = scale**2 * (2 * matmul(K, K) + total(diagonal(K)) * K)
    return identity + 0.75 * E + 0.25 * beside + (turned - h * square) / 2


def attention_noise(
    pattern: Pattern, X: Float[Array, "m m ..."], G: Float[Array, "m m ..."]
) -> Float[Array, "m m ..."]:
    """b(X)[G] for κ = 1: X G XᵀH_mX/m, or [N̂ ∘ (X G Eᵀ)] E with a pattern (see `pattern_noise`)."""
    if pattern.everything:
        _, K = centred_gram(X)
        return matmul(matmul(X, G), K) / len(X)
    E = differences(pattern, X)
    attended = constant_like(centring(pattern, len(X)).selected, X) * matmul(matmul(X, G), transpose(E))
    return matmul(attended, E)


def attention_noise_square(pattern: Pattern, X: Float[Array, "m m ..."]) -> Float[Array, "m m ..."]:
    """Σ_j Db_j(X) b_j(X) over the m² unit matrices j, for κ = 1: X (2K² + tr(K) K)/m² without a pattern.

    With a pattern Db has three terms, one for each X in [N̂ ∘ (X G Eᵀ)] E. With A = XEᵀ, F = EEᵀ and the attended means
    P, the sums are [((N̂ ∘ A) F) ∘ N̂] E, [N̂ ∘ ((V ∘ 1qᵀ) Rᵀ)] E with q = N̂ diag F, and
    (V ∘ P) (N̂ ∘ A) E − [PA ∘ ((V ∘ P) N̂)] E.
    """
    if pattern.everything:
        _, K = centred_gram(X)
        return matmul(X, 2 * matmul(K, K) + total(diagonal(K)) * K) / len(X) ** 2
    matrices = centring(pattern, len(X))
    selected, mean, R = (constant_like(part, X) for part in (matrices.selected, matrices.mean, matrices.differences))
    E, V = differences(pattern, X), gram(X)
    A, F = matmul(X, transpose(E)), gram(E)
    attended, near = selected * A, mean * V
    q = matmul(selected, diagonal(F)[:, None])[:, 0]
    left = selected * (matmul(attended, F) + matmul(V * q[None], transpose(R)))
    left = left - attended_mean(pattern, A) * matmul(near, selected)
    return matmul(left, E) + matmul(near, matmul(attended, E))


def attention_drift_flow(limit: Limit, X: Float[Array, "m m ..."], h: Float[Array, ""]) -> Float[Array, "m m ..."]:
    """Attention's drift as far as it acts on X, by the midpoint rule.

    Without a pattern that is all that the noise leaves, dX/dt = ½ (θ₁ − κ²) T X + (θ₁/(2m)) v sᵀX; with one, its second
    term, dX/dt = (θ₁/2) v s X. The noise's flow gives the rest of the first term, κ² V ∘ T.
    """

    def velocity(X):
        drift = AttentionDrift.at(limit.pattern, X)
        turned = limit.attention_drift * drift.turn(X)
        if not limit.pattern.everything:
            return turned
        return (limit.attention_drift - limit.attention_noise) / 2 * drift.overlap * X + turned

    return X + h * velocity(X + h / 2 * velocity(X))


def kernel_flow(limit: Limit, X: Float[Array, "m m ..."], h: Float[Array, ""]) -> Float[Array, "m m ..."]:
    """The drift that adds covariances to V: dV/dt = λ (κ₁(V) − V) + (θ₁ − κ²) V ∘ T, λ = θ₂/2.

    κ₁ = V + 2B₂ is the arc-cosine kernel. The second term is there with an attention pattern only; without one V ∘ T is
    a multiple of V. The exponential Heun scheme, with N = λ κ₁ + (θ₁ − κ²) V ∘ T and s = λh,

        V* = e^{−s} V + h φ₁ N(V),    V′ = e^{−s} V + h (φ₁ − φ₂) N(V) + h φ₂ N(V*),

    φ₁ = (1 − e^{−s})/s and φ₂ = (e^{−s} − 1 + s)/s², adds positive semi-definite matrices with positive weights. X
    becomes a Cholesky factor of V′; without such a drift it stays as it is, without a factorisation.
    """
    rate, attention = limit.relu_drift / 2, limit.attention_drift - limit.attention_noise

    def added(V):
        kernel = rate * (V + 2 * relu_drift(V))
        if limit.pattern.everything:
            return kernel
        T = overlap(limit.pattern, len(V), differences(limit.pattern, transpose(differences(limit.pattern, V))))
        return kernel + attention * V * T

    def factorise(X):
        V, s = gram(X), h * rate
        decay, (first, second) = jnp.exp(-s), _phi(s)
        N = added(V)
        N_end = added(decay * V + h * first * N)
        end = semidefinite_cholesky(decay * V + h * (first - second) * N + h * second * N_end)
        return jnp.where(moves, end, X)

    moves = (rate > 0) if limit.pattern.everything else (rate > 0) | (attention > 0)
    return jax.lax.cond(jnp.any(moves), factorise, lambda X: X, X)


def _phi(s: Float[Array, "..."]) -> tuple[Array, Array]:
    """φ₁ and φ₂ of s ≥ 0; by their series where s is small."""
    small = s < 0.1
    away = jnp.where(small, 1.0, s)
    decayed = -jnp.expm1(-away)
    first = 1 - s / 2 * (1 - s / 3 * (1 - s / 4 * (1 - s / 5 * (1 - s / 6 * (1 - s / 7)))))
    second = (1 - s / 3 * (1 - s / 4 * (1 - s / 5 * (1 - s / 6 * (1 - s / 7 * (1 - s / 8)))))) / 2
    return jnp.where(small, first, decayed / away), jnp.where(small, second, (away - decayed) / away**2)
