"""The noise of attention as a flow of weak order 2, dX = b(X)[dG]; its covariance is κ² 𝒜 (Theorem 4.2).

Tests: `tests/solve/test_splitting.py`.
"""

import math

import jax
from jaxtyping import Array, Float

from sdeinfer.covariance import Pattern
from sdeinfer.covariance._batched import diagonal, gram, identity_like, matmul, total, transpose
from sdeinfer.covariance._diffusion import centred_gram
from sdeinfer.covariance._matrix import safe_sqrt
from sdeinfer.covariance._pattern import centring
from sdeinfer.covariance._pattern_noise import attended_mean, constant_like, differences


def attention_noise_flow(
    pattern: Pattern,
    kappa2: Float[Array, "..."],
    X: Float[Array, "m k ..."],
    h: Float[Array, ""],
    increments: Float[Array, "k 2*k ..."],
) -> Float[Array, "m k ..."]:
    """The noise of attention, dX = b(X)[dG], whose drift on V is κ² V ∘ T.

    Talay's scheme of weak order 2 for an SDE without drift in the sense of Itô, with b linear in the increments,

        X + b[G] + ½ (Db[G] b[G] − h Σ_j Db_j b_j) + (h/4) Σ_j D²b[G](b_j, b_j) + ½ Σ_jk A_jk Db_k b_j.

    The antisymmetric A_jk = (G_j U_k − G_k U_j)/√2, with independent normals U, have the moments that the scheme needs,
    and the expectation over U of D²b[G](b[U], b[U]) is the sum of the second derivatives. Hence no sum over the
    k² noises remains except the deterministic one, which has a closed form. `increments` are G and U side by side:
    independent normals of variance h, the step in depth-time.
    """
    (tokens, k), kappa = X.shape[:2], safe_sqrt(kappa2)
    G, U = increments[:, :k], increments[:, k:]
    if pattern.everything:
        return matmul(X, _attention_multiplier(centred_gram(X)[1], kappa / tokens, h, G, U))
    b_G, b_U = attention_noise(pattern, X, G), attention_noise(pattern, X, U)
    # Db[G + U/√2] b[G]; half of it is ½ Db[G] b[G] and the term of A with Db[U] b[G].
    _, derivative = jax.jvp(lambda X: attention_noise(pattern, X, G + U / math.sqrt(2)), (X,), (b_G,))
    # ¼ b(X − √2 b[U])[G] = ¼ b[G] − Db[G] b[U]/(2√2) + ¼ D²b[G](b[U], b[U]) and a term in G and U³, which is of order
    # h² and has mean 0, so that it does not change the weak order.
    b_G_moved = attention_noise(pattern, X - math.sqrt(2) * kappa * b_U, G)
    second_order = derivative - h * attention_noise_square(pattern, X)
    return X + kappa * (0.75 * b_G + 0.25 * b_G_moved) + kappa2 / 2 * second_order


def _attention_multiplier(K: Array, scale: Array, h: Array, G: Array, U: Array) -> Array:
    """M of X ← X M without a pattern, where b(X)[G] = X E with E = (κ/m) G K.

    A move of X by X F takes K to (I + F)ᵀ K (I + F), and Σ_j Db_j b_j = X (2K² + tr(K) K)/m² for κ = 1. The step is
    that with a pattern, with two thirds of the products.
    """
    E, F, identity = scale * matmul(G, K), scale * matmul(U, K), identity_like(K)
    moved, KE = identity - math.sqrt(2) * F, matmul(K, E)
    E_moved = scale * matmul(moved, matmul(G, matmul(transpose(moved), matmul(K, moved))))
    derivative = matmul(E, E + F / math.sqrt(2)) + scale * matmul(G + U / math.sqrt(2), KE + transpose(KE))
    square = scale**2 * (2 * matmul(K, K) + total(diagonal(K)) * K)
    return identity + 0.75 * E + 0.25 * E_moved + (derivative - h * square) / 2


def attention_noise(
    pattern: Pattern, X: Float[Array, "m k ..."], G: Float[Array, "k k ..."]
) -> Float[Array, "m k ..."]:
    """b(X)[G] for κ = 1: X G XᵀH_mX/m, or [N̂ ∘ (X G Eᵀ)] E with a pattern."""
    if pattern.everything:
        _, K = centred_gram(X)
        return matmul(matmul(X, G), K) / len(X)
    E = differences(pattern, X)
    attended = constant_like(centring(pattern, len(X)).selected, X) * matmul(matmul(X, G), transpose(E))
    return matmul(attended, E)


def attention_noise_square(pattern: Pattern, X: Float[Array, "m k ..."]) -> Float[Array, "m k ..."]:
    """Σ_j Db_j(X) b_j(X) over the k² unit matrices j, for κ = 1 and a pattern.

    Db has three terms, one for each X in [N̂ ∘ (X G Eᵀ)] E. With A = XEᵀ, F = EEᵀ and the attended means P, the sums are
    [((N̂ ∘ A) F) ∘ N̂] E, [N̂ ∘ ((V ∘ 1qᵀ) Rᵀ)] E with q = N̂ diag F, and (V ∘ P) (N̂ ∘ A) E − [PA ∘ ((V ∘ P) N̂)] E.
    """
    matrices = centring(pattern, len(X))
    selected, mean, R = (constant_like(part, X) for part in (matrices.selected, matrices.mean, matrices.differences))
    E, V = differences(pattern, X), gram(X)
    A, F = matmul(X, transpose(E)), gram(E)
    attended, near = selected * A, mean * V
    q = matmul(selected, diagonal(F)[:, None])[:, 0]
    left = selected * (matmul(attended, F) + matmul(V * q[None], transpose(R)))
    left = left - attended_mean(pattern, A) * matmul(near, selected)
    return matmul(left, E) + matmul(near, matmul(attended, E))
