"""Laplace's approximation of a posterior in its unconstrained parameters."""

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import xarray as xr
from arviz_stats.base.array import array_stats
from jaxtyping import Array, Float, PRNGKeyArray, PyTree

from sdeinfer._arguments import checked
from sdeinfer._files import InputError
from sdeinfer.infer._assume import assume, require_settings
from sdeinfer.infer._densities import constrained_sites, latent_structure, over_draws
from sdeinfer.infer._mode import Mode, posterior_mode, potential
from sdeinfer.infer._placed import placed
from sdeinfer.infer._range import range_to_fit
from sdeinfer.infer._settings import LARGEST_LOGIT
from sdeinfer.infer._tree import Labels, attributes_of, attributes_of_draws, groups_of_data, layers_group
from sdeinfer.layers import AbstractLayer, Architecture
from sdeinfer.likelihood import AbstractModel, LatentLayers, as_model
from sdeinfer.observation import require_loaded

FEWEST = 100
"""Smallest number of draws for a Pareto k; at this size it is estimated from the largest fifth of the weights."""


@checked
@placed
def approximate(
    model: Callable[..., None],
    data: xr.Dataset,
    *,
    architecture: str | Architecture | AbstractLayer | type[AbstractLayer] | None = None,
    law: Literal["finite-width", "limit"] = "finite-width",
    prior: Mapping[str, Any] | None = None,
    largest_logit: float = LARGEST_LOGIT,
    draws: int = 4000,
    key: PRNGKeyArray,
) -> xr.DataTree:
    """Approximate a posterior by a normal law with its mode and curvature in logit γ, log τ0 and log(c₊ − c₋).

    The draws are draws of the normal law, without reweighting. The Pareto k of their importance weights measures the
    quality: up to 0.7, the weights would turn them into draws of the posterior; above, use `fit`. This criterion is
    strict, since it depends only on the shape of the tail of the weights, whatever its mass. `distance` compares the
    draws with a fit.

    Arguments:
        model: one of `sdeinfer.models`, or a program as in `fit`, without latent layers and with one number a site.
        data: observed networks, see `covariance_dataset`.
        architecture: as in `fit`.
        law: "finite-width" or "limit".
        prior: as in `fit`.
        largest_logit: as in `fit`.
        draws: number of independent draws.
        key: PRNG key.

    Returns:
        A DataTree with the groups posterior (one chain), observed_data and constant_data. Its attributes are those of
        a fit, and `pareto_k`.

    Raises:
        InputError: for a model with latent layers or with parameters of each group or network, for invalid data or data
            that cannot identify the architecture's parameters, or if the posterior is not concave at its mode.

    Source:
        Pareto k: Vehtari, Simpson, Gelman, Yao & Gabry (2024), "Pareto smoothed importance sampling"; as a diagnostic
        of approximations: Yao, Vehtari, Simpson & Gelman (2018), "Yes, but did it work?".
    """
    model = as_model(model)
    if isinstance(model, LatentLayers):
        raise InputError(f"model: {model.name} has latent layers, which no normal law approximates; use fit")
    require_settings(law, ("finite-width", "limit"))
    if draws < FEWEST:
        raise InputError(f"draws: at least {FEWEST} are needed for the Pareto k, got {draws}")
    require_loaded(data, "approximate")
    data, problem = assume(model, data, architecture, law, prior)
    data, pilot = range_to_fit(problem, data, largest_logit)
    prepared = problem.prepare(data).each
    pooled, kind = jax.device_put(model.pool(prepared)), problem.kind
    of_each = [name for name, leaf in latent_structure(model, pooled).items() if leaf.shape]
    if of_each:
        raise InputError(f"model: {model.name} samples {', '.join(of_each)}, several numbers each; use fit")
    mode = posterior_mode(model, pooled)
    samples, layers, log_weights = draw(model, pooled, mode, draws=draws, key=key)
    labels = Labels.of(problem, prepared, data)
    groups = {"posterior": labels.of_draws({name: value[None] for name, value in samples.items()})}
    if kind is not None and layers is not None:
        groups["layers"] = layers_group(kind, layers.mean(axis=0), data)
    tree = xr.DataTree.from_dict(groups | groups_of_data(data))
    tree.attrs = attributes_of(problem, data, largest_logit=largest_logit) | pilot
    tree.attrs |= attributes_of_draws(problem, prepared, layers, {name: samples[name] for name in mode.sites})
    tree.attrs["pareto_k"] = pareto_k(log_weights)
    return tree


def pareto_k(log_weights: Float[np.ndarray, " draws"]) -> float:
    """Pareto shape k of the tail of importance weights; above 0.7 neither weights nor proposal are reliable.

    The weights are logs of target over proposal density at each draw, up to a constant; at least `FEWEST` draws. k is
    negative for bounded weights, and −∞ for weights that are equal up to rounding.
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
    """Draw from the normal law of a mode, for pooled data.

    Returns values of the latent and deterministic sites; the coordinates of the layer, None without a single layer; and
    the log ratio of the posterior density to the normal density, up to a constant. It is an InputError if the posterior
    is not concave at its mode.
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
    z = mode.by_site(np.asarray(mode.x + standard @ scale.T, dtype)[None])
    sites, layers = constrained_sites(model, prepared, z)
    target = over_draws(partial(_potentials, model, prepared), z)[0]
    samples = {name: value[0] for name, value in sites.items()}
    return samples, None if layers is None else layers[0], (standard**2).sum(axis=1) / 2 - target


@partial(jax.jit, static_argnums=0)
def _potentials(model: AbstractModel, prepared: PyTree, z: dict[str, Array]) -> Float[Array, " draws"]:
    return jax.vmap(lambda z: potential(model, prepared, z))(z)
