"""Eigenvalues and eigenvectors of many small symmetric matrices at once: arrays (m, m, ...), as in `_batched`.

Cyclic Jacobi rotations along the batch: for m ≤ 4, 3 to 30 times faster than one LAPACK call per matrix.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from sdeinfer.covariance._batched import batch_first, batch_last, diagonal, matmul, transpose

SWEEPS = {1: 0, 2: 1, 3: 5, 4: 6, 5: 7, 6: 7, 7: 8, 8: 8}
"""Sweeps over all pairs, by m, that reduce the off-diagonal entries to rounding in float64; larger m use LAPACK."""


@jax.custom_jvp
def eigh(A: Float[Array, "m m ..."]) -> tuple[Float[Array, "m ..."], Float[Array, "m m ..."]]:
    """Eigenvalues, ascending, and eigenvectors, in columns: A = U diag(λ) Uᵀ.

    Eigenvectors of repeated eigenvalues have no derivative, and count as constant under differentiation.
    """
    if len(A) not in SWEEPS:
        values, vectors = jnp.linalg.eigh(batch_first(A))
        return jnp.moveaxis(values, -1, 0), batch_last(vectors)
    return _jacobi(jax.lax.optimization_barrier(A))


@eigh.defjvp
def _eigh_jvp(primals: tuple[Array], tangents: tuple[Array]):
    (A,), (dA,) = primals, tangents
    values, U = eigh(A)
    rotated = matmul(transpose(U), matmul(dA, U))
    gap = values[None] - values[:, None]
    turn = jnp.where(gap == 0, 0.0, rotated / jnp.where(gap == 0, 1.0, gap))
    return (values, U), (diagonal(rotated), matmul(U, turn))


def _jacobi(A: Float[Array, "m m ..."]) -> tuple[Float[Array, "m ..."], Float[Array, "m m ..."]]:
    tokens = len(A)
    one, zero = jnp.ones(A.shape[2:], A.dtype), jnp.zeros(A.shape[2:], A.dtype)
    start = (
        [[A[i, j] for j in range(tokens)] for i in range(tokens)],
        [[one if i == j else zero for j in range(tokens)] for i in range(tokens)],
    )
    a, columns = jax.lax.fori_loop(0, SWEEPS[tokens], lambda _, state: _sweep(*state), start)
    values = [a[i][i] for i in range(tokens)]
    for i in range(tokens):
        for j in range(tokens - 1 - i):
            swap = values[j] > values[j + 1]
            values[j : j + 2] = _swapped(swap, *values[j : j + 2])
            pairs = [_swapped(swap, x, y) for x, y in zip(columns[j], columns[j + 1], strict=True)]
            columns[j], columns[j + 1] = [x for x, _ in pairs], [y for _, y in pairs]
    return jnp.stack(values), jnp.stack([jnp.stack(column) for column in columns], axis=1)


def _sweep(a: list[list[Array]], columns: list[list[Array]]) -> tuple[list[list[Array]], list[list[Array]]]:
    """Rotate every pair of rows and columns once so that its off-diagonal entry vanishes."""
    a = [list(row) for row in a]
    tokens = len(a)
    for p in range(tokens):
        for q in range(p + 1, tokens):
            off, difference = a[p][q], a[q][q] - a[p][p]
            size = jnp.abs(difference) + jnp.sqrt(difference**2 + 4 * off**2)
            tangent = jnp.where(off == 0, 0.0, 2 * off / jnp.where(size == 0, 1.0, size))
            tangent = jnp.where(difference < 0, -tangent, tangent)
            cosine = jax.lax.rsqrt(1 + tangent**2)
            sine = tangent * cosine
            for k in set(range(tokens)) - {p, q}:
                to_p, to_q = cosine * a[k][p] - sine * a[k][q], sine * a[k][p] + cosine * a[k][q]
                a[k][p] = a[p][k] = to_p
                a[k][q] = a[q][k] = to_q
            a[p][p], a[q][q] = a[p][p] - tangent * off, a[q][q] + tangent * off
            a[p][q] = a[q][p] = jnp.zeros_like(off)
            turned = [
                (cosine * x - sine * y, sine * x + cosine * y) for x, y in zip(columns[p], columns[q], strict=True)
            ]
            columns[p], columns[q] = [x for x, _ in turned], [y for _, y in turned]
    return a, columns


def _swapped(swap: Array, x: Array, y: Array) -> tuple[Array, Array]:
    return jnp.where(swap, y, x), jnp.where(swap, x, y)
