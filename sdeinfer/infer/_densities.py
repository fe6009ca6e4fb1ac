"""Values and log densities of a model's sites at many draws, in blocks of one shape.

Tests: `tests/likelihood/test_program.py`.
"""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray, PyTree
from numpyro import handlers
from numpyro.distributions import biject_to
from numpyro.infer.util import constrain_fn

from sdeinfer._compiler import RUN_ONCE
from sdeinfer._files import InputError
from sdeinfer.likelihood import AbstractModel
from sdeinfer.likelihood._full_path import densities_at
from sdeinfer.likelihood._model import LatentLayers
from sdeinfer.likelihood._path import AbstractPath, Adjustment
from sdeinfer.likelihood._program import PATH, layer_in
from sdeinfer.likelihood._statistics import PathStatistics
from sdeinfer.networks._sample import ENTRIES_AT_ONCE

type Sites = dict[str, Any]
type Layers = Float[np.ndarray, "chains draws *networks coordinates"] | None


@functools.cache
def given_latent_layers(model: AbstractModel) -> Callable[[PyTree, Array | None], None]:
    """The model conditioned on its latent layers, a function of data and latent layers (None if it has none)."""

    def conditioned(prepared: PyTree, latent: Array | None) -> None:
        with handlers.condition(data={model.site: jnp.asarray(latent)} if isinstance(model, LatentLayers) else {}):
            model(prepared)

    return conditioned


def trace_at(program: Callable[..., None], data: tuple[PyTree, ...], sites: Sites) -> dict[str, dict[str, Any]]:
    """The trace of a program on its data, with these values of sites."""
    seeded = handlers.seed(program, jr.key(0))
    return handlers.trace(handlers.substitute(seeded, sites)).get_trace(*data)


class AtDraws(NamedTuple):
    """Values of the unobserved sites, their log prior densities, and coordinates of the layer if there is one.

    Arrays have leading axes (chain, draw).
    """

    sites: dict[str, np.ndarray]
    log_prior: dict[str, np.ndarray]
    layers: Layers


def constrained(model: AbstractModel, prepared: PyTree, z: Sites, latent: Array | None = None) -> AtDraws:
    """The values of a program's sites at unconstrained draws z."""
    return AtDraws(*over_draws(functools.partial(_constrain, given_latent_layers(model), (prepared, latent)), z))


