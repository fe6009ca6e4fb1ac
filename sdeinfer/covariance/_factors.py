"""Factors of one matrix or of a stack (..., m, m): JAX arrays by JAX, and data, which are NumPy arrays, by NumPy.

NumPy compiles nothing, whatever the number and size of the data. It rejects a whole stack if one matrix has no factor;
these functions return NaN for that matrix, as JAX does. Tests: `tests/covariance/test_diffusion.py`.
"""

import contextlib
import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.linalg import solve_triangular
from jaxtyping import Array, Float


def cholesky_of[T: (Array, np.ndarray)](A: Float[T, "... m m"]) -> Float[T, "... m m"]:
    """The lower triangular L with L Lᵀ = A; NaN where A is not positive definite."""
    if not isinstance(A, np.ndarray):
        return jnp.linalg.cholesky(A)
    try:
        return np.linalg.cholesky(A)
    except np.linalg.LinAlgError:
        if A.ndim == 2:
            return np.full_like(A, np.nan)
        return np.stack([cholesky_of(matrix) for matrix in A])


def eigh_of[T: (Array, np.ndarray)](
    A: Float[T, "... m m"], null: int = 0
) -> tuple[Float[T, "... m"], Float[T, "... m m"]]:
    """Eigenvalues, ascending, and eigenvectors, in columns; NaN where A is not finite.

    The derivative is NaN where eigenvalues repeat, other than the first `null` ones, which are zero for every A: their
    eigenvectors are a basis of the null space, which does not turn in itself as A changes.
    """
    if not isinstance(A, np.ndarray):
        return _jax_eigh(A, null)
    finite = np.isfinite(A).all(axis=(-2, -1))
    values, vectors = np.linalg.eigh(np.where(finite[..., None, None], A, 0.0))
    values[~finite], vectors[~finite] = np.nan, np.nan
    return values, vectors


def inverse_lower[T: (Array, np.ndarray)](L: Float[T, "... m m"]) -> Float[T, "... m m"]:
    """L⁻¹ for lower triangular L."""
    if isinstance(L, np.ndarray):
        return np.tril(np.linalg.inv(L))
    return solve_triangular(L, jnp.broadcast_to(jnp.eye(L.shape[-1], dtype=L.dtype), L.shape), lower=True)


def whiten_by[T: (Array, np.ndarray)](L: Float[T, "... m m"], S: Float[T, "... m m"]) -> Float[T, "... m m"]:
    """L⁻¹ S L⁻ᵀ for lower triangular L and symmetric S."""
    if isinstance(L, np.ndarray):
        inverse = inverse_lower(L)
        Z = inverse @ S @ inverse.mT
    else:
        Z = solve_triangular(L, solve_triangular(L, S, lower=True).mT, lower=True)
    return (Z + Z.mT) / 2


class FactoredCovariance(eqx.Module):
    """V = LLᵀ by its Cholesky factor, or stacks."""

    cholesky: Float[Any, "... m m"]

    @property
    def tokens(self) -> int:
        """The number of tokens m."""
        return self.cholesky.shape[-1]

    @property
    def log_volume(self) -> Float[Any, "..."]:
        """Σ_i log L_ii = ½ log det V."""
        xp = self.cholesky.__array_namespace__()
        return xp.log(xp.diagonal(self.cholesky, axis1=-2, axis2=-1)).sum(axis=-1)


def factor_on_host(V: np.ndarray) -> np.ndarray:
    """The factor of `semidefinite_cholesky` for each positive semi-definite matrix of a stack (..., m, m), by NumPy."""
    rounding = 4 * V.shape[-1] * float(np.finfo(V.dtype).eps)
    with contextlib.suppress(np.linalg.LinAlgError):
        # Most stacks are definite by far: pivots show it, at a third of the time of eigenvalues.
        triangular = np.linalg.cholesky(V)
        pivots, entries = (np.diagonal(A, axis1=-2, axis2=-1) for A in (triangular, V))
        if (pivots.min(axis=-1) ** 2 > np.sqrt(rounding) * entries.max(axis=-1)).all():
            return triangular
    eigenvalues = np.linalg.eigvalsh(V.astype(np.float64))
    definite = (eigenvalues[..., 0] > rounding * eigenvalues[..., -1])[..., None, None]
    identity = np.eye(V.shape[-1], dtype=V.dtype)
    triangular = np.linalg.cholesky(np.where(definite, V, identity))
    return triangular if definite.all() else np.where(definite, triangular, _pivoted(V, rounding))


def _pivoted(V: np.ndarray, rounding: float) -> np.ndarray:
    remainder, columns = np.array(V), []
    size = np.diagonal(remainder, axis1=-2, axis2=-1).copy()
    size[size == 0] = np.inf
    for _ in range(V.shape[-1]):
        share = np.diagonal(remainder, axis1=-2, axis2=-1) / size
        index = (share >= share.max(axis=-1, keepdims=True) / 2).argmax(axis=-1)[..., None]
        column = np.take_along_axis(remainder, index[..., None], axis=-1)[..., 0]
        pivot = np.take_along_axis(column, index, axis=-1)
        positive = np.take_along_axis(share, index, axis=-1) > rounding
        column = np.where(positive, column / np.sqrt(np.where(positive, pivot, 1.0)), 0.0)
        remainder = remainder - column[..., :, None] * column[..., None, :]
        columns.append(column)
    return np.stack(columns, axis=-1)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _jax_eigh(A: Any, null: int) -> tuple[Any, Any]:
    values, vectors = jnp.linalg.eigh(A)
    return values, vectors


@_jax_eigh.defjvp
def _jax_eigh_jvp(null: int, primals: tuple[Array], tangents: tuple[Array]):
    (A,), (dA,) = primals, tangents
    values, U = _jax_eigh(A, null)
    rotated = U.mT @ dA @ U
    gap = values[..., None, :] - values[..., :, None]
    # Up to 64 roundings apart they count as repeated: JAX divides by the gap, and the result would be finite and wrong.
    equal = jnp.abs(gap) <= 64 * float(jnp.finfo(A.dtype).eps) * jnp.abs(values).max(axis=-1)[..., None, None]
    # A factor, not a value: reverse mode would transpose a constant NaN to zero.
    factor = jnp.where(equal, jnp.nan, 1 / jnp.where(equal, 1.0, gap))
    in_null = np.arange(A.shape[-1]) < null
    still = np.eye(A.shape[-1], dtype=bool) | (in_null[:, None] & in_null)
    factor = jnp.where(still, 0.0, factor)
    return (values, U), (jnp.diagonal(rotated, axis1=-2, axis2=-1), U @ (rotated * factor))
