"""Symmetric positive semi-definite matrices: packing, construction, and the one policy for validation."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Float
from numpy.typing import ArrayLike

from sdeinfer._arguments import at_least_one, checked, shown
from sdeinfer._files import InputError


def pairs(tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """Row and column indices of the p = m(m+1)/2 entries α ≤ β, row by row: the order of every packed vector."""
    return np.triu_indices(tokens)


def vech[T: (Array, np.ndarray)](V: Float[T, "... m m"]) -> Float[T, "... p"]:
    """Pack the upper triangle of a symmetric matrix row by row (Definition 3.1)."""
    return V[(..., *pairs(V.shape[-1]))]


def tokens_of(p: int) -> int:
    """The number of tokens m with p = m(m + 1)/2 pairs."""
    return (math.isqrt(8 * p + 1) - 1) // 2


def unvech[T: (Array, np.ndarray)](packed: Float[T, "... p"]) -> Float[T, "... m m"]:
    """Unpack the upper triangle of a symmetric matrix: the inverse of `vech`."""
    return packed[..., square_of(tokens_of(packed.shape[-1]))]


def square_of(tokens: int) -> np.ndarray:
    """The position of each entry (i, j) of a symmetric matrix in its packed vector; shape (m, m)."""
    position = np.zeros((tokens, tokens), int)
    rows, columns = pairs(tokens)
    position[rows, columns] = position[columns, rows] = np.arange(len(rows))
    return position


def safe_sqrt[T: (Array, np.ndarray)](x: T) -> T:
    """√x with derivative 0 instead of infinity at 0; NaN for x < 0."""
    xp, zero = x.__array_namespace__(), x == 0
    return xp.where(zero, 0.0, xp.sqrt(xp.where(zero, 1.0, x)))


def engine(*values: Any) -> Any:
    """`jax.numpy` if any value is a JAX array or tracer, otherwise NumPy."""
    return jnp if any(isinstance(value, jax.Array) for value in values) else np


def reciprocal(x: Any) -> Any:
    """1/x whose derivative needs no second division: XLA makes a separate kernel of every division."""
    return _reciprocal(x) if isinstance(x, jax.Array) else 1 / x


@jax.custom_jvp
def _reciprocal(x: Array) -> Array:
    return 1 / x


@_reciprocal.defjvp
def _reciprocal_jvp(primals: tuple[Any], tangents: tuple[Any]) -> tuple[Array, Array]:
    (x,), (dx,) = primals, tangents
    inverse = _reciprocal(x)
    return inverse, -inverse * inverse * dx


def centre[T: (Array, np.ndarray)](V: Float[T, "m m ..."]) -> Float[T, "m m ..."]:
    """Token-centred covariance C = H V H with H = I − 11ᵀ/m."""
    rows = V - V.mean(axis=0, keepdims=True)
    return rows - rows.mean(axis=1, keepdims=True)


def factor(V: Float[Array, "m m"]) -> Float[Array, "m m"]:
    """A square X with V = XXᵀ of a covariance, by its eigenvectors: exact also for singular V, where Cholesky fails."""
    eigenvalues, vectors = jnp.linalg.eigh(V)
    return vectors * jnp.sqrt(jnp.maximum(eigenvalues, 0.0))


@checked
def equicorrelated(*, tokens: int, correlation: float, norm: float = 1.0) -> Float[Array, "m m"]:
    """Covariance of m tokens with equal norms and equal pairwise correlations.

    Arguments:
        tokens: number of tokens m ≥ 1.
        correlation: ρ of every pair of tokens, in [−1/(m−1), 1].
        norm: root mean square of a token's entries, ‖x‖/√n; the diagonal of the result is norm².

    Returns:
        V of shape (m, m), in JAX's default floating-point type.

    Raises:
        InputError: if no such covariance exists, or for a norm that is not in [1e-15, 1e15].
    """
    at_least_one(tokens=tokens)
    lowest = -1.0 if tokens == 1 else -1.0 / (tokens - 1)
    if not lowest <= correlation <= 1.0:
        raise InputError(f"correlation: {tokens} tokens allow {lowest:.4g} to 1 between every pair, got {correlation}")
    if not 1e-15 <= norm <= 1e15:
        raise InputError(f"norm: must be positive, from 1e-15 to 1e15, got {norm}")
    V = norm**2 * ((1.0 - correlation) * np.eye(tokens) + correlation * np.ones((tokens, tokens)))
    return jax.device_put(V.astype(jnp.result_type(float)))


def validate_covariance(V: ArrayLike, name: str = "V0") -> np.ndarray:
    """V as a NumPy array, checked: square, finite, symmetric and positive semi-definite up to rounding.

    Asymmetry and negative eigenvalues may reach √eps times the largest entry, with the eps of the array's own type.
    """
    try:
        V = np.asarray(V)
    except (TypeError, ValueError) as error:
        raise InputError(f"{name}: a square matrix (tokens, tokens) is needed, got {shown(V)}") from error
    if V.dtype.kind in "iu":
        V = V.astype(float)
    if not np.issubdtype(V.dtype, np.floating):
        raise InputError(f"{name}: real numbers are needed, got {V.dtype}")
    if V.ndim != 2 or V.shape[0] != V.shape[1] or V.shape[0] == 0:
        raise InputError(f"{name}: a square matrix (tokens, tokens) is needed, got shape {V.shape}")
    fault = covariance_fault(V[None])
    if fault is not None:
        raise InputError(f"{name}: {fault[1]}")
    return V


def covariance_fault(V: np.ndarray) -> tuple[tuple[int, ...], str] | None:
    """Index and fault of the first matrix of a stack (..., m, m) that is not a covariance; None without one."""
    if not np.issubdtype(V.dtype, np.floating):
        V = V.astype(np.float64)
    not_finite = ~np.isfinite(V).all(axis=(-2, -1))
    if not_finite.any():
        index = _first(not_finite)
        return index, f"{np.count_nonzero(~np.isfinite(V[index]))} entries are NaN or infinite"
    tolerance = math.sqrt(np.finfo(V.dtype).eps) * np.abs(V).max(axis=(-2, -1))
    asymmetry = np.abs(V - np.swapaxes(V, -1, -2)).max(axis=(-2, -1))
    not_symmetric = asymmetry > tolerance
    if not_symmetric.any():
        index = _first(not_symmetric)
        return index, f"not symmetric: |V − Vᵀ| reaches {asymmetry[index]:.3g}"
    smallest = np.linalg.eigvalsh(V.astype(np.float64))[..., 0]
    not_psd = smallest < -tolerance
    if not_psd.any():
        index = _first(not_psd)
        return index, f"not positive semi-definite: smallest eigenvalue {smallest[index]:.3g}"
    return None


def singular(V: np.ndarray) -> np.ndarray:
    """Whether each matrix of a stack (..., m, m) is singular up to the rounding of its type; shape (...)."""
    eigenvalues = np.linalg.eigvalsh(V.astype(np.float64))
    return eigenvalues[..., 0] <= np.finfo(V.dtype).eps * V.shape[-1] * eigenvalues[..., -1]


def _first(faulty: np.ndarray) -> tuple[int, ...]:
    return tuple(int(i) for i in np.unravel_index(np.argmax(faulty), faulty.shape))


def is_concrete(x: object) -> bool:
    """Whether a value is concrete, that is, not traced by a JAX transformation."""
    return not isinstance(x, Tracer)
