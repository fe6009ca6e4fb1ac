"""The mode of a posterior with latent layers."""

import itertools

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array, Float, Key, PRNGKeyArray, PyTree

from sdeinfer._progress import phase
from sdeinfer.infer._densities import latent_structure
from sdeinfer.infer._latent import draw_latent, given_latent, log_prior, log_weights
from sdeinfer.infer._mode import DIFFERENCES, Mode, found_from
from sdeinfer.likelihood import LatentLayers

SETS = 8
"""Number of draws of the innovations over which each bridge's likelihood is averaged. Given a single draw the latent
layers are fixed, and the mode is that of a much narrower posterior, anywhere in the support of the actual one."""

NO_DENSITY = 1e10
"""Finite substitute for an infinite potential, whose differences would not be finite."""


def latent_mode(
    model: LatentLayers, prepared: PyTree, chosen: np.ndarray, *, start: Mode | None = None, key: PRNGKeyArray
) -> Mode:
    """The mode of a posterior with latent layers, whose likelihood is averaged over `SETS` draws of the innovations.

    Arguments:
        model: the model.
        prepared: data of the model.
        chosen: mask of the bridges in the likelihood, shape (bridges,).
        start: as in `posterior_mode`.
        key: PRNG key of the draws.
    """
    keys = jr.split(key, SETS)
    if start is None:
        sites = tuple(latent_structure(given_latent(model), prepared, draw_latent(model, prepared, key)))
    else:
        sites = start.sites

    def potential(x: np.ndarray) -> float:
        return float(_potential_of_chosen(model, prepared, keys, jnp.asarray(chosen), sites, jnp.asarray(x)))

    evaluations = itertools.count(1)

    def objective(x: np.ndarray) -> tuple[float, np.ndarray]:
        phase(f"searching for the mode, evaluation {next(evaluations)}")
        # An automatic gradient takes six times longer to evaluate and ten times longer to compile.
        slope = [potential(x + step) - potential(x - step) for step in difference * np.eye(len(x))]
        return potential(x), np.array(slope) / (2 * difference)

    difference = DIFFERENCES[jnp.asarray(1.0).dtype.itemsize]
    return found_from(objective, sites, start, curvature_step=10 * difference, polished=False)


@eqx.filter_jit
def _potential_of_chosen(
    model: LatentLayers,
    prepared: PyTree,
    keys: Key[Array, " sets"],
    chosen: Array,
    sites: tuple[str, ...],
    x: Float[Array, " sites"],
) -> Array:
    z = dict(zip(sites, x, strict=True))

    def weights(key: PRNGKeyArray) -> Array:
        weight = log_weights(model, prepared, z, draw_latent(model, prepared, key))
        return jnp.where(jnp.isnan(weight), -jnp.inf, weight)

    of_bridges = jax.nn.logsumexp(jax.lax.map(weights, keys), axis=0)
    prior = log_prior(model, prepared, z, draw_latent(model, prepared, keys[0]))
    density = prior + jnp.sum(jnp.where(chosen, of_bridges, 0.0))
    return jnp.where(jnp.isfinite(density), -density, NO_DENSITY)
