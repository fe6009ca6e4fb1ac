"""What increments tell of a temperature where the logarithm of S has heavy tails.

A branch with few heads has an S that is nearly singular where tokens attend to the same single tokens in all heads, and
the logarithm of its least eigenvalue has a heavy tail. By a normal law such increments tell too much of the
temperature: its score has a variance J far above the information H. Here the scale-free part of an increment has a
multivariate t law of the same mean and covariance, whose score is bounded. As composite likelihoods are (Pauli, Racugno
and Ventura 2011), the log density of a block's temperature is then adjusted by draws of exact increments: multiplied by
H/J, and moved by the bias of its score over H.
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
from scipy.interpolate import barycentric_interpolate

from sdeinfer.blocks._coefficients import LOG_FACTORS, Reading, law_of_increment, readings, reshaped
from sdeinfer.blocks._logarithm import SINGULAR
from sdeinfer.blocks._order import BlockOrder

INCREMENTS, DRAWS = 16, 1024
"""Largest number of increments of a block of which draws are made, and of draws of each."""

STEP = 0.05
"""Step of the differences in the logarithm of a gain or temperature."""

FREEDOM = 8.0
"""Degrees of freedom of the t law, near those of the largest H²/J and density for two to eight peaked heads."""

LARGEST_MOVE = math.log(2)
"""Largest move of a log temperature by the bias of its score."""


def scale_free(coefficients: Float[Any, "... 4"]) -> Float[Any, "..."]:
    """Log density of an increment without its scale: log g² is integrated out; up to a constant.

    The density of an increment is the product of this one, which does not depend on g, and of a normal density of the
    scale about log g².
    """
    chi_square, rest = _split(coefficients)
    return rest - chi_square / 2


def _split(coefficients: Any) -> tuple[Any, Any]:
    """χ² of the scale-free part, and what its log density adds to −χ²/2."""
    constant, linear, quadratic, rest = (coefficients[..., degree] for degree in range(4))
    # NumPy's arrays are of double precision, whatever JAX's are.
    log = coefficients.__array_namespace__().log
    return linear**2 / (2 * quadratic) - 2 * constant, rest - log(-quadratic) / 2


def _by_t(coefficients: Any, tokens: int) -> Any:
    """The same by the t law."""
    chi_square, rest = _split(coefficients)
    count = tokens * (tokens + 1) / 2 - 1
    log1p = coefficients.__array_namespace__().log1p
    constant = math.lgamma((FREEDOM + count) / 2) - math.lgamma(FREEDOM / 2) - count / 2 * math.log(FREEDOM / 2 - 1)
    return rest + constant - (FREEDOM + count) / 2 * log1p(chi_square / (FREEDOM - 2))


def adjusted_coefficients(
    coefficients: Float[np.ndarray, "networks branches grid 4"], data: xr.Dataset, order: BlockOrder, *, seed: int = 0
) -> Float[np.ndarray, "networks branches grid 4"]:
    """Coefficients whose information on temperatures agrees with the scatter of their scores.

    The scale-free log density of the increments of a block, by a t law, is moved by b/H, the bias of the score over the
    information at the mode, and multiplied by H/J. The information on strengths stays as it is; so do branches without
    `hidden_draws`, whose law is that of many parts.

    Arguments:
        coefficients: the result of `branch_coefficients`.
        data: the Dataset of branches that they are of.
        order: its blocks.
        seed: number of the nodes of `branch_coefficients`.
    """
    found, tokens = coefficients.copy(), data.sizes["token_a"]
    part, each = np.asarray(order.part), list(readings(data, order))
    for number in range(len(order.blocks)):
        own = np.flatnonzero(part == number)
        free, by_t = scale_free(coefficients[:, own]), _by_t(coefficients[:, own], tokens)
        mode = int(by_t.sum((0, 1)).argmax())
        used = [here for here in each if here.branch in own]
        moments = _score_moments(used, float(LOG_FACTORS[mode]), seed)
        if moments is None:
            continue
        information, bias, square = moments
        # The added 1 is the information of a unit of the logarithm: without any the temperature does not move.
        move = np.clip(bias / (information + 1 / len(used)), -LARGEST_MOVE, LARGEST_MOVE)
        share = max(information, 0.0) / max(square - bias**2, np.finfo(float).tiny)
        at = np.clip(LOG_FACTORS + move, LOG_FACTORS[0], LOG_FACTORS[-1])
        moved = barycentric_interpolate(LOG_FACTORS, by_t, at, axis=-1)
        found[..., 3][:, own] += moved[..., mode, None] + share * (moved - moved[..., mode, None]) - free
    return found


def _score_moments(each: Sequence[Reading], log_factor: float, seed: int) -> np.ndarray | None:
    """H, and means of the score and of its square, of a block's increments at a factor of its gain or temperature.

    None for a branch without draws of S.
    """
    found = []
    for here in each[:: math.ceil(len(each) / INCREMENTS)]:
        with jax.enable_x64(True):  # noqa: FBT003
            block, V = reshaped(here.block, log_factor), jnp.asarray(here.V)
            draws = _draws(block, V, here.nodes(seed=seed + 1), _wishart_factors(here, seed), here.width)
            if draws is None:
                return None
            found.append(np.asarray(_information(block, V, draws, here.nodes(seed=seed), here.width)))
    return np.mean(found, axis=0)


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
    """Means over draws of less the second derivative of the scale-free log density, the first, and its square."""

    def at(step):
        law = jax.vmap(lambda D: law_of_increment(reshaped(block, step), V, D, nodes, width=width).in_factor())
        return _by_t(law(draws), len(V))

    below, here, above = jax.lax.map(at, STEP * jnp.arange(-1.0, 2.0))
    first, second = (above - below) / (2 * STEP), (above - 2 * here + below) / STEP**2
    return jnp.stack([-second.mean(), first.mean(), jnp.square(first).mean()])


def _wishart_factors(here: Reading, seed: int) -> Float[np.ndarray, "draws m m"]:
    """Draws of lower triangular B with B Bᵀ ~ Wishart_m(n, I)/n (Bartlett's decomposition)."""
    rng, tokens = np.random.default_rng([seed, here.network, here.branch]), len(here.V)
    B = np.tril(rng.standard_normal((DRAWS, tokens, tokens)), -1)
    diagonal = np.arange(tokens)
    B[:, diagonal, diagonal] = np.sqrt(rng.chisquare(here.width - diagonal, (DRAWS, tokens)))
    return B / np.sqrt(here.width)
