"""The information of increments on a temperature where the logarithm of S has heavy tails.

A branch with few heads has an S that is nearly singular where tokens attend to the same single tokens in all heads, and
the logarithm of its least eigenvalue has a heavy tail. A normal law makes posteriors of the
temperature too narrow: its score has a variance J far above the information H. Here the scale-free part of an increment
has a multivariate t law of the same mean and covariance, whose score is bounded. The log density of a block's
temperature is then adjusted as a composite likelihood (Pauli, Racugno and Ventura 2011), by draws of exact increments:
it is multiplied by H/J and moved by the bias of its score over H.
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

from sdeinfer.blocks._branch import wishart_factors
from sdeinfer.blocks._coefficients import (
    LOG_FACTORS,
    BranchInput,
    branch_inputs,
    law_of_increment,
    over_inputs,
    reshaped,
)
from sdeinfer.blocks._law import LEAST_EIGENVALUE
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
    chi_square, remainder = _split(coefficients)
    return remainder - chi_square / 2


def _split(coefficients: Any) -> tuple[Any, Any]:
    """χ² of the scale-free part, and what its log density adds to −χ²/2."""
    constant, linear, quadratic, remainder = (coefficients[..., degree] for degree in range(4))
    # NumPy's arrays are of double precision, whatever JAX's are.
    log = coefficients.__array_namespace__().log
    return linear**2 / (2 * quadratic) - 2 * constant, remainder - log(-quadratic) / 2


def _by_t(coefficients: Float[np.ndarray, "... 4"], count: int, freedom: float) -> Float[np.ndarray, "..."]:
    """The same by a t law of `count` variables; +∞ degrees of freedom are the normal law."""
    if not math.isfinite(freedom):
        return scale_free(coefficients)
    chi_square, remainder = _split(coefficients)
    constant = math.lgamma((freedom + count) / 2) - math.lgamma(freedom / 2) - count / 2 * math.log(freedom / 2 - 1)
    return remainder + constant - (freedom + count) / 2 * np.log1p(chi_square / (freedom - 2))


def _freedom(chi_square: Float[np.ndarray, " draws"], count: int) -> float:
    """Degrees of freedom of the t law of `count` variables that has the fourth moments of draws; +∞ for light tails."""
    ratio = np.square(chi_square).mean() / chi_square.mean() ** 2 * count / (count + 2)
    return (4 * ratio - 2) / (ratio - 1) if ratio > 1 else math.inf


def adjusted_coefficients(
    coefficients: Float[np.ndarray, "networks branches grid 4"], data: xr.Dataset, order: BlockOrder
) -> Float[np.ndarray, "networks branches grid 4"]:
    """Coefficients whose information on temperatures agrees with the scatter of their scores.

    The scale-free log density of the increments of a block, by a t law, is moved by b/H, the bias of the score over the
    information at the mode, and multiplied by H/J. The information on strengths stays as it is; so do branches without
    `hidden_draws`, whose law is that of many parts.
    """
    adjusted, tokens = coefficients.copy(), data.sizes["token_a"]
    part, inputs, count = np.asarray(order.part), list(branch_inputs(data, order)), tokens * (tokens + 1) // 2 - 1
    for number in range(len(order.blocks)):
        branches = np.flatnonzero(part == number)
        free = scale_free(coefficients[:, branches])
        mode = int(free.sum((0, 1)).argmax())
        drawn = _drawn_coefficients([entry for entry in inputs if entry.branch in branches], float(LOG_FACTORS[mode]))
        if drawn is None or not count or not drawn.size:
            continue
        freedom = _freedom(_split(drawn[1])[0], count)
        move, share = _adjustment(_by_t(drawn, count, freedom), free[..., 0].size)
        logs = np.clip(LOG_FACTORS + move, LOG_FACTORS[0], LOG_FACTORS[-1])
        moved = barycentric_interpolate(
            LOG_FACTORS, _by_t(coefficients[:, branches], count, freedom), logs, axis=-1, rng=0
        )
        adjusted[..., 3][:, branches] += moved[..., mode, None] + share * (moved - moved[..., mode, None]) - free
    return adjusted


def _adjustment(density: Float[np.ndarray, "steps draws"], increments: int) -> tuple[float, float]:
    """b/H and H/J, from log densities of draws at three steps of a log temperature."""
    below, centre, above = density
    score, information = (above - below) / (2 * STEP), -(above - 2 * centre + below).mean() / STEP**2
    least = 0.1 / increments  # below this information nothing is adjusted
    move = score.mean() / (max(information, 0.0) + least)
    share = (max(information, 0.0) + least) / (score.var() + least)
    return float(np.clip(move, -math.log(2), math.log(2))), float(share)


def _drawn_coefficients(inputs: Sequence[BranchInput], log_factor: float) -> Float[np.ndarray, "steps draws 4"] | None:
    """Coefficients of draws of a block's increments at three steps about a factor of its gain or temperature."""

    def at_steps(entry: BranchInput) -> np.ndarray | None:
        with jax.enable_x64(True):  # noqa: FBT003
            block, V, width = reshaped(entry.block, log_factor), jnp.asarray(entry.V), jnp.asarray(entry.width)
            draws = _draws(block, V, entry.nodes(seed=1), _wishart_factors(entry), width)
            return None if draws is None else np.asarray(_at_steps(block, V, draws, entry.nodes(), width))

    chosen = inputs[:: math.ceil(len(inputs) / INCREMENTS)]
    coefficients = [drawn for drawn in over_inputs(at_steps, chosen) if drawn is not None]
    if not coefficients:
        return None
    drawn = np.concatenate(coefficients, axis=1)
    # Nearly equal tokens make some draws singular.
    return drawn[:, np.isfinite(drawn).all((0, 2))]


@eqx.filter_jit
def _draws(block, V, nodes, factors, width):
    """Draws of ΔΔᵀ/n for a strength of 1, those of a Wishart matrix given those of S; None without draws of S."""
    S = block.branch.hidden_draws(V, nodes, width=width)
    if S is None:
        return None
    # Draws may be singular, of which the law has no logarithm.
    root = jnp.linalg.cholesky(S[:DRAWS] + block.bias / jnp.square(block.strength) + LEAST_EIGENVALUE * V)
    h = root @ factors[: len(root)]
    return h @ jnp.swapaxes(h, 1, 2)


@eqx.filter_jit
def _at_steps(block, V, draws, nodes, width):
    def polynomials(step):
        return jax.vmap(lambda D: law_of_increment(reshaped(block, step), V, D, nodes, width=width).in_factor())(draws)

    return jax.lax.map(polynomials, STEP * jnp.arange(-1.0, 2.0))


def _wishart_factors(entry: BranchInput) -> Float[np.ndarray, "draws m m"]:
    """Draws of lower triangular B with B Bᵀ ~ Wishart_m(n, I)/n."""
    rng, tokens = np.random.default_rng([0, entry.network, entry.branch]), len(entry.V)
    uniforms = rng.random((DRAWS, tokens * (tokens + 1) // 2))
    return wishart_factors(uniforms, tokens, entry.width) / np.sqrt(entry.width)