def log_likelihoods(model: AbstractModel, prepared: PyTree, sites: Sites, layers: Layers) -> dict[str, np.ndarray]:
    """Log densities of the observed sites at draws, with a last axis of networks.

    By NumPy for a model of one layer at draws of it: JAX would compile this for each number of networks, in .9 s.
    """
    entries = prepared.entries if isinstance(prepared, PathStatistics) else 1
    most = max(1, ENTRIES_AT_ONCE // entries)
    if model.is_one_layer and isinstance(prepared, PathStatistics) and layers is not None:
        densities = functools.partial(densities_at, prepared, prepared.assumptions.kind)
        return {PATH: over_draws(densities, layers, min(1000, most))}
    return over_draws(functools.partial(_evaluate, model, jax.device_put(prepared)), sites, min(250, most))


def adjustment_of(prepared: PyTree) -> Adjustment | None:
    """The adjustment; None for latent layers, and for the limit's law."""
    return prepared.adjustment if isinstance(prepared, AbstractPath) else None


def prior_draws(
    model: Callable[..., None], *data: PyTree, draws: int, key: PRNGKeyArray
) -> tuple[dict[str, np.ndarray], Float[np.ndarray, "1 draws *networks coordinates"] | None]:
    """Prior draws of all unobserved sites, and the coordinates of the layers."""
    return over_draws(functools.partial(_draw_prior, model, data, key), np.arange(draws, dtype=np.uint32)[None])


def unobserved_structure(model: Callable[..., None], *data: PyTree) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes and types of the unconstrained values of a program's unobserved sites by name, in the program's order."""
    leaves, structure = jax.tree.flatten(data)
    shapes = (jax.ShapeDtypeStruct(jnp.shape(leaf), jnp.result_type(leaf)) for leaf in leaves)
    return _unobserved_structure(model, structure, tuple(shapes))


@functools.lru_cache(maxsize=64)
def _unobserved_structure(
    model: Callable[..., None], structure: Any, shapes: tuple[jax.ShapeDtypeStruct, ...]
) -> dict[str, jax.ShapeDtypeStruct]:
    names: list[str] = []

    def run(*data: PyTree) -> list[Array]:
        trace = handlers.trace(handlers.seed(model, jr.key(0))).get_trace(*data)
        sites = {name: site for name, site in trace.items() if _is_unobserved(site)}
        names.extend(sites)
        # A Dirichlet's value of three numbers has an unconstrained one of two.
        values = {name: jnp.asarray(site["value"]) for name, site in sites.items()}
        shapes = {name: biject_to(sites[name]["fn"].support).inverse_shape(x.shape) for name, x in values.items()}
        return [jnp.zeros(shape, values[name].dtype) for name, shape in shapes.items()]

    leaves = jax.eval_shape(run, *structure.unflatten(shapes))
    if not names:
        raise InputError("model: nothing is left to be sampled, every parameter is fixed")
    return dict(zip(names, leaves, strict=True))


def over_draws(function: Callable[[PyTree], PyTree], draws: PyTree, together: int = 250) -> PyTree:
    """Apply a compiled function of `together` draws to all draws, which have leading axes (chain, draw)."""
    leading = np.shape(jax.tree.leaves(draws)[0])[:2]
    count = math.prod(leading)
    flat = jax.tree.map(lambda x: np.reshape(x, (count, *np.shape(x)[2:])), draws)
    # Blocks of one size; the last is padded with its last draw.
    chosen = [np.minimum(np.arange(start, start + together), count - 1) for start in range(0, count, together)]
    parts = [function(jax.tree.map(lambda x, some=some: x[some], flat)) for some in chosen]
    return jax.tree.map(
        lambda *blocks: np.concatenate([np.asarray(x) for x in blocks])[:count].reshape(*leading, *blocks[0].shape[1:]),
        *parts,
    )


def _coordinates_in(trace: Mapping[str, dict[str, Any]]) -> Array | None:
    """Coordinates of the layer in a trace, along the last axis."""
    layer = layer_in(trace)
    return None if layer is None else jnp.moveaxis(layer.coordinates.unconstrained(layer.parameters()), 0, -1)


def _is_unobserved(site: dict[str, Any]) -> bool:
    return site["type"] == "sample" and not site["is_observed"]


@functools.partial(jax.jit, static_argnums=0, compiler_options=RUN_ONCE)
def _constrain(program: Callable[..., None], data: tuple[PyTree, ...], z: Sites) -> tuple[Sites, Sites, Array | None]:
    def of_draw(z: Sites) -> tuple[Sites, Sites, Array | None]:
        sites = constrain_fn(program, data, {}, z, return_deterministic=True)
        trace = trace_at(program, data, sites)
        log_prior = {name: site["fn"].log_prob(site["value"]) for name, site in trace.items() if _is_unobserved(site)}
        return sites, log_prior, _coordinates_in(trace)

    return jax.vmap(of_draw)(z)


@functools.partial(jax.jit, static_argnums=0)
def _evaluate(model: AbstractModel, prepared: PyTree, sites: Sites) -> Sites:
    def of_draw(sites: Sites) -> Sites:
        trace = trace_at(model, (prepared,), sites)
        observed = {name: site for name, site in trace.items() if site["type"] == "sample" and site["is_observed"]}
        return {name: site["fn"].log_prob(site["value"]) for name, site in observed.items()}

    return jax.vmap(of_draw)(sites)


@functools.partial(jax.jit, static_argnums=0, compiler_options=RUN_ONCE)
def _draw_prior(
    model: Callable[..., None], data: tuple[PyTree, ...], key: PRNGKeyArray, numbers: Array
) -> tuple[Sites, Array | None]:
    def draw(number: Array) -> tuple[Sites, Array | None]:
        trace = handlers.trace(handlers.seed(model, jr.fold_in(key, number))).get_trace(*data)
        sites = {
            name: site["value"]
            for name, site in trace.items()
            if _is_unobserved(site) or site["type"] == "deterministic"
        }
        return sites, _coordinates_in(trace)

    return jax.vmap(draw)(numbers)
