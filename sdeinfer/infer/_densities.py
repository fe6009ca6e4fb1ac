"""Values and log densities of a model's sites at many draws, in blocks of one shape."""

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray, PyTree
from numpyro import handlers
from numpyro.infer.util import constrain_fn

from sdeinfer._compiler import BALANCED, RUN_ONCE
from sdeinfer._files import InputError
from sdeinfer.infer._latent import given_latent
from sdeinfer.likelihood import AbstractModel, AbstractPath, Adjustment, Shapes, layer_in

BLOCK = 250
"""Number of draws evaluated at a time, so that one shape is compiled."""

ENTRIES = 2**24
"""Bound on the entries of the likelihood's arrays at the draws evaluated at a time; fewer draws with many tokens."""

type Sites = dict[str, Any]


def constrained_sites(
    model: AbstractModel, prepared: PyTree, z: Sites, latent: Array | None = None
) -> tuple[dict[str, np.ndarray], Float[np.ndarray, "chains draws *networks coordinates"] | None]:
    """Values of the sites and coordinates of the layers at draws of the unconstrained parameters.

    Arguments:
        model: the model.
        prepared: pooled data of the model.
        z: unconstrained draws by site name, with leading axes (chain, draw).
        latent: any latent layers, for a model that has some.

    Returns:
        The latent and deterministic sites by name; and `Coordinates.unconstrained` of the layer, with an axis of
        (pooled) networks if each has its own layer, None for a program without a single layer.
    """
    return _over_draws(functools.partial(_constrain, given_latent(model), (prepared, latent)), z)


