"""The two densities of a model with latent layers: the prior of its parameters, and the weights of its bridges."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, ArrayLike, Float, PRNGKeyArray, PyTree
from numpyro import handlers
from numpyro.infer.util import constrain_fn, potential_energy

from sdeinfer.likelihood import AbstractModel, LatentLayers


def draw_latent(model: LatentLayers, prepared: PyTree, key: PRNGKeyArray) -> Float[Array, "bridges latent p"]:
    """Draw the innovations of the latent layers from their prior."""
    return jr.normal(key, (len(prepared), *prepared.innovations))


def log_prior(model: LatentLayers, prepared: PyTree, z: dict[str, Array], latent: Array) -> Float[Array, ""]:
    """Log prior density of the unconstrained parameters, without the latent layers."""
    trace = handlers.trace(handlers.seed(given_latent(model), jr.key(0))).get_trace(prepared, latent)
    hidden = [model.site, _observed_site(model, trace)]
    parameters = handlers.block(given_latent(model), hide=hidden)
    return jnp.asarray(-potential_energy(parameters, (prepared, latent), {}, z))


def log_weights(model: LatentLayers, prepared: PyTree, z: dict[str, Array], latent: Array) -> Float[Array, " bridges"]:
    """Log likelihood of the observation at the end of each bridge, given the latent layers."""
    sites = sites_at(model, prepared, z, latent)
    conditioned = handlers.substitute(handlers.seed(given_latent(model), jr.key(0)), sites)
    trace = handlers.trace(conditioned).get_trace(prepared, latent)
    site = trace[_observed_site(model, trace)]
    return site["fn"].log_prob(site["value"])


@eqx.filter_jit
def log_priors(model: LatentLayers, prepared: PyTree, sites: dict[str, Array]) -> dict[str, Array]:
    """Log prior density of each parameter at draws with leading axes (chain, draw)."""
    latent = draw_latent(model, prepared, jr.key(0))

    def evaluate(sites: dict[str, Array]) -> dict[str, Array]:
        conditioned = handlers.substitute(handlers.seed(given_latent(model), jr.key(0)), sites)
        trace = handlers.trace(conditioned).get_trace(prepared, latent)
        return {name: trace[name]["fn"].log_prob(trace[name]["value"]) for name in sites}

    return jax.vmap(jax.vmap(evaluate))(sites)


def sites_at(model: LatentLayers, prepared: PyTree, z: dict[str, Array], latent: Array) -> dict[str, Any]:
    """Values of the sampled and deterministic sites by name, without the latent layers."""
    sites = constrain_fn(given_latent(model), (prepared, latent), {}, z, return_deterministic=True)
    return {name: value for name, value in sites.items() if name != model.site}


def _observed_site(model: LatentLayers, trace: Mapping[str, Any]) -> str:
    """The name of the observed site, excluding the conditioned latent layers."""
    observed = [name for name, site in trace.items() if site["type"] == "sample" and site["is_observed"]]
    (name,) = (name for name in observed if name != model.site)
    return name


@functools.cache
def given_latent(model: AbstractModel) -> Callable[[PyTree, Array | None], None]:
    """The model conditioned on its latent layers, a function of data and latent layers (None if it has none)."""

    def fixed(prepared: PyTree, latent: Array | None) -> None:
        fixed_sites: dict[str, ArrayLike] = {}
        if isinstance(model, LatentLayers):
            fixed_sites = {model.site: jnp.asarray(latent)}
        with handlers.condition(data=fixed_sites):
            model(prepared)

    return fixed
