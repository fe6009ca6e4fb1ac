"""Linear algebra on many small matrices at once: arrays of shape (m, m, ...), one matrix for each trailing index.

On a CPU a batched LAPACK call on 4×4 matrices spends nearly all its time outside the arithmetic. With the batch as the
*last* axis every operation below is elementwise along that axis and vectorises. Above `UNROLLED` tokens LAPACK is
faster, and the batch moves to the front. The first five functions also map NumPy arrays to NumPy arrays.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jaxtyping import Array, Bool, Float, Int

from sdeinfer.covariance._factors import inverse_lower

UNROLLED = 16
"""Largest m whose loops are unrolled."""


def transpose[T: (Array, np.ndarray)](A: Float[T, "m k ..."]) -> Float[T, "k m ..."]:
    """Aᵀ."""
    return A.swapaxes(0, 1)


def diagonal[T: (Array, np.ndarray)](A: Float[T, "m m ..."]) -> Float[T, "m ..."]:
    """The diagonal."""
    return A.__array_namespace__().stack([A[i, i] for i in range(A.shape[0])])


def identity_like[T: (Array, np.ndarray)](A: Float[T, "m m ..."]) -> Float[T, "m m ..."]:
    """The identity, in a shape that broadcasts against A."""
    xp = A.__array_namespace__()
    return xp.eye(A.shape[0], dtype=A.dtype).reshape(A.shape[:2] + (1,) * (A.ndim - 2))


def matmul[T: (Array, np.ndarray)](A: Float[T, "m k *#batch"], B: Float[T, "k l *#batch"]) -> Float[Any, "m l ..."]:
    """A B."""
    if isinstance(A, np.ndarray) and isinstance(B, np.ndarray):
        if A.shape[1] > UNROLLED:
            return batch_last(batch_first(A) @ batch_first(B))
        # Elementwise along the batch, so that a matrix has the same product in every batch, to the last bit.
        return sum(A[:, k, None] * B[None, k] for k in range(1, A.shape[1])) + A[:, 0, None] * B[None, 0]
    factors = jnp.asarray(A), jnp.asarray(B)
    if A.shape[0] > UNROLLED:
        return batch_last(jnp.matmul(*map(batch_first, factors), precision="highest"))
    return product(*factors)


def total(A: Float[Any, "m ..."], axis: int = 0) -> Any:
    """The sum over one matrix axis."""
    if isinstance(A, np.ndarray):
        return A.sum(axis=axis)
    if A.shape[axis] > UNROLLED:
        return jnp.sum(A, axis)
    A = jnp.moveaxis(A, axis, 0)
    # A product with a row of ones, because the derivative of a product compiles faster than that of a sum of slices.
    sums = product(jnp.ones((1, len(A)), A.dtype), A if A.ndim > 1 else A[:, None])[0]
    return sums if A.ndim > 1 else sums[0]


def gram[T: (Array, np.ndarray)](A: Float[T, "m k ..."]) -> Float[T, "m m ..."]:
    """A Aᵀ."""
    return matmul(A, transpose(A))


def cholesky(A: Float[Array, "m m ..."]) -> Float[Array, "m m ..."]:
    """The lower triangular L with L Lᵀ = A; NaN where a pivot is within the rounding of its diagonal entry."""
    L, definite = _cholesky(A)
    return jnp.where(definite, L, jnp.nan)


def invert_lower(L: Float[Any, "m m ..."]) -> Float[Any, "m m ..."]:
    """L⁻¹ for lower triangular L."""
    if isinstance(L, np.ndarray) or L.shape[0] > UNROLLED:
        return batch_last(inverse_lower(batch_first(L)))
    identity = jnp.broadcast_to(identity_like(L), L.shape)
    rows: list[Array] = []
    for i in range(L.shape[0]):
        row = identity[i]
        for k in range(i):
            row = row - L[i, k] * rows[k]
        rows.append(row / L[i, i])
    return jnp.stack(rows)


def is_positive_definite(A: Float[Array, "m m ..."]) -> Bool[Array, "..."]:
    """Whether A is positive definite up to rounding."""
    return _cholesky(jax.lax.stop_gradient(A))[1]


def semidefinite_cholesky(A: Float[Array, "m m ..."]) -> Float[Array, "m m ..."]:
    """A square L with L Lᵀ = A for positive *semi*-definite A: its Cholesky factor where A is definite.

    Where A is singular up to rounding, L is the factor by complete pivoting, which ends in columns of zeros: nothing is
    added to A, and the neglected remainder is of the size of the rounding of A's entries.
    """
    L, definite = _cholesky(A)
    return jax.lax.cond(definite.all(), lambda A: L, lambda A: jnp.where(definite, L, pivoted_cholesky(A)), A)


def _cholesky(A: Float[Array, "m m ..."]) -> tuple[Float[Array, "m m ..."], Bool[Array, "..."]]:
    """The factor, valid where all its pivots exceed the rounding of their diagonal entries."""
    tokens = len(A)
    smallest = _rounding(A) * diagonal(A)
    if tokens > UNROLLED:
        pivots = diagonal(_lapack_cholesky(jax.lax.stop_gradient(A))) ** 2
        definite = (pivots > smallest).all(axis=0)
        # Factorise again with indefinite matrices replaced: their NaN would enter every derivative.
        return _lapack_cholesky(jnp.where(definite, A, identity_like(A))), definite

    def eliminate(remainder, k):
        column = jax.lax.dynamic_index_in_dim(remainder, k, 1, keepdims=False)
        pivot = jax.lax.dynamic_index_in_dim(column, k, 0, keepdims=False)
        least = jax.lax.dynamic_index_in_dim(smallest, k + tokens - len(remainder), 0, keepdims=False)
        positive = pivot > least
        scale = jnp.where(positive, jax.lax.rsqrt(jnp.where(positive, pivot, 1.0)), 0.0)
        column = jax.lax.optimization_barrier(jnp.where(_index(column) >= k, column, 0.0) * scale)
        return remainder - column[:, None] * column[None], (column, positive)

    remainder, L, definite = A, [], jnp.ones(A.shape[2:], bool)
    while len(remainder) > 0:
        # Finished rows are dropped after every eight columns. The loop over columns is not unrolled: unrolling triples
        # the compile time and gains nothing.
        count = min(len(remainder), 8)
        done, (columns, positive) = jax.lax.scan(eliminate, remainder, jnp.arange(count))
        zeros = jnp.zeros((count, tokens - len(remainder), *A.shape[2:]), A.dtype)
        L.append(jnp.concatenate([zeros, columns], axis=1) if len(remainder) < tokens else columns)
        definite &= positive.all(axis=0)
        remainder = done[count:, count:]
    return transpose(jnp.concatenate(L) if len(L) > 1 else L[0]), definite


def pivoted_cholesky(A: Float[Array, "m m ..."]) -> Float[Array, "m m ..."]:
    """A square L with L Lᵀ = A for positive semi-definite A, without derivatives; NaN-free if A is.

    Each step eliminates the first token whose remaining share of its diagonal entry is at least half the largest
    remaining share: rounding, which differs between programs, then hardly ever changes the order.
    """
    size = diagonal(A)
    size, identity = jnp.where(size > 0, size, jnp.inf), identity_like(A)

    def eliminate(remainder, _):
        # Divided, not multiplied by 1/size: the reciprocal of a number near the largest is flushed to zero.
        share = jnp.sum(remainder * identity, axis=1) / size
        largest = jnp.max(share, axis=0)
        first = jnp.min(jnp.where(share >= largest / 2, _index(share), len(A)), axis=0)
        one_hot = (_index(share) == first).astype(A.dtype)
        column = jax.lax.optimization_barrier(jnp.sum(remainder * one_hot, axis=1))
        pivot = jnp.sum(column * one_hot, axis=0)
        positive = largest > _rounding(A)
        column = column * jnp.where(positive, jax.lax.rsqrt(jnp.where(positive, pivot, 1.0)), 0.0)
        return remainder - column[:, None] * column[None], column

    _, columns = jax.lax.scan(eliminate, A, length=len(A))
    return transpose(columns)


def _rounding(A: Float[Array, "m m ..."]) -> float:
    """Rounding error of an m×m factorisation, as a fraction of the diagonal entry."""
    return 4 * len(A) * float(jnp.finfo(A.dtype).eps)


def _index(A: Float[Array, "m ..."]) -> Int[Array, "m ..."]:
    return jnp.arange(len(A)).reshape(-1, *(1,) * (A.ndim - 1))


def _lapack_cholesky(A: Float[Array, "m m ..."]) -> Float[Array, "m m ..."]:
    return batch_last(jnp.linalg.cholesky(batch_first(A)))


def batch_first[T: (Array, np.ndarray)](A: Float[T, "m k ..."]) -> Float[T, "... m k"]:
    """The batch moved from the end of the axes to their start."""
    return A.__array_namespace__().moveaxis(A, (0, 1), (-2, -1))


def batch_last[T: (Array, np.ndarray)](A: Float[T, "... m k"]) -> Float[T, "m k ..."]:
    """The batch moved from the start of the axes to their end."""
    return A.__array_namespace__().moveaxis(A, (-2, -1), (0, 1))


def product(A: Float[Array, "m k *#batch"], B: Float[Array, "k l *#batch"]) -> Float[Array, "m l ..."]:
    """A B for each trailing index, as an unrolled sum over k; a JAX primitive, since its derivatives are products too.

    The automatic derivative of the sum backwards is a sum of padded slices of every term: a gradient of `simulate`
    takes two to six times as long, and twice the compilation.
    """
    batch, dtype = jnp.broadcast_shapes(A.shape[2:], B.shape[2:]), jnp.result_type(A, B)
    aligned = (jnp.expand_dims(x, tuple(range(2, len(batch) + 4 - x.ndim))) for x in (A, B))
    return _product.bind(*(jnp.broadcast_to(x, (*x.shape[:2], *batch)).astype(dtype) for x in aligned))


def _unrolled(A: Array, B: Array) -> Array:
    A, B = jax.lax.optimization_barrier((A, B))
    total = A[:, 0, None] * B[None, 0]
    for k in range(1, A.shape[1]):
        total = total + A[:, k, None] * B[None, k]
    # Without the barrier XLA fuses the product into each of its uses and recomputes it for every entry.
    return jax.lax.optimization_barrier(total)


def _shape(A: ShapedArray, B: ShapedArray) -> ShapedArray:
    return ShapedArray((A.shape[0], B.shape[1], *A.shape[2:]), A.dtype)


def _mapped(args: tuple[Any, Any], axes: tuple[int | None, int | None]) -> tuple[Array, int]:
    """`jax.vmap`: the mapped axis becomes the last one."""
    (size,) = {x.shape[axis] for x, axis in zip(args, axes, strict=True) if axis is not None}
    A, B = (
        jnp.broadcast_to(x[..., None], (*x.shape, size)) if axis is None else jnp.moveaxis(x, axis, -1)
        for x, axis in zip(args, axes, strict=True)
    )
    return _product.bind(A, B), A.ndim - 1


_product = Primitive("sdeinfer_product")
_product.def_impl(jax.jit(_unrolled))
_product.def_abstract_eval(_shape)
mlir.register_lowering(_product, mlir.lower_fun(_unrolled, multiple_results=False))
ad.defbilinear(
    _product,
    lambda G, A, B: _product.bind(G, B.swapaxes(0, 1)),
    lambda G, A, B: _product.bind(A.swapaxes(0, 1), G),
)
batching.primitive_batchers[_product] = _mapped
