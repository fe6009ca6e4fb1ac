"""Σ(V) under a causal mask, where row α of attention sees the first m_α = α tokens, counted from 1.

H_α, the centring over the first α tokens, is a sum of projections that do not depend on α,

    H_α = Σ_{ν≤α} r_ν r_νᵀ,    r_ν = √((ν−1)/ν) (1_ν − mean of 1_1, …, 1_{ν−1}),    r_1 = 0,

since one more token adds its difference from the mean of those before it. With R the matrix of rows r_ν and E = R X,
V = XXᵀ, sums over α of products with H_α become triangular parts of matrix products: everything is O(m³).

The noise of attention is M + Mᵀ with M_αω = (1/m_α) (X G Xᵀ H_α V)_αω, so that M = D⁻¹ tril(X G Eᵀ) E Xᵀ, D = diag m_α.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.linalg import solve_triangular
from jaxtyping import Array, Float

from sdeinfer.covariance._batched import matmul, transpose
from sdeinfer.covariance._matrix import pairs, safe_sqrt, unvech, vech

ROUNDING = 64
"""An eigenvalue of 𝒜 below this multiple of eps times the largest is a zero that was rounded."""


def successive_differences(X: Float[Array, "m k ..."]) -> Float[Array, "m k ..."]:
    """E = R X: the scaled difference of every token from the mean of those before it."""
    return matmul(_constant(_differences(len(X)), X), X)


def running_mean(A: Float[Array, "m k ..."]) -> Float[Array, "m k ..."]:
    """Means of the first α rows, for every α."""
    return matmul(_constant(_means(len(A)), A), A)


def lower(A: Float[Array, "m m ..."]) -> Float[Array, "m m ..."]:
    """The lower triangle, diagonal included: what a causal mask leaves of a matrix."""
    return _constant(np.tri(len(A)), A) * A


def causal_overlap(F: Float[Array, "m m ..."]) -> Float[Array, "m m ..."]:
    """T_αβ = tr(V H_α V H_β)/(m_α m_β) of F = R V Rᵀ; it is positive semi-definite."""
    return transpose(running_mean(transpose(running_mean(F * F))))


def causal_factor_noise(
    X: Float[Array, "m m ..."],
    G: Float[Array, "m 2*m ..."],
    linear: Float[Array, "..."],
    attention: Float[Array, "..."],
) -> Float[Array, "m m ..."]:
    """N = √(a/2) X G₁ + κ D⁻¹ tril(X G₂ Eᵀ) E: noise of a factor of V = XXᵀ, such that X Nᵀ + N Xᵀ has covariance Σ.

    Unlike noise without a mask, that of one row differs from another's by more than the token: it takes 2m² normals.

    Arguments:
        X: a factor of V.
        G: normals, those of G₁ and of G₂ side by side.
        linear: a.
        attention: κ².
    """
    tokens = len(X)
    E = successive_differences(X)
    seen = lower(matmul(matmul(X, G[:, tokens:]), transpose(E)))
    count = _constant(np.arange(1.0, tokens + 1)[:, None], X)
    return jnp.sqrt(linear / 2) * matmul(X, G[:, :tokens]) + safe_sqrt(attention) / count * matmul(seen, E)


class CausalSpectrum(eqx.Module):
    """What Σ(V) takes from V alone under a causal mask, as `Spectrum` without one.

    In the coordinates L⁻¹ dV L⁻ᵀ, whose entries off the diagonal count √2 times, Σ_lin is 1 and 𝒜 a p×p matrix, of
    which the eigenvectors are coordinates in which the noise is independent for every a and κ².

    Attributes:
        cholesky: L, shape (m, m).
        rotation: the eigenvectors of 𝒜 there, shape (p, p).
        mixing: its eigenvalues e, ascending, shape (p,); m of them at least are zero.
    """

    cholesky: Float[Array, "m m"]
    rotation: Float[Array, "p p"]
    mixing: Float[Array, " p"]

    @property
    def tokens(self) -> int:
        """The number of tokens m."""
        return self.cholesky.shape[0]

    def whiten(self, S: Float[Array, "m m"]) -> Float[Array, "m m"]:
        """The symmetric matrix of coordinates of a symmetric S, its variances those of `Diffusion`."""
        half = solve_triangular(self.cholesky, S, lower=True)
        Z = solve_triangular(self.cholesky, half.T, lower=True)
        root = _root(self.cholesky)
        return unvech(root * (self.rotation.T @ (vech((Z + Z.T) / 2) / root)))

    def colour(self, Z: Float[Array, "m m"]) -> Float[Array, "m m"]:
        """The inverse of `whiten`."""
        root = _root(self.cholesky)
        turned = unvech(root * (self.rotation @ (vech(Z) / root)))
        return self.cholesky @ turned @ self.cholesky.T

    @property
    def log_volume(self) -> Float[Array, ""]:
        """Σ_i log L_ii = ½ log det V."""
        return jnp.sum(jnp.log(jnp.diagonal(self.cholesky)))


def causal_spectrum(V: Float[Array, "m m"]) -> CausalSpectrum:
    """Find the coordinates of V in which Σ(V) is diagonal under a causal mask, in O(p³).

    V must be positive definite: for a singular V the result holds NaN.
    """
    tokens = len(V)
    L = jnp.linalg.cholesky(V)
    E = successive_differences(L)
    inverse = solve_triangular(L, jnp.eye(tokens, dtype=V.dtype), lower=True)
    scaled = inverse / jnp.arange(1, tokens + 1)

    def of_normals(G: Float[Array, "m m"]) -> Float[Array, " p"]:
        """L⁻¹ (M + Mᵀ) L⁻ᵀ, packed."""
        Z = scaled @ jnp.tril(L @ G @ E.T) @ E
        return vech(Z + Z.T) / _root(V)

    columns = jax.vmap(of_normals)(jnp.eye(tokens**2, dtype=V.dtype).reshape(-1, tokens, tokens))
    e, rotation = jnp.linalg.eigh(columns.T @ columns)
    # M has m(m − 1)/2 independent entries before E, which leaves as many eigenvalues that are not zero.
    zero = (jnp.arange(len(e)) < tokens) | (e <= ROUNDING * jnp.finfo(V.dtype).eps * e[-1])
    return CausalSpectrum(L, rotation, jnp.where(zero, 0.0, e))


def _root(like: Float[Array, "m m"]) -> Float[Array, " p"]:
    rows, columns = pairs(len(like))
    return jnp.asarray(np.sqrt(np.where(rows == columns, 2.0, 1.0)), like.dtype)


def _differences(tokens: int) -> np.ndarray:
    """R."""
    R = np.eye(tokens)
    for row in range(1, tokens):
        R[row, :row] = -1 / row
        R[row] *= np.sqrt(row / (row + 1))
    R[0, 0] = 0.0
    return R


def _means(tokens: int) -> np.ndarray:
    return np.tri(tokens) / np.arange(1, tokens + 1)[:, None]


def _constant(values: np.ndarray, like: Array) -> Array:
    """An array of shape (m, k), as one that broadcasts along the batch."""
    return jnp.asarray(values, like.dtype).reshape(*values.shape, *(1,) * (like.ndim - 2))
