"""Laws of X Xᵀ for Gaussian X, batched over networks: arrays of shape (m, m, blocks, networks).

The columns of X form equal blocks, one per head if the heads' columns stay apart, otherwise one. For each block,
V = X Xᵀ/n with the block's columns X and the full width n.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Integer

from sdeinfer.covariance._batched import (
    cholesky,
    gram,
    invert_lower,
    matmul,
    pivoted_cholesky,
    semidefinite_cholesky,
    total,
)
from sdeinfer.layers._keys import NetworkKeys

COLUMNS_AT_ONCE = 16
"""Number of columns drawn per iteration; bounds the memory at large widths."""

CHI, COLUMNS = 1, 2
"""Streams of a layer's keys; stream 0 is used for the matrices of normals."""


@jax.custom_jvp
def factor(V: Float[Array, "m m blocks networks"]) -> Float[Array, "m m blocks networks"]:
    """Square L with L Lᵀ = V, also for singular V; NaN if V has overflowed.

    What follows a factor has the same law for every L, and L is the pivoted factor, for which one program serves
    definite and singular V. It jumps where the order of pivots changes: under differentiation L is `_smooth_factor`.
    """
    return _of_finite(pivoted_cholesky, V)


def _smooth_factor(V: Float[Array, "m m blocks networks"]) -> Float[Array, "m m blocks networks"]:
    """Cholesky's factor where V is definite, a smooth function of V."""
    return _of_finite(semidefinite_cholesky, V)


def _of_finite(factorise: Callable[[Array], Array], V: Array) -> Array:
    # A factorisation would treat an infinite pivot as a zero remainder.
    return jnp.where(jnp.isfinite(V).all(axis=(0, 1)), factorise(V), jnp.nan)


@factor.defjvp
def _factor_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    return jax.jvp(_smooth_factor, primals, tangents)


def whole(V: Float[Array, "m m blocks networks"]) -> Float[Array, "m m 1 networks"]:
    """The covariance of all columns: the sum over blocks."""
    return V if V.shape[2] == 1 else total(V, axis=2)[:, :, None]


class WishartDraws(NamedTuple):
    """Normals (the last are the extra ones requested), and chi variables with ν, ν − 1, … degrees of freedom."""

    normals: Float[Array, "count m m blocks networks"]
    chi: Float[Array, "count m blocks networks"]


def wishart_draws(
    freedom: Sequence[Integer[Array, ""] | int],
    *,
    tokens: int,
    blocks: int,
    normals: int = 0,
    dtype: Any,
    keys: NetworkKeys,
) -> WishartDraws:
    """Random numbers for Wishart matrices with ν in `freedom`, by two calls of the generator: each adds compilation."""
    drawn = keys.normals((len(freedom) + normals, tokens, tokens, blocks), dtype)
    each = jnp.stack([jnp.asarray(nu) - jnp.arange(tokens) for nu in freedom])
    chi = chi_variables(jnp.maximum(each, 1).reshape(-1), blocks=blocks, dtype=dtype, keys=keys)
    return WishartDraws(drawn, chi.reshape(len(freedom), tokens, *chi.shape[1:]))


def wishart_factor(
    freedom: Integer[Array, ""] | int,
    normals: Float[Array, "m m blocks networks"],
    chi: Float[Array, "m blocks networks"],
) -> Float[Array, "m m blocks networks"]:
    """Lower triangular B with B Bᵀ ~ Wishart_m(ν, I): chi variables with ν, ν − 1, … degrees on the diagonal, normals
    below it (Bartlett's decomposition). For ν < m the last m − ν columns are zero.

    Given B, a Gaussian G (m × ν) with G Gᵀ = B Bᵀ is B times m uniformly random orthonormal rows. The product of these
    rows with further independent normals is again normal, so B suffices for later draws.
    """  # noqa: D205
    tokens = len(normals)
    row, column = jnp.arange(tokens)[:, None, None, None], jnp.arange(tokens)[:, None, None]
    B = jnp.where(row > column, normals, jnp.where(row == column, chi[None], 0.0))
    return jnp.where(column < freedom, B, 0.0)


