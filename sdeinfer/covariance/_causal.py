"""Σ(V) under a causal mask, where row α of attention sees the first m_α = α tokens, counted from 1.

H_α, the centring over the first α tokens, is a sum of projections that do not depend on α,

    H_α = Σ_{ν≤α} r_ν r_νᵀ,    r_ν = √((ν−1)/ν) (1_ν − mean of 1_1, …, 1_{ν−1}),    r_1 = 0,

because each further token adds its difference from the mean of the previous ones. With R the matrix of rows r_ν and
E = R X, V = XXᵀ, sums over α of products with H_α become triangular parts of matrix products: everything is O(m³).

The noise of attention is M + Mᵀ with M_αω = (1/m_α) (X G Xᵀ H_α V)_αω, so that M = D⁻¹ tril(X G Eᵀ) E Xᵀ, D = diag m_α.
"""

import math
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from sdeinfer.covariance._batched import matmul, transpose
from sdeinfer.covariance._factors import cholesky_of, eigh_of, inverse_lower, log_volume_of, whiten_by
from sdeinfer.covariance._matrix import pairs, safe_sqrt, unvech, vech

ROUNDING = 64
"""Eigenvalues of 𝒜 up to this multiple of eps times the largest count as zero."""


def successive_differences[T: (Array, np.ndarray)](X: Float[T, "m k ..."]) -> Float[T, "m k ..."]:
    """E = R X: the scaled difference of each token from the mean of the tokens before it."""
    return matmul(_constant(_differences(len(X)), X), X)


def running_mean[T: (Array, np.ndarray)](A: Float[T, "m k ..."]) -> Float[T, "m k ..."]:
    """The mean of the first α rows, for every α."""
    return matmul(_constant(_means(len(A)), A), A)


def lower[T: (Array, np.ndarray)](A: Float[T, "m m ..."]) -> Float[T, "m m ..."]:
    """The lower triangle, diagonal included: the part of a matrix that a causal mask keeps."""
    return _constant(np.tri(len(A)), A) * A


def causal_overlap[T: (Array, np.ndarray)](F: Float[T, "m m ..."]) -> Float[T, "m m ..."]:
    """The positive semi-definite T_αβ = tr(V H_α V H_β)/(m_α m_β), from F = R V Rᵀ."""
    return transpose(running_mean(transpose(running_mean(F * F))))


def causal_factor_noise(
    X: Float[Array, "m m ..."],
    G: Float[Array, "m 2*m ..."],
    linear: Float[Array, "..."],
    attention: Float[Array, "..."],
) -> Float[Array, "m m ..."]:
    """N = √(a/2) X G₁ + κ D⁻¹ tril(X G₂ Eᵀ) E: noise of a factor of V = XXᵀ, such that X Nᵀ + N Xᵀ has covariance Σ.

    Unlike `factor_noise` it takes 2m² normals: under a mask each row of the noise has its own covariance.

    Arguments:
        X: a factor of V.
        G: the normals G₁ and G₂, side by side.
        linear: a.
        attention: κ².
    """
    tokens = len(X)
    E = successive_differences(X)
    seen = lower(matmul(matmul(X, G[:, tokens:]), transpose(E)))
    count = _constant(np.arange(1.0, tokens + 1)[:, None], X)
    return jnp.sqrt(linear / 2) * matmul(X, G[:, :tokens]) + safe_sqrt(attention) / count * matmul(seen, E)


