"""Normal laws near a posterior, in its unconstrained parameters: at the mode, and by variational inference.

Each is compiled once a process for each model and shape of its data, as NUTS is; the data are pooled.
"""

import math
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import numpyro
import numpyro.distributions as dist
from arviz_stats.base.array import array_stats
from jaxtyping import Array, Float, PRNGKeyArray, PyTree
from numpyro import handlers
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoMultivariateNormal
from numpyro.infer.initialization import init_to_value
from numpyro.optim import Adam

from sdeinfer._files import InputError
from sdeinfer.infer._densities import sites_and_layers
from sdeinfer.infer._mode import posterior_mode, potential
from sdeinfer.likelihood import AbstractModel

STEPS, PARTICLES, RATE = 500, 64, 0.05
"""Of Adam: its steps, the draws that the ELBO of each is the mean of, and the largest step, in sds of the start."""

FEWEST = 100
"""Draws of which a Pareto k can be found: a fifth of so few are the tail that it is found from."""

BATCH = 250
"""How many draws at a time."""


class Normal(NamedTuple):
    """A normal law of the unconstrained parameters.

    Attributes:
        sites: names of the latent sites, all of them scalars.
        mean: shape (sites,).
        scale: L of the covariance L Lᵀ, lower triangular, shape (sites, sites).
    """

    sites: tuple[str, ...]
    mean: Float[Array, " sites"]
    scale: Float[Array, "sites sites"]


def laplace(model: AbstractModel, prepared: PyTree) -> Normal:
    """The normal law with the mode and the curvature of the posterior.

    The differences that the search for the mode has compiled give the curvature; a Hessian by automatic
    differentiation agrees with them to 1e-5, and takes longer to compile than all else.

    Arguments:
        model: the model.
        prepared: its data, pooled.

    Raises:
        InputError: where the posterior is not concave at its mode.
    """
    mode = posterior_mode(model, prepared)
    try:
        scale = np.linalg.cholesky(np.linalg.inv(mode.curvature))
    except np.linalg.LinAlgError as error:
        raise InputError(
            "covariance: the posterior is not concave at its mode, so no normal law is near it; use fit"
        ) from error
    return Normal(mode.sites, jnp.asarray(mode.x), jnp.asarray(scale))


def svi(model: AbstractModel, prepared: PyTree, *, start: Normal, key: PRNGKeyArray) -> Normal:
    """The normal law q with the smallest KL(q ‖ posterior), by stochastic variational inference.

    Arguments:
        model: the model.
        prepared: its data, pooled.
        start: where to start.
        key: where the randomness comes from.
    """
    return Normal(start.sites, *_svi(model, prepared, *start, key))


def pareto_k(log_weights: Float[np.ndarray, " draws"]) -> float:
    """How heavy the tail of importance weights is: above 0.7 they, and the law that the draws are of, say little.

    Arguments:
        log_weights: log of target over proposal at each draw, up to a constant; `FEWEST` of them or more.

    Returns:
        k, below 0 for weights that are bounded; −∞ where they differ by no more than rounding, as they have no tail.
    """
    # A density that overflows is none.
    log_weights = np.where(np.isfinite(log_weights), log_weights, -np.inf)
    if np.ptp(log_weights) < math.sqrt(np.finfo(log_weights.dtype).eps):
        return -math.inf
    # ArviZ's function takes log likelihoods, of which log weights are the negative, as in leave-one-out.
    _, k = array_stats.psislw(log_weights.max() - log_weights)
    return float(k)


def draw(
    model: AbstractModel, prepared: PyTree, normal: Normal, *, draws: int, key: PRNGKeyArray
) -> tuple[dict[str, Array], Float[Array, "draws *networks coordinates"], Float[Array, " draws"]]:
    """Draw from a normal law.

    Arguments:
        model: the model.
        prepared: its data, pooled.
        normal: the law.
        draws: how many.
        key: where the randomness comes from.

    Returns:
        Values of the latent and deterministic sites; the coordinates of the layer; and the log of the posterior's
        density over that of the law, up to a constant.
    """
    standard = jr.normal(key, (draws, len(normal.sites)), normal.mean.dtype)
    return _at(model, prepared, *normal, standard)


@eqx.filter_jit
def _at(
    model: AbstractModel, prepared: PyTree, sites: tuple[str, ...], mean: Array, scale: Array, standard: Array
) -> tuple[dict[str, Array], Array, Array]:
    def evaluate(z: Array) -> tuple[dict[str, Any], Array, Array]:
        x = mean + scale @ z
        named = dict(zip(sites, x, strict=True))
        values, layers = sites_and_layers(model, prepared, named)
        return values, layers, jnp.sum(z**2) / 2 - potential(model, prepared, named)

    return jax.lax.map(evaluate, standard, batch_size=BATCH)


@eqx.filter_jit
def _svi(
    model: AbstractModel, prepared: PyTree, sites: tuple[str, ...], mean: Array, scale: Array, key: PRNGKeyArray
) -> tuple[Array, Array]:
    """In coordinates z in which the start is standard normal: a step of Adam is as long for every parameter."""
    count = len(sites)

    def standardised() -> None:
        z = numpyro.sample("z", dist.ImproperUniform(dist.constraints.real_vector, (), (count,)))
        with handlers.block():
            energy = potential(model, prepared, dict(zip(sites, mean + scale @ z, strict=True)))
        numpyro.factor("posterior", -energy)

    def rate(step: Array) -> Array:
        # Down to 0 by half a cosine, so that the noise of the ELBO's gradient averages out.
        return RATE * (1 + jnp.cos(jnp.pi * step / STEPS)) / 2

    start = init_to_value(values={"z": jnp.zeros(count, mean.dtype)})
    guide = AutoMultivariateNormal(standardised, init_loc_fn=start, init_scale=1.0)
    inference = SVI(standardised, guide, Adam(rate), Trace_ELBO(num_particles=PARTICLES))
    state, _ = jax.lax.scan(lambda state, _: inference.update(state), inference.init(key), length=STEPS)
    found = guide.get_posterior(inference.get_params(state))
    return mean + scale @ found.loc, scale @ found.scale_tril
