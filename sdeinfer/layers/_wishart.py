"""Laws of X Xᵀ for Gaussian X, batched over networks: arrays of shape (m, m, blocks, networks).

The columns of X form equal blocks, one per head if the heads' columns stay apart, otherwise one. For each block,
V = X Xᵀ/n with the block's columns X and the full width n.

The functions map NumPy arrays to NumPy arrays, with `NetworkStreams`: networks that are sampled once compile nothing.
With `NetworkKeys` they are JAX's, and have derivatives. Tests: `tests/networks/test_chain.py`.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Integer

from sdeinfer.covariance._batched import (
    batch_first,
    batch_last,
    cholesky,
    gram,
    invert_lower,
    matmul,
    pivoted_cholesky,
    semidefinite_cholesky,
    total,
)
from sdeinfer.covariance._factors import cholesky_of, factor_on_host
from sdeinfer.layers._keys import COLUMNS, NetworkKeys
from sdeinfer.layers._streams import NetworkStreams

COLUMNS_AT_ONCE = 16
"""Number of columns drawn per iteration; bounds the memory at large widths."""

type Keys = NetworkKeys | NetworkStreams


def factor[T: (Array, np.ndarray)](V: Float[T, "m m blocks networks"]) -> Float[T, "m m blocks networks"]:
    """Square L with L Lᵀ = V, also for singular V; NaN if V has overflowed."""
    if not isinstance(V, np.ndarray):
        return _jax_factor(V)
    finite = np.isfinite(V).all(axis=(0, 1))
    with np.errstate(invalid="ignore"):
        return np.where(finite, batch_last(factor_on_host(batch_first(np.where(finite, V, 0.0)))), np.nan)


@jax.custom_jvp
def _jax_factor(V: Float[Array, "m m blocks networks"]) -> Float[Array, "m m blocks networks"]:
    """`factor` by JAX.

    What follows a factor has the same law for every L, and L is the pivoted factor, for which one program serves
    definite and singular V. It jumps where the order of pivots changes: under differentiation L is Cholesky's factor,
    a smooth function of V where V is definite.
    """
    return _of_finite(pivoted_cholesky, V)


def _of_finite(factorise: Callable[[Array], Array], V: Array) -> Array:
    # A factorisation would treat an infinite pivot as a zero remainder.
    return jnp.where(jnp.isfinite(V).all(axis=(0, 1)), factorise(V), jnp.nan)


@_jax_factor.defjvp
def _factor_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    return jax.jvp(functools.partial(_of_finite, semidefinite_cholesky), primals, tangents)


def whole(V: Float[Any, "m m blocks networks"]) -> Float[Any, "m m 1 networks"]:
    """The covariance of all columns: the sum over blocks."""
    return V if V.shape[2] == 1 else total(V, axis=2)[:, :, None]


class WishartDraws(NamedTuple):
    """Normals (the last are the extra ones requested), and chi variables with ν, ν − 1, … degrees of freedom."""

    normals: Float[Any, "count m m blocks networks"]
    chi: Float[Any, "count m blocks networks"]


def wishart_draws(
    freedom: Sequence[Integer[Any, ""] | int],
    *,
    tokens: int,
    blocks: int,
    normals: int = 0,
    dtype: Any,
    keys: Keys,
) -> WishartDraws:
    """Random numbers for Wishart matrices with ν in `freedom`, by two calls of the generator: each adds compilation."""
    drawn = keys.normals((len(freedom) + normals, tokens, tokens, blocks), dtype)
    xp: Any = np if isinstance(keys, NetworkStreams) else jnp
    degrees = xp.stack([xp.asarray(nu) - np.arange(tokens) for nu in freedom])
    chi = keys.chi(xp.maximum(degrees, 1).reshape(-1), blocks=blocks, dtype=dtype)
    return WishartDraws(drawn, chi.reshape(len(freedom), tokens, *chi.shape[1:]))


def wishart_factor(
    freedom: Integer[Any, ""] | int,
    normals: Float[Any, "m m blocks networks"],
    chi: Float[Any, "m blocks networks"],
) -> Float[Any, "m m blocks networks"]:
    """Lower triangular B with B Bᵀ ~ Wishart_m(ν, I): chi variables with ν, ν − 1, … degrees on the diagonal, normals
    below it (Bartlett's decomposition). For ν < m the last m − ν columns are zero.

    Given B, a Gaussian G (m × ν) with G Gᵀ = B Bᵀ is B times m uniformly random orthonormal rows. The product of these
    rows with further independent normals is again normal, so B suffices for later draws.
    """  # noqa: D205
    tokens, xp = len(normals), normals.__array_namespace__()
    row, column = np.arange(tokens)[:, None, None, None], np.arange(tokens)[:, None, None]
    B = xp.where(row > column, normals, xp.where(row == column, chi[None], 0.0))
    return xp.where(column < freedom, B, 0.0)


def residual_covariance(
    L: Float[Any, "m m blocks networks"],
    F: Float[Any, "m m #blocks networks"],
    *,
    shortcut: Float[Any, "..."],
    gamma: Float[Any, "..."],
    width: Integer[Any, ""] | int,
    near: Float[Any, "m m blocks networks"],
    far: Float[Any, "m m blocks networks"],
) -> Float[Any, "m m blocks networks"]:
    """Draw V′ = X′X′ᵀ/n for X′ = λX + γ F G, where V = X Xᵀ/n = L Lᵀ and G (m × n) has iid normals.

    This is a noncentral Wishart variable. In an orthonormal basis whose first m directions span the rows of X, X′/√n is
    λL + γ F Ω₁/√n in the first m and γ F Ω₂/√n in the other n − m directions, with Ω₂Ω₂ᵀ = BBᵀ ~ Wishart_m(n − m, I).
    """
    xp = L.__array_namespace__()
    scale = gamma / xp.sqrt(xp.asarray(width, dtype=L.dtype))
    return gram(shortcut * L + scale * matmul(F, near)) + gram(scale * matmul(F, far))


def column_sum(
    K: Float[Any, "m m blocks networks"] | None,
    image: Callable[[Any], Any],
    columns: Integer[Any, ""] | int,
    *,
    tokens: int,
    blocks: int,
    dtype: Any,
    keys: Keys,
) -> Float[Any, "m m blocks networks"]:
    """Σ_j y_j y_jᵀ over columns y_j, the images of K g_j for columns g_j of m normals; zeros must map to zeros."""
    if isinstance(keys, NetworkStreams):
        return keys.column_sum(K, image, int(columns), tokens=tokens, blocks=blocks).astype(dtype)

    def add(number: Integer[Any, ""], S: Array) -> Array:
        G = keys.normals((tokens, COLUMNS_AT_ONCE, blocks), dtype, stream=COLUMNS, block=number)
        is_column = number * COLUMNS_AT_ONCE + jnp.arange(COLUMNS_AT_ONCE) < columns
        G = jnp.where(is_column[:, None, None], G, 0.0)
        return S + gram(image(G if K is None else matmul(K, G)))

    start = jnp.zeros((tokens, tokens, blocks, keys.high.shape[0]), dtype)
    return jax.lax.fori_loop(0, -(-columns // COLUMNS_AT_ONCE), add, start)


def with_tangents(features: Callable[[Array], Array], X: Float[Array, "rows ..."]) -> Float[Array, "rows ..."]:
    """[f(X); Df(X)·Ẋ] for rows [X; Ẋ] of tokens and of their tangents."""
    tokens = len(X) // 2
    return jnp.concatenate(jax.jvp(features, (X[:tokens],), (X[tokens:],)))


def with_gram(
    V: Float[Any, "m m blocks networks"], W: Float[Any, "m m blocks networks"]
) -> Float[Any, "m m blocks networks"]:
    """K with K W Kᵀ = V for definite W: if G Gᵀ = W and G has uniform directions, so has K G, with Gram matrix V."""
    L = batch_last(cholesky_of(batch_first(W))) if isinstance(W, np.ndarray) else cholesky(W)
    return matmul(factor(V), invert_lower(L))
