"""What increments tell of gains and temperatures, against what their approximate law claims.

The law takes the logarithm of an increment as normal. Where S is a mean of few parts that are nearly singular, as for
two heads that attend to single tokens, the logarithm has a heavy tail, and the law claims more information on a
temperature than there is. As for composite likelihoods of one parameter (Pauli, Racugno and Ventura 2011), the log
density of the temperature is multiplied by H/J for each increment: H is the information by the law, J the variance of
its score by draws of exact increments.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import xarray as xr
from jaxtyping import Array, ArrayLike, Float

from sdeinfer.blocks._coefficients import LOG_FACTORS, law_of_increment, nodes_of, readings, reshaped
from sdeinfer.blocks._logarithm import SINGULAR
from sdeinfer.blocks._order import BlockOrder

DRAWS = 1024
"""Largest number of draws of each increment."""

STEP = 0.05
"""Step of the differences in the logarithm of a gain or temperature."""


def scale_free(coefficients: Float[ArrayLike, "... 4"]) -> Float[Array, "..."]:
    """Log density of an increment without its scale: log g² is integrated out; up to a constant.

    The density of an increment is the product of this one, which does not depend on g, and of a normal density of the
    scale about log g².
    """
    constant, linear, quadratic, rest = (jnp.asarray(coefficients)[..., degree] for degree in range(4))
    return constant - linear**2 / (4 * quadratic) + rest - jnp.log(-quadratic) / 2


def adjusted_coefficients(
    coefficients: Float[np.ndarray, "networks branches grid 4"], data: xr.Dataset, order: BlockOrder, *, seed: int = 0
) -> Float[np.ndarray, "networks branches grid 4"]:
    """Coefficients whose information on gains and temperatures agrees with the scatter of their score.

    The scale-free log density of an increment, less its value at the mode of its block's gain or temperature, is
    multiplied by H/J at the mode, or by 1 if H exceeds J. The information on strengths stays as it is; so do branches
    without `hidden_draws`, whose law is that of many parts.

    Arguments:
        coefficients: the result of `branch_coefficients`.
        data: the Dataset of branches that they are of.
        order: its blocks.
        seed: number of the draws.
    """
    found, free = coefficients.copy(), np.asarray(scale_free(coefficients))
    part = np.asarray(order.part)
    for block, width, rows, own, V in readings(data, order):
        mode = int(free[:, part == part[own[0]]].sum((0, 1)).argmax())
        with jax.enable_x64(True):  # noqa: FBT003
            nodes = [nodes_of(block, V.shape[-1], width, seed=number) for number in (seed, seed + 1)]
            factors = jnp.asarray(_wishart_factors(V.shape[-1], width, seed))
            share = _shares(reshaped(block, LOG_FACTORS[mode]), jnp.asarray(V), nodes, factors, width)
        where = np.ix_(rows, own)
        lost = np.asarray(share)[..., None] - 1
        found[..., 3][where] += lost * (free[where] - free[where][..., mode, None])
    return found


@eqx.filter_jit
def _shares(block, V, nodes, factors, width):
    """H/J of the increments, at most 1, for covariances that their branches read.

    The law and the draws have nodes of their own.
    """
    of_law, of_draws = nodes

    def of_one(V):
        S = block.branch.hidden_draws(V, of_draws, width=width)
        if S is None:
            return jnp.ones(())
        bias, B = block.bias / jnp.square(block.strength), factors[: len(S)]
        # Draws may be singular, of which the law has no logarithm.
        root = jnp.linalg.cholesky(S[:DRAWS] + bias + SINGULAR * V)
        D = jnp.einsum("dik,djk->dij", root @ B, root @ B)

        def at(step):
            moved = reshaped(block, step)
            return scale_free(jax.vmap(lambda D: law_of_increment(moved, V, D, of_law, width=width).in_factor())(D))

        below, here, above = jax.lax.map(at, STEP * jnp.arange(-1.0, 2.0))
        information = (2 * here - above - below).mean() / STEP**2
        scatter = jnp.var((above - below) / (2 * STEP))
        return jnp.clip(information / jnp.maximum(scatter, jnp.finfo(scatter.dtype).tiny), 0.0, 1.0)

    return jax.lax.map(lambda row: jax.lax.map(of_one, row), V)


def _wishart_factors(tokens: int, width: int, seed: int) -> Float[np.ndarray, "draws m m"]:
    """Draws of lower triangular B with B Bᵀ ~ Wishart_m(n, I)/n (Bartlett's decomposition)."""
    rng = np.random.default_rng([seed, tokens, width])
    B = np.tril(rng.standard_normal((DRAWS, tokens, tokens)), -1)
    B[:, np.arange(tokens), np.arange(tokens)] = np.sqrt(rng.chisquare(width - np.arange(tokens), (DRAWS, tokens)))
    return B / np.sqrt(width)
