"""Laws of X Xᵀ for Gaussian X, many networks at once: arrays of shape (m, m, blocks, networks).

A network's columns come in equal blocks, one for each head that sees a softmax of its own; most layers need one block
only. What is said of V here holds for the columns of each block: V = X Xᵀ/n with their X and the whole width n.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from sdeinfer.covariance import diagonal, gram, invert_lower, matmul, semidefinite_cholesky, total
from sdeinfer.layers._keys import NetworkKeys

CHUNK = 16
"""How many hidden units are drawn at a time: memory does not grow with the width."""


def factor(V: Float[Array, "m m blocks networks"]) -> Float[Array, "m m blocks networks"]:
    """A square L with L Lᵀ = V, singular V included; NaN where V overflowed."""
    # A pivot of ∞ would count as one without anything left.
    finite = jnp.isfinite(total(diagonal(V)))
    return jnp.where(finite, semidefinite_cholesky(V), jnp.nan)


def whole(V: Float[Array, "m m blocks networks"]) -> Float[Array, "m m 1 networks"]:
    """The covariance of all columns: the sum over blocks."""
    return V if V.shape[2] == 1 else total(V, axis=2)[:, :, None]


def wishart_factor(
    freedom: int, *, tokens: int, blocks: int, dtype: jnp.dtype, keys: NetworkKeys
) -> Float[Array, "m m blocks networks"]:
    """Lower triangular B with B Bᵀ ~ Wishart_m(ν, I): chi variables with ν, ν − 1, … degrees on the diagonal, normals
    below it (Bartlett's decomposition). Fewer than m degrees of freedom leave columns of zeros.

    Given G (m × ν) with G Gᵀ = B Bᵀ, G is B times m uniformly random orthonormal directions: what is drawn next with
    these directions and other normals can be drawn with B alone.
    """  # noqa: D205
    rank = min(tokens, freedom)
    below, on = keys.split(2)
    if rank == 0:
        return jnp.zeros((tokens, tokens, blocks, keys.high.shape[0]), dtype)
    chi = chi_variables([freedom - i for i in range(rank)], blocks=blocks, dtype=dtype, keys=on)
    # As many normals as entries: to draw those below the diagonal only and to put them there takes longer.
    normals = below.normals((tokens, rank, blocks), dtype)
    row, column = jnp.arange(tokens)[:, None, None, None], jnp.arange(rank)[:, None, None]
    B = jnp.where(row > column, normals, jnp.where(row == column, chi[None], 0.0))
    return jnp.pad(B, [(0, 0), (0, tokens - rank), (0, 0), (0, 0)])


def chi_variables(
    freedom: list[int], *, blocks: int, dtype: jnp.dtype, keys: NetworkKeys
) -> Float[Array, "k blocks networks"]:
    """Chi variables, by Marsaglia and Tsang's rejection (2000), exact for every ν ≥ 1.

    χ² = 2d (1 + u)³ with d = ν/2 − 1/3 and normal 3√d u has exactly the law of a chi-square variable where it is kept
    with probability exp f(u), f(u) = 3d (log(1 + u) − u + u²/2 − u³/3) ≤ 0: all but one in 18ν are kept.
    """
    d = (jnp.asarray(freedom, dtype) / 2 - 1 / 3)[:, None, None]
    shape = (len(freedom), blocks)
    key_normals, key_uniforms = keys.split(2)

    def propose(state):
        attempt, chi, kept = state
        u = key_normals.normals(shape, dtype, block=attempt) / (3 * jnp.sqrt(d))
        positive = u > -1
        u = jnp.where(positive, u, 0.0)
        log_probability = 3 * d * (jnp.log1p(u) - u * (1 - u * (1 / 2 - u / 3)))
        accepted = positive & (key_uniforms.uniforms(shape, dtype, block=attempt) < jnp.exp(log_probability))
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
    width: int,
    keys: NetworkKeys,
) -> Float[Array, "m m blocks networks"]:
    """Draw V′ = X′X′ᵀ/n for X′ = λX + γ F G, where V = X Xᵀ/n = L Lᵀ and G (m × n) has iid normals.

    A noncentral Wishart variable. In orthonormal directions of which the first m span X's rows, X′/√n is
    λL + γ F Ω₁/√n there, and γ F Ω₂/√n in the other n − m, with F Ω₂ (F Ω₂)ᵀ = F B Bᵀ Fᵀ, B B ᵀ ~ Wishart_m(n − m, I).
    """
    tokens, blocks, dtype = L.shape[0], L.shape[2], L.dtype
    key_near, key_far = keys.split(2)
    scale = gamma / math.sqrt(width)
    omega = key_near.normals((tokens, tokens, blocks), dtype)
    B = wishart_factor(width // blocks - tokens, tokens=tokens, blocks=blocks, dtype=dtype, keys=key_far)
    near = shortcut * L + scale * matmul(F, omega)
    return gram(near) + gram(scale * matmul(F, B))


def column_sum(
    images: Callable[[Float[Array, "m k blocks networks"]], Float[Array, "m k blocks networks"]],
    columns: int,
    *,
    tokens: int,
    blocks: int,
    dtype: jnp.dtype,
    keys: NetworkKeys,
) -> Float[Array, "m m blocks networks"]:
    """Σ_j y_j y_jᵀ over so many columns y = image of a column of m normals; the same columns for the same keys.

    Arguments:
        images: from normals to their images, column by column; columns of zeros go to zeros.
        columns: how many in each block.
        tokens: m.
        blocks: how many blocks.
        dtype: of the normals.
        keys: where they come from.
    """
    chunks = math.ceil(columns / CHUNK)
    chunk = math.ceil(columns / chunks)

    def add(number: Int[Array, ""], S: Array) -> Array:
        G = keys.normals((tokens, chunk, blocks), dtype, block=number)
        if chunk * chunks > columns:
            there = number * chunk + jnp.arange(chunk) < columns
            G = jnp.where(there[:, None, None], G, 0.0)
        return S + gram(images(G))

    start = jnp.zeros((tokens, tokens, blocks, keys.high.shape[0]), dtype)
    return jax.lax.fori_loop(0, chunks, add, start)


def with_gram(
    V: Float[Array, "m m blocks networks"], W: Float[Array, "m m blocks networks"]
) -> Float[Array, "m m blocks networks"]:
    """K with K W Kᵀ = V for definite W: if G Gᵀ = W has uniform directions, K G has them too, and V."""
    return matmul(factor(V), invert_lower(factor(W)))
