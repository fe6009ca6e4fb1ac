"""What increments tell of gains and temperatures, against what their approximate law claims.

The law takes the logarithm of an increment as normal. Where S is a mean of few parts that are nearly singular, as for
two heads that attend to single tokens, the logarithm has a heavy tail, and the law claims more information on a
temperature than there is. As composite likelihoods of one parameter are (Pauli, Racugno and Ventura 2011), the log
density of a block's temperature is multiplied by H/J: H is the information by the law, and J the mean square of the
score by draws of exact increments.
"""

import math
from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import xarray as xr
from jaxtyping import Float

from sdeinfer.blocks._coefficients import LOG_FACTORS, Reading, law_of_increment, readings, reshaped
from sdeinfer.blocks._logarithm import SINGULAR
from sdeinfer.blocks._order import BlockOrder

INCREMENTS, DRAWS = 16, 1024
"""Largest number of increments of a block of which draws are made, and of draws of each."""

STEP = 0.05
"""Step of the differences in the logarithm of a gain or temperature."""


def scale_free(coefficients: Float[Any, "... 4"]) -> Float[Any, "..."]:
    """Log density of an increment without its scale: log g² is integrated out; up to a constant.

    The density of an increment is the product of this one, which does not depend on g, and of a normal density of the
    scale about log g².
    """
    constant, linear, quadratic, rest = (coefficients[..., degree] for degree in range(4))
    # NumPy's arrays are of double precision, whatever JAX's are.
    log = coefficients.__array_namespace__().log
    return constant - linear**2 / (4 * quadratic) + rest - log(-quadratic) / 2


def adjusted_coefficients(
    coefficients: Float[np.ndarray, "networks branches grid 4"], data: xr.Dataset, order: BlockOrder, *, seed: int = 0
) -> Float[np.ndarray, "networks branches grid 4"]:
    """Coefficients whose information on gains and temperatures agrees with the scatter of their scores.

    The scale-free log density of the increments of a block, less its value at the mode of the block's gain or
    temperature, is multiplied by H/J at the mode, or by 1 if H exceeds J. The information on strengths stays as it is;
    so do branches without `hidden_draws`, whose law is that of many parts.

    Arguments:
        coefficients: the result of `branch_coefficients`.
        data: the Dataset of branches that they are of.
        order: its blocks.
        seed: number of the nodes of `branch_coefficients`.
    """
    found, free = coefficients.copy(), scale_free(coefficients)
    part, each = np.asarray(order.part), list(readings(data, order))
    for number in range(len(order.blocks)):
        own = part == number
        mode = int(free[:, own].sum((0, 1)).argmax())
        share = _information_share([here for here in each if own[here.branch]], float(LOG_FACTORS[mode]), seed)
        found[..., 3][:, own] += (share - 1) * (free[:, own] - free[:, own][..., mode, None])
    return found


def _information_share(each: Sequence[Reading], log_factor: float, seed: int) -> float:
    """H/J of a block's increments at a factor of its gain or temperature, at most 1."""
    found = np.zeros(2)
    for here in each[:: math.ceil(len(each) / INCREMENTS)]:
        with jax.enable_x64(True):  # noqa: FBT003
            block, V = reshaped(here.block, log_factor), jnp.asarray(here.V)
            draws = _draws(block, V, here.nodes(seed=seed + 1), _wishart_factors(here, seed), here.width)
            if draws is None:
                return 1.0
            found += np.asarray(_information(block, V, draws, here.nodes(seed=seed), here.width))
    return float(np.clip(found[0] / max(found[1], np.finfo(float).tiny), 0.0, 1.0))


@eqx.filter_jit
def _draws(block, V, nodes, factors, width):
    """Draws of ΔΔᵀ/n for a strength of 1, those of a Wishart matrix given those of S; None without draws of S."""
    S = block.branch.hidden_draws(V, nodes, width=width)
    if S is None:
        return None
    # Draws may be singular, of which the law has no logarithm.
    root = jnp.linalg.cholesky(S[:DRAWS] + block.bias / jnp.square(block.strength) + SINGULAR * V)
    h = root @ factors[: len(root)]
    return h @ jnp.swapaxes(h, 1, 2)


@eqx.filter_jit
def _information(block, V, draws, nodes, width):
    """Means over draws of less the second derivative of the scale-free log density, and of the square of the first."""

    def at(step):
        moved = reshaped(block, step)
        return scale_free(jax.vmap(lambda D: law_of_increment(moved, V, D, nodes, width=width).in_factor())(draws))

    below, here, above = jax.lax.map(at, STEP * jnp.arange(-1.0, 2.0))
    first, second = (above - below) / (2 * STEP), (above - 2 * here + below) / STEP**2
    return jnp.stack([-second.mean(), jnp.square(first).mean()])


def _wishart_factors(here: Reading, seed: int) -> Float[np.ndarray, "draws m m"]:
    """Draws of lower triangular B with B Bᵀ ~ Wishart_m(n, I)/n (Bartlett's decomposition)."""
    rng, tokens = np.random.default_rng([seed, here.network, here.branch]), len(here.V)
    B = np.tril(rng.standard_normal((DRAWS, tokens, tokens)), -1)
    diagonal = np.arange(tokens)
    B[:, diagonal, diagonal] = np.sqrt(rng.chisquare(here.width - diagonal, (DRAWS, tokens)))
    return B / np.sqrt(here.width)
