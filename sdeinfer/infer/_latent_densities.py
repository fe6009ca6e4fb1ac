"""Densities of a model with latent layers, given its parameters and the innovations of the layers; and its mode.

Tests: `tests/infer/test_metropolis.py`.
"""

import itertools
from collections.abc import Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray, PyTree
from numpyro import handlers
from numpyro.infer.util import constrain_fn, potential_energy

from sdeinfer._progress import phase
from sdeinfer.infer._densities import given_latent_layers, trace_at
from sdeinfer.infer._expansion import points_around, slopes
from sdeinfer.infer._mode import Mode, found_from, sites_of
from sdeinfer.likelihood._model import LatentLayers
from sdeinfer.likelihood._path import in_default_types


def draw_latent(model: LatentLayers, prepared: PyTree, key: PRNGKeyArray) -> Float[Array, "bridges latent p"]:
    """Draw the innovations of the latent layers from their prior."""
    return jr.normal(key, (len(prepared), *prepared.innovations))


def log_prior(model: LatentLayers, prepared: PyTree, z: dict[str, Array], latent: Array) -> Float[Array, ""]:
    """Log prior density of the unconstrained parameters, without the latent layers."""
    trace = trace_at(given_latent_layers(model), (prepared, latent), {})
    parameters = handlers.block(given_latent_layers(model), hide=[model.site, _observed_site(model, trace)])
    return jnp.asarray(-potential_energy(parameters, (prepared, latent), {}, z))


def log_weights(model: LatentLayers, prepared: PyTree, z: dict[str, Array], latent: Array) -> Float[Array, " bridges"]:
    """Log likelihood of the observation at the end of each bridge, given the latent layers."""
    trace = trace_at(given_latent_layers(model), (prepared, latent), sites_at(model, prepared, z, latent))
    site = trace[_observed_site(model, trace)]
    return site["fn"].log_prob(site["value"])


@eqx.filter_jit
def log_priors(model: LatentLayers, prepared: PyTree, sites: dict[str, Array]) -> dict[str, Array]:
    """Log prior density of each parameter at draws."""
    latent = draw_latent(model, prepared, jr.key(0))

    def evaluate(sites: dict[str, Array]) -> dict[str, Array]:
        trace = trace_at(given_latent_layers(model), (prepared, latent), sites)
        return {name: trace[name]["fn"].log_prob(trace[name]["value"]) for name in sites}

    return jax.vmap(jax.vmap(evaluate))(sites)


def sites_at(model: LatentLayers, prepared: PyTree, z: dict[str, Array], latent: Array) -> dict[str, Any]:
    """Values of the sampled and deterministic sites by name, without the latent layers."""
    sites = constrain_fn(given_latent_layers(model), (prepared, latent), {}, z, return_deterministic=True)
    return {name: value for name, value in sites.items() if name != model.site}


def _observed_site(model: LatentLayers, trace: Mapping[str, Any]) -> str:
    """The name of the observed site, excluding the conditioned latent layers."""
    observed = {name for name, site in trace.items() if site["type"] == "sample" and site["is_observed"]}
    (name,) = observed - {model.site}
    return name


def latent_mode(
    model: LatentLayers, prepared: PyTree, chosen: np.ndarray, *, start: Mode | None = None, key: PRNGKeyArray
) -> Mode:
    """The mode given the chosen bridges (a mask), whose likelihoods are averaged over draws of the innovations.

    It is found in double precision whatever JAX's default.
    """
    with jax.enable_x64(True):  # noqa: FBT003
        prepared = in_default_types(prepared)
        sites = sites_of(given_latent_layers(model), prepared, draw_latent(model, prepared, key))
        # Given a single draw the latent layers are fixed, and the mode is that of a much narrower posterior.
        keys = jr.split(key, 8)
        evaluations = itertools.count(1)

        def potential(x: np.ndarray) -> float:
            return float(_potential_of_chosen(model, prepared, keys, jnp.asarray(chosen), tuple(sites), jnp.asarray(x)))

        def objective(x: np.ndarray) -> tuple[float, np.ndarray]:
            phase(f"searching for the mode, evaluation {next(evaluations)}")
            # An automatic gradient takes six times longer to evaluate and ten times longer to compile.
            values = np.array([potential(point) for point in points_around(x)])
            return values[0], slopes(values)

        return found_from(objective, sites, start, polished=False)


@eqx.filter_jit
def _potential_of_chosen(
    model: LatentLayers, prepared: PyTree, keys: Array, chosen: Array, sites: tuple[str, ...], x: Array
) -> Array:
    z = dict(zip(sites, x, strict=True))

    def weights(key: PRNGKeyArray) -> Array:
        weight = log_weights(model, prepared, z, draw_latent(model, prepared, key))
        return jnp.where(jnp.isnan(weight), -jnp.inf, weight)

    of_bridges = jax.nn.logsumexp(jax.lax.map(weights, keys), axis=0)
    prior = log_prior(model, prepared, z, draw_latent(model, prepared, keys[0]))
    density = prior + jnp.sum(jnp.where(chosen, of_bridges, 0.0))
    return jnp.where(jnp.isfinite(density), -density, 1e10)  # whose differences are finite
