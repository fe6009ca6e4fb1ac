"""Laplace's approximation of a posterior in its unconstrained parameters.

Programs are compiled once per process, model and shape of the pooled data.
"""

import math
from functools import partial

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from arviz_stats.base.array import array_stats
from jaxtyping import Array, Float, PRNGKeyArray, PyTree

from sdeinfer._files import InputError
from sdeinfer.infer._densities import constrained_sites
from sdeinfer.infer._mode import Mode, potential
from sdeinfer.likelihood import AbstractModel

FEWEST = 100
"""Smallest number of draws for a Pareto k; at this size it is estimated from the largest fifth of the weights."""

BATCH = 250
"""Number of draws evaluated at a time."""


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
    model: AbstractModel, prepared: PyTree, mode: Mode, *, draws: int, key: PRNGKeyArray
) -> tuple[dict[str, np.ndarray], Float[np.ndarray, "draws *networks coordinates"] | None, Float[np.ndarray, " draws"]]:
    """Draw from the normal law of a mode.

    Arguments:
        model: the model.
        prepared: pooled data of the model.
        mode: the mode of the posterior.
        draws: number of draws.
        key: PRNG key.

    Returns:
        Values of the latent and deterministic sites; the coordinates of the layer, None without a single layer; and the
        log ratio of the posterior density to the normal density, up to a constant.

    Raises:
        InputError: if the posterior is not concave at its mode.
    """
    try:
        # The curvature is from finite differences, which need no further compilation; a Hessian by automatic
        # differentiation agrees to 1e-5.
        scale = np.linalg.cholesky(np.linalg.inv(mode.curvature))
    except np.linalg.LinAlgError as error:
        raise InputError(
            "covariance: the posterior is not concave at its mode, so no normal law is near it; use fit"
        ) from error
    dtype = jnp.result_type(float)
    standard = np.asarray(jr.normal(key, (draws, len(mode.x)), dtype))
    z = mode.by_site(np.asarray(mode.x + standard @ scale.T, dtype))
    sites, layers = constrained_sites(model, prepared, {name: value[None] for name, value in z.items()})
    target = np.asarray(_potentials(model, prepared, z))
    samples = {name: value[0] for name, value in sites.items()}
    return samples, None if layers is None else layers[0], (standard**2).sum(axis=1) / 2 - target


@partial(jax.jit, static_argnums=0)
def _potentials(model: AbstractModel, prepared: PyTree, z: dict[str, Array]) -> Float[Array, " draws"]:
    return jax.lax.map(lambda z: potential(model, prepared, z), z, batch_size=BATCH)