def log_densities(
    model: AbstractModel, prepared: PyTree, sites: Sites
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Log densities of the observed sites and of the latent sites at draws.

    Arguments:
        model: the model.
        prepared: data of the model.
        sites: draws of the sites, with leading axes (chain, draw).

    Returns:
        Two dictionaries by site name: of the observed sites, with a last axis of networks; and of the latent sites.
    """
    blocks = []
    for block, count in model.blocks(prepared):
        together = max(1, min(BLOCK, ENTRIES // model.entries(block)))
        found = _over_draws(functools.partial(_evaluate, model, jax.device_put(block)), sites, together)
        blocks.append((count, found))
    observed = {
        name: np.concatenate([found[0][name][..., :count] for count, found in blocks], axis=-1)
        for name in blocks[0][1][0]
    }
    return observed, blocks[0][1][1]


def densities_of_data(prepared: PyTree) -> PyTree:
    """Prepared data whose likelihood is the density of the data, where an adjustment has changed its curvature."""
    adjustment = adjustment_of(prepared)
    return prepared if adjustment is None else prepared.with_adjustment(jax.device_put(adjustment.of_densities()))


def adjustment_of(prepared: PyTree) -> Adjustment | None:
    """The adjustment of prepared data; None for latent layers, and for the limit's law."""
    return prepared.adjustment if isinstance(prepared, AbstractPath) else None


def attributes_of_adjustment(prepared: PyTree) -> dict[str, float]:
    """The attribute `adjustment_error` of a posterior; none without an adjustment."""
    adjustment = adjustment_of(prepared)
    return {} if adjustment is None else {"adjustment_error": float(np.max(adjustment.error))}


def prior_draws(
    model: Callable[..., None], *data: PyTree, draws: int, key: PRNGKeyArray
) -> tuple[dict[str, np.ndarray], Float[np.ndarray, "draws *networks coordinates"] | None]:
    """Prior draws of all unobserved sites, and the coordinates of the layers.

    Arguments:
        model: a NumPyro program.
        data: arguments of the program.
        draws: number of draws.
        key: PRNG key.

    Returns:
        The sites by name; and `Coordinates.unconstrained` of the layers, None for a program without a
        single layer.
    """
    numbers = np.arange(draws, dtype=np.uint32)
    found, layers = _over_draws(functools.partial(_draw_prior, model, data, key), numbers[None])
    return {name: values[0] for name, values in found.items()}, None if layers is None else layers[0]


def latent_structure(model: Callable[..., None], *data: PyTree) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes and types of the latent sites of a program by name, in the program's order.

    Raises:
        InputError: if there is none.
    """
    return _latent_structure(model, Shapes(data))


@functools.lru_cache(maxsize=64)
def _latent_structure(model: Callable[..., None], shapes: Shapes) -> dict[str, jax.ShapeDtypeStruct]:
    names: list[str] = []

    def run(*data: PyTree) -> list[Array]:
        trace = handlers.trace(handlers.seed(model, jr.key(0))).get_trace(*data)
        sites = {name: jnp.asarray(site["value"]) for name, site in trace.items() if _is_latent(site)}
        names.extend(sites)
        return list(sites.values())

    found = jax.eval_shape(run, *shapes.tree())
    if not names:
        raise InputError("model: nothing is left to be sampled, every parameter is fixed")
    return dict(zip(names, found, strict=True))


def _over_draws(function: Callable[[PyTree], PyTree], draws: PyTree, together: int = BLOCK) -> PyTree:
    """Apply a compiled function of `together` draws to all draws, which have leading axes (chain, draw)."""
    chains, count = np.shape(jax.tree.leaves(draws)[0])[:2]
    flat = jax.tree.map(lambda x: np.reshape(x, (chains * count, *np.shape(x)[2:])), draws)
    parts = [function(block) for block in _blocks(flat, chains * count, together)]
    return jax.tree.map(
        lambda *each: np.concatenate([np.asarray(x) for x in each])[: chains * count].reshape(
            chains, count, *each[0].shape[1:]
        ),
        *parts,
    )


def _blocks(draws: PyTree, count: int, size: int) -> Iterator[PyTree]:
    """Blocks of one size; the last is padded with its last draw."""
    for start in range(0, count, size):
        chosen = np.minimum(np.arange(start, start + size), count - 1)
        yield jax.tree.map(lambda x, chosen=chosen: x[chosen], draws)


def _coordinates_in(trace: Mapping[str, dict[str, Any]]) -> Array | None:
    """Coordinates of the layer in a trace, along the last axis."""
    layer = layer_in(trace)
    return None if layer is None else jnp.moveaxis(layer.coordinates.unconstrained(layer.parameters()), 0, -1)


def _is_latent(site: dict[str, Any]) -> bool:
    return site["type"] == "sample" and not site["is_observed"]


@functools.partial(jax.jit, static_argnums=0, compiler_options=RUN_ONCE)
def _constrain(program: Callable[..., None], data: tuple[PyTree, ...], z: Sites) -> tuple[Sites, Array | None]:
    def at(z: Sites) -> tuple[Sites, Array | None]:
        sites = constrain_fn(program, data, {}, z, return_deterministic=True)
        trace = handlers.trace(handlers.substitute(handlers.seed(program, jr.key(0)), sites)).get_trace(*data)
        return sites, _coordinates_in(trace)

    return jax.vmap(at)(z)


@functools.partial(jax.jit, static_argnums=0, compiler_options=BALANCED)
def _evaluate(model: AbstractModel, prepared: PyTree, sites: Sites) -> tuple[Sites, Sites]:
    def at(sites: Sites) -> tuple[Sites, Sites]:
        seeded = handlers.substitute(handlers.seed(model, jr.key(0)), sites)
        trace = handlers.trace(seeded).get_trace(prepared)
        stochastic = {name: site for name, site in trace.items() if site["type"] == "sample"}
        density = {name: site["fn"].log_prob(site["value"]) for name, site in stochastic.items()}
        observed = {name for name, site in stochastic.items() if site["is_observed"]}
        return (
            {name: value for name, value in density.items() if name in observed},
            {name: value for name, value in density.items() if name not in observed},
        )

    return jax.vmap(at)(sites)


@functools.partial(jax.jit, static_argnums=0, compiler_options=RUN_ONCE)
def _draw_prior(
    model: Callable[..., None], data: tuple[PyTree, ...], key: PRNGKeyArray, numbers: Array
) -> tuple[Sites, Array | None]:
    def draw(number: Array) -> tuple[Sites, Array | None]:
        trace = handlers.trace(handlers.seed(model, jr.fold_in(key, number))).get_trace(*data)
        sites = {
            name: site["value"] for name, site in trace.items() if _is_latent(site) or site["type"] == "deterministic"
        }
        return sites, _coordinates_in(trace)

    return jax.vmap(draw)(numbers)
