"""Σ(V) for any attention pattern, with the matrices R, N and H_α of `centring`.

The noise of attention is M + Mᵀ with M_αω = (1/m_α) (X G Xᵀ H_α V)_αω for normal G and V = XXᵀ. With E = R X this is
M = [N̂ ∘ (X G Eᵀ)] E Xᵀ, N̂_αν = 1/m_α for ν in N_α: everything is a product of matrices.
Tests: `tests/covariance/test_pattern.py`.
"""

import functools
import math
from typing import Any

import numpy as np
from jaxtyping import Array, Float

from sdeinfer.covariance._batched import matmul, transpose
from sdeinfer.covariance._factors import FactoredCovariance, cholesky_of, eigh_of, inverse_lower, whiten_by
from sdeinfer.covariance._matrix import pairs, unvech, vech
from sdeinfer.covariance._pattern import Pattern, centring


def differences[T: (Array, np.ndarray)](pattern: Pattern, X: Float[T, "m c ..."]) -> Float[T, "k c ..."]:
    """E = R X: the differences of tokens whose squares add up to the centred covariance of each set of tokens."""
    return matmul(constant_like(centring(pattern, len(X)).differences, X), X)


def attended_mean[T: (Array, np.ndarray)](pattern: Pattern, A: Float[T, "m c ..."]) -> Float[T, "m c ..."]:
    """The mean, for every token, of the rows of A to which the token attends."""
    return matmul(constant_like(centring(pattern, len(A)).mean, A), A)


def overlap[T: (Array, np.ndarray)](pattern: Pattern, tokens: int, F: Float[T, "k k ..."]) -> Float[T, "m m ..."]:
    """The positive semi-definite T_αβ = tr(V H_α V H_β)/(m_α m_β), from F = R V Rᵀ."""
    selected = constant_like(centring(pattern, tokens).selected, F)
    return transpose(matmul(selected, transpose(matmul(selected, F * F))))


class PatternSpectrum(FactoredCovariance):
    """The coordinates of V in which Σ(V) is diagonal for any attention pattern; the counterpart of `Spectrum`.

    In the coordinates L⁻¹ dV L⁻ᵀ, with off-diagonal entries scaled by √2, Σ_lin is the identity and 𝒜 a p×p matrix.
    Along its eigenvectors (`rotation`; `mixing` are the eigenvalues) the noise is independent for every a and κ².
    """

    rotation: Float[Any, "... p p"]
    mixing: Float[Any, "... p"]

    def whiten[T: (Array, np.ndarray)](self, S: Float[T, "... m m"]) -> Float[T, "... m m"]:
        """The coordinates of a symmetric S, as a symmetric matrix."""
        root = _root(self.tokens, self.cholesky.dtype)
        packed = vech(whiten_by(self.cholesky, S)) / root
        return unvech(root * (packed[..., None, :] @ self.rotation)[..., 0, :])

    def colour[T: (Array, np.ndarray)](self, Z: Float[T, "... m m"]) -> Float[T, "... m m"]:
        """The inverse of `whiten`."""
        root = _root(self.tokens, self.cholesky.dtype)
        turned = unvech(root * (self.rotation @ (vech(Z) / root)[..., None])[..., 0])
        return self.cholesky @ turned @ self.cholesky.mT

    def forms[T: (Array, np.ndarray)](self) -> tuple[Float[T, "... p m m"], Float[T, "... p m m"]]:
        """Symmetric W_q with coordinates z_q = ⟨W_q, S⟩, and U_q with S = Σ_q z_q U_q."""
        root = _root(self.tokens, self.cholesky.dtype)
        entries = unvech(root * self.rotation.mT)
        L, inverse = self.cholesky[..., None, :, :], inverse_lower(self.cholesky)[..., None, :, :]
        return inverse.mT @ entries @ inverse / 2, L @ entries @ L.mT


def pattern_spectrum(pattern: Pattern, V: Float[Any, "... m m"]) -> PatternSpectrum:
    """The coordinates of a V, in O(p³): NaN for a singular V.

    Where 𝒜 vanishes, any coordinates would do for the limit, but not for a layer of finite width: there Σ_lin with
    V ∘ V for one V is diagonal as well.
    """
    xp, tokens = V.__array_namespace__(), V.shape[-1]
    L, null = cholesky_of(V), vanishing(pattern, tokens)
    columns = _noise_columns(pattern, L, inverse_lower(L))
    e, rotation = eigh_of(columns.mT @ columns, null)
    if null > 1:
        free = unvech(_root(tokens, V.dtype) * rotation[..., :null].mT)
        form = (free @ whiten_by(L, V * V)[..., None, :, :]).reshape(*V.shape[:-2], null, -1)
        form = form @ free.reshape(form.shape).mT
        _, turn = eigh_of((form + form.mT) / 2)
        rotation = xp.concatenate([rotation[..., :null] @ turn, rotation[..., null:]], axis=-1)
    zero = (np.arange(e.shape[-1]) < null) | (e <= 64 * float(np.finfo(V.dtype).eps) * e[..., -1:])
    return PatternSpectrum(L, rotation, xp.where(zero, 0.0, e))


@functools.lru_cache(maxsize=64)
def vanishing(pattern: Pattern, tokens: int) -> int:
    """The number of eigenvalues of 𝒜 that are zero for every V: p less the rank of 𝒜 at a V without symmetries."""
    L = np.eye(tokens) + np.tril(np.random.default_rng(0).normal(size=(tokens, tokens)), -1) / tokens
    columns = _noise_columns(pattern, L, np.linalg.inv(L))
    return columns.shape[-1] - int(np.linalg.matrix_rank(columns.T @ columns, tol=1e-10 * np.sum(columns**2)))


def _noise_columns[T: (Array, np.ndarray)](
    pattern: Pattern, L: Float[T, "... m m"], inverse: Float[T, "... m m"]
) -> Float[T, "... m*m p"]:
    """L⁻¹ (M + Mᵀ) L⁻ᵀ, packed, for each unit matrix G with a one at (a, b): M = [N̂ ∘ (L_a E_bᵀ)] E Lᵀ."""
    tokens = L.shape[-1]
    matrices = centring(pattern, tokens)
    E = matrices.differences.astype(L.dtype) @ L
    attended = L.mT[..., :, None, :, None] * E.mT[..., None, :, None, :] * matrices.selected.astype(L.dtype)
    Z = inverse[..., None, None, :, :] @ attended @ E[..., None, None, :, :]
    columns = vech(Z + Z.mT) / _root(tokens, L.dtype)
    return columns.reshape(*L.shape[:-2], tokens**2, -1)


def _root(tokens: int, dtype: np.dtype) -> Float[np.ndarray, " p"]:
    rows, columns = pairs(tokens)
    return np.where(rows == columns, math.sqrt(2), 1.0).astype(dtype)


def constant_like[T: (Array, np.ndarray)](values: np.ndarray, like: T) -> T:
    """Reshape an array of shape (m, k) to broadcast along the batch of `like`."""
    constant = like.__array_namespace__().asarray(values, dtype=like.dtype)
    return constant.reshape(*values.shape, *(1,) * (like.ndim - 2))