def chi_variables(
    freedom: Integer[Array, " k"], *, blocks: int, dtype: Any, keys: NetworkKeys
) -> Float[Array, "k blocks networks"]:
    """Chi variables from stream `CHI`, by the rejection method of Marsaglia & Tsang (2000), exact for every ν ≥ 1.

    Let d = ν/2 − 1/3 and 3√d u ~ N(0, 1). Then 2d (1 + u)³, accepted with probability exp f(u),
    f(u) = 3d (log(1 + u) − u + u²/2 − u³/3) ≤ 0, is chi-square with ν degrees of freedom; one in 18ν is rejected.
    """
    d = (jnp.asarray(freedom).astype(dtype) / 2 - 1 / 3)[:, None, None]
    shape = (len(d), blocks)

    def propose(state):
        attempt, chi, kept = state
        normals, uniforms = keys.normals_and_uniforms(shape, dtype, stream=CHI, block=attempt)
        u = normals / (3 * jnp.sqrt(d))
        positive = u > -1
        u = jnp.where(positive, u, 0.0)
        log_probability = 3 * d * (jnp.log1p(u) - u * (1 - u * (1 / 2 - u / 3)))
        accepted = positive & (uniforms < jnp.exp(log_probability))
        chi = jnp.where(kept, chi, jnp.sqrt(2 * d * (1 + u)) * (1 + u))
        return attempt + 1, chi, kept | accepted

    start = jnp.zeros((*shape, keys.high.shape[0]), dtype)
    _, chi, _ = jax.lax.while_loop(lambda state: ~state[2].all(), propose, (0, start, start > 0))
    return chi


def residual_covariance(
    L: Float[Array, "m m blocks networks"],
    F: Float[Array, "m m #blocks networks"],
    *,
    shortcut: Float[Array, ""],
    gamma: Float[Array, ""],
    width: Integer[Array, ""] | int,
    near: Float[Array, "m m blocks networks"],
    far: Float[Array, "m m blocks networks"],
) -> Float[Array, "m m blocks networks"]:
    """Draw V′ = X′X′ᵀ/n for X′ = λX + γ F G, where V = X Xᵀ/n = L Lᵀ and G (m × n) has iid normals.

    This is a noncentral Wishart variable. In an orthonormal basis whose first m directions span the rows of X, X′/√n is
    λL + γ F Ω₁/√n in the first m and γ F Ω₂/√n in the other n − m directions, with Ω₂Ω₂ᵀ = BBᵀ ~ Wishart_m(n − m, I).
    """
    scale = gamma / jnp.sqrt(jnp.asarray(width, L.dtype))
    return gram(shortcut * L + scale * matmul(F, near)) + gram(scale * matmul(F, far))


def column_sum(
    images: Callable[[Float[Array, "m k blocks networks"]], Float[Array, "m k blocks networks"]],
    columns: Integer[Array, ""] | int,
    *,
    tokens: int,
    blocks: int,
    dtype: Any,
    keys: NetworkKeys,
) -> Float[Array, "m m blocks networks"]:
    """Σ_j y_j y_jᵀ over columns y_j, the images of columns of m normals; zeros must map to zeros."""

    def add(number: Integer[Array, ""], S: Array) -> Array:
        G = keys.normals((tokens, COLUMNS_AT_ONCE, blocks), dtype, stream=COLUMNS, block=number)
        there = number * COLUMNS_AT_ONCE + jnp.arange(COLUMNS_AT_ONCE) < columns
        return S + gram(images(jnp.where(there[:, None, None], G, 0.0)))

    start = jnp.zeros((tokens, tokens, blocks, keys.high.shape[0]), dtype)
    return jax.lax.fori_loop(0, -(-columns // COLUMNS_AT_ONCE), add, start)


def with_gram(
    V: Float[Array, "m m blocks networks"], W: Float[Array, "m m blocks networks"]
) -> Float[Array, "m m blocks networks"]:
    """K with K W Kᵀ = V for definite W: if G Gᵀ = W and G has uniform directions, so has K G, with Gram matrix V."""
    return matmul(factor(V), invert_lower(cholesky(W)))
