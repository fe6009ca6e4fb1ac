"""Laplace's approximation of a posterior in its unconstrained parameters.

Programs are compiled once per process, model and shape of the pooled data.
"""

import math
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from arviz_stats.base.array import array_stats
from jaxtyping import Array, Float, PRNGKeyArray, PyTree

from sdeinfer._files import InputError
from sdeinfer.infer._densities import sites_and_layers
from sdeinfer.infer._mode import posterior_mode, potential
from sdeinfer.likelihood import AbstractModel

FEWEST = 100
"""Smallest number of draws for a Pareto k; at this size it is estimated from the largest fifth of the weights."""

BATCH = 250
"""Number of draws evaluated at a time."""


class Normal(NamedTuple):
    """A normal law of the unconstrained parameters.

    Attributes:
        sites: names of the latent sites, all scalar.
        mean: mean, shape (sites,).
        scale: lower triangular L of the covariance L Lᵀ, shape (sites, sites).
    """

    sites: tuple[str, ...]
    mean: Float[Array, " sites"]
    scale: Float[Array, "sites sites"]


def laplace(model: AbstractModel, prepared: PyTree) -> Normal:
    """The normal law with the mode and the curvature of the posterior.

    The curvature is from finite differences, which need no further compilation; a Hessian by automatic differentiation
    agrees to 1e-5 and takes longer to compile than everything else.

    Arguments:
        model: the model.
        prepared: pooled data of the model.

    Raises:
        InputError: if the posterior is not concave at its mode.
    """
    mode = posterior_mode(model, prepared)
    try:
        scale = np.linalg.cholesky(np.linalg.inv(mode.curvature))
    except np.linalg.LinAlgError as error:
        raise InputError(
            "covariance: the posterior is not concave at its mode, so no normal law is near it; use fit"
        ) from error
    return Normal(mode.sites, jnp.asarray(mode.x), jnp.asarray(scale))


def pareto_k(log_weights: Float[np.ndarray, " draws"]) -> float:
    """Pareto shape k of the tail of importance weights; above 0.7 neither weights nor proposal are reliable.

    Arguments:
        log_weights: log of target over proposal density at each draw, up to a constant; at least `FEWEST` draws.

    Returns:
        k, negative for bounded weights; −∞ for weights that are equal up to rounding.
    """
    # Densities that overflow count as zero.
    log_weights = np.where(np.isfinite(log_weights), log_weights, -np.inf)
    if np.ptp(log_weights) < math.sqrt(np.finfo(log_weights.dtype).eps):
        return -math.inf
    # ArviZ's function takes log likelihoods, the negative log weights of leave-one-out.
    _, k = array_stats.psislw(log_weights.max() - log_weights)
    return float(k)


def draw(
    model: AbstractModel, prepared: PyTree, normal: Normal, *, draws: int, key: PRNGKeyArray
) -> tuple[dict[str, Array], Float[Array, "draws *networks coordinates"] | None, Float[Array, " draws"]]:
    """Draw from a normal law.

    Arguments:
        model: the model.
        prepared: pooled data of the model.
        normal: the normal law.
        draws: number of draws.
        key: PRNG key.

    Returns:
        Values of the latent and deterministic sites; the coordinates of the layer, None without a single layer; and the
        log ratio of the posterior density to the normal density, up to a constant.
    """
    standard = jr.normal(key, (draws, len(normal.sites)), normal.mean.dtype)
    return _at(model, prepared, *normal, standard)


@eqx.filter_jit
def _at(
    model: AbstractModel, prepared: PyTree, sites: tuple[str, ...], mean: Array, scale: Array, standard: Array
) -> tuple[dict[str, Array], Array | None, Array]:
    def evaluate(z: Array) -> tuple[dict[str, Any], Array | None, Array]:
        x = mean + scale @ z
        named = dict(zip(sites, x, strict=True))
        values, layers = sites_and_layers(model, prepared, named)
        return values, layers, jnp.sum(z**2) / 2 - potential(model, prepared, named)

    return jax.lax.map(evaluate, standard, batch_size=BATCH)