class CausalSpectrum(eqx.Module):
    """The coordinates of V in which Σ(V) is diagonal under a causal mask; the causal counterpart of `Spectrum`.

    In the coordinates L⁻¹ dV L⁻ᵀ, with off-diagonal entries scaled by √2, Σ_lin is the identity and 𝒜 a p×p matrix.
    Along the eigenvectors of 𝒜 the noise is independent for every a and κ².

    Attributes:
        cholesky: L, shape (m, m).
        rotation: eigenvectors of 𝒜 in these coordinates, shape (p, p).
        mixing: eigenvalues e of 𝒜, ascending, shape (p,); at least m of them are zero.
    """

    cholesky: Float[Any, "... m m"]
    rotation: Float[Any, "... p p"]
    mixing: Float[Any, "... p"]

    @property
    def tokens(self) -> int:
        """The number of tokens m."""
        return self.cholesky.shape[-1]

    def whiten[T: (Array, np.ndarray)](self, S: Float[T, "... m m"]) -> Float[T, "... m m"]:
        """The coordinates of a symmetric S, as a symmetric matrix; `Diffusion.std` scales its entries."""
        root = _root(self.tokens, self.cholesky.dtype)
        packed = vech(whiten_by(self.cholesky, S)) / root
        return unvech(root * (packed[..., None, :] @ self.rotation)[..., 0, :])

    def colour[T: (Array, np.ndarray)](self, Z: Float[T, "... m m"]) -> Float[T, "... m m"]:
        """The inverse of `whiten`."""
        root = _root(self.tokens, self.cholesky.dtype)
        turned = unvech(root * (self.rotation @ (vech(Z) / root)[..., None])[..., 0])
        return self.cholesky @ turned @ self.cholesky.mT

    @property
    def log_volume(self) -> Float[Array | np.ndarray, "..."]:
        """Σ_i log L_ii = ½ log det V."""
        return log_volume_of(self.cholesky)


def causal_spectrum(V: Float[Any, "... m m"]) -> CausalSpectrum:
    """Find the coordinates in which Σ(V) is diagonal under a causal mask, in O(p³); NumPy handles NumPy arrays.

    V must be positive definite: for a singular V the result holds NaN.
    """
    xp, tokens = V.__array_namespace__(), V.shape[-1]
    L = cholesky_of(V)
    E = _differences(tokens).astype(V.dtype) @ L
    scaled = inverse_lower(L) / np.arange(1.0, tokens + 1).astype(V.dtype)
    # L⁻¹ (M + Mᵀ) L⁻ᵀ, packed, for the unit matrix G with a one at (a, b): M ∝ tril(L_a E_bᵀ) E.
    seen = L.mT[..., :, None, :, None] * E.mT[..., None, :, None, :] * np.tri(tokens, dtype=V.dtype)
    Z = scaled[..., None, None, :, :] @ seen @ E[..., None, None, :, :]
    columns = vech(Z + Z.mT) / _root(tokens, V.dtype)
    columns = columns.reshape(*V.shape[:-2], tokens**2, -1)
    e, rotation = eigh_of(columns.mT @ columns)
    # M has m(m − 1)/2 independent entries before E, so at most that many eigenvalues are nonzero.
    zero = (np.arange(e.shape[-1]) < tokens) | (e <= ROUNDING * float(np.finfo(V.dtype).eps) * e[..., -1:])
    return CausalSpectrum(L, rotation, xp.where(zero, 0.0, e))


def _root(tokens: int, dtype: np.dtype) -> Float[np.ndarray, " p"]:
    rows, columns = pairs(tokens)
    return np.where(rows == columns, math.sqrt(2), 1.0).astype(dtype)


def _differences(tokens: int) -> np.ndarray:
    """The matrix R of rows r_ν."""
    R = np.eye(tokens)
    for row in range(1, tokens):
        R[row, :row] = -1 / row
        R[row] *= np.sqrt(row / (row + 1))
    R[0, 0] = 0.0
    return R


def _means(tokens: int) -> np.ndarray:
    return np.tri(tokens) / np.arange(1, tokens + 1)[:, None]


def _constant[T: (Array, np.ndarray)](values: np.ndarray, like: T) -> T:
    """Reshape an array of shape (m, k) to broadcast along the batch of `like`."""
    constant = like.__array_namespace__().asarray(values, dtype=like.dtype)
    return constant.reshape(*values.shape, *(1,) * (like.ndim - 2))
