"""Fit a program to observed tokens."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import xarray as xr
from arviz_base import dict_to_dataset
from jaxtyping import Array, Float, Key, PRNGKeyArray
from numpyro import handlers

from sdeinfer._arguments import at_least_one, checked
from sdeinfer._files import InputError
from sdeinfer._progress import phase, with_progress_line
from sdeinfer.infer import NUTS, AbstractSampler, prior_draws, stamp
from sdeinfer.likelihood import Assumptions, checked_priors
from sdeinfer.meanfield._flow import SelfAttentionFlow
from sdeinfer.meanfield._models import LATENT, TokenModel, token_model
from sdeinfer.meanfield._path import TokenPath, token_path
from sdeinfer.observation import TOKEN_DIMS

SITE_DIMS = {
    "start": ["network", "token", "component"],
    "values": ["component", "component_b"],
    "spectrum": ["eigenvalue"],
}
"""Dimensions of the sites of the package's programs that are no scalars."""


@checked
@with_progress_line
def fit(
    model: Callable[..., None],
    data: xr.Dataset,
    *,
    flow: SelfAttentionFlow | None = None,
    prior: Mapping[str, Any] | None = None,
    chains: int = 4,
    draws: int = 1000,
    warmup: int = 1000,
    sampler: AbstractSampler | None = None,
    predictions: int = 100,
    progress: bool = False,
    key: PRNGKeyArray,
) -> xr.DataTree:
    """Fit a program to observed tokens.

    Arguments:
        model: `one_step`, `trajectory`, `layer_trajectory` or `symmetric_values`; or any NumPyro program of a
            `TokenPath`, whose site of observed tokens has the name "tokens".
        data: observed tokens, see `tokens_dataset`. Attributes `truth_beta` and so on hold true parameters.
        flow: the flow with its known matrices, normalisation and MLP, whose β is ignored; None for Q = K = V = I.
        prior: for names of parameters (beta, step, noise), a NumPyro distribution that replaces the default prior, or a
            number that fixes the parameter.
        chains: number of chains.
        draws: kept draws of each chain.
        warmup: warmup iterations of each chain.
        sampler: a sampler, whose chains, draws and warmup replace the three arguments above; None for `infer.NUTS`.
        predictions: number of prior and posterior draws at which networks are simulated from their first layer.
        progress: show progress bars, and on a terminal the current phase.
        key: PRNG key.

    Returns:
        A DataTree with the groups posterior, sample_stats, log_likelihood (one value per network), log_prior, prior,
        prior_predictive, posterior_predictive, observed_data (the tokens after the first layer) and constant_data (the
        first ones).

    Raises:
        InputError: for data without tokens, programs without the site, and priors outside a parameter's range.
    """
    model = token_model(model)
    at_least_one(predictions=predictions)
    sampler = NUTS(chains=chains, draws=draws, warmup=warmup) if sampler is None else sampler
    path = token_path(data, flow=flow, assumptions=Assumptions(prior=checked_priors(prior, model)))
    _require_tokens(model, path)
    key_sampler, key_prior, key_before, key_after = (jr.fold_in(key, part) for part in np.arange(4, dtype=np.uint32))
    of_prior, _ = prior_draws(model, path, draws=sampler.draws, key=key_prior)
    phase("compiling the sampler")
    result = sampler.sample(model, path, progress=progress, key=key_sampler)
    phase("predicting")
    tokens = data["tokens"].transpose(*TOKEN_DIMS)
    groups = {
        "sample_stats": dict_to_dataset(result.statistics),
        "log_likelihood": _labelled(result.log_likelihood, data, dict.fromkeys(result.log_likelihood, ["network"])),
        "log_prior": dict_to_dataset(result.log_prior),
        "observed_data": tokens.isel(layer=slice(1, None)).to_dataset(),
        "constant_data": tokens.isel(layer=0).rename("initial").to_dataset(),
    }
    for name, sites, own in (("prior", of_prior, key_before), ("posterior", result.samples, key_after)):
        groups[name] = _labelled({name: value for name, value in sites.items() if name not in LATENT}, data, SITE_DIMS)
        groups[f"{name}_predictive"] = _predicted(model, path, sites, data, predictions, key=own)
    tree = xr.DataTree.from_dict(groups)
    sampled = [name for name, value in result.log_prior.items() if value.ndim == 2 and name not in LATENT]
    tree.attrs = {
        **data.attrs,
        **{f"fixed_{name}": value for name, value in path.assumptions.fixed.items()},
        "model": model.name,
        "identified": " ".join(sampled),
        **stamp(),
    }
    return tree


def _require_tokens(model: TokenModel, path: TokenPath) -> None:
    """Refuse a program that observes no tokens, before it is compiled."""
    trace = handlers.trace(handlers.seed(model, jr.key(0))).get_trace
    names = jax.eval_shape(lambda path: dict.fromkeys(trace(path), 0), path)
    if "tokens" not in names:
        raise InputError(f"model: no site of the name 'tokens' in {model.name}, which has {', '.join(names) or 'none'}")


def _labelled(sites: Mapping[str, np.ndarray], data: xr.Dataset, dims: Mapping[Any, list[str]]) -> xr.Dataset:
    """Draws with leading axes (chain, draw) as a Dataset, with the other dimensions of some sites by name."""
    coords: dict[Any, Any] = {name: data[name].values for name in ("network",) if name in data.coords}
    return dict_to_dataset(dict(sites), dims={**dims}, coords=coords)


def _predicted(
    model: TokenModel,
    path: TokenPath,
    sites: Mapping[str, np.ndarray],
    data: xr.Dataset,
    predictions: int,
    *,
    key: PRNGKeyArray,
) -> xr.Dataset:
    """Networks simulated from their first layer at draws of the sites, evenly spaced in each chain."""
    chains, draws = next(iter(sites.values())).shape[:2]
    count = max(1, min(predictions // chains, draws))
    chosen = draws // count * np.arange(count)
    at = {name: jnp.asarray(value[:, chosen].reshape(-1, *value.shape[2:])) for name, value in sites.items()}
    tokens = np.asarray(_simulated(model, path.unobserved(), at, jr.split(key, chains * count)))
    labels = {"chain": np.arange(chains), "draw": chosen, "layer": data["layer"].values[1:]}
    shaped = tokens.reshape(chains, count, *tokens.shape[1:])
    return xr.Dataset({"tokens": (("chain", "draw", *TOKEN_DIMS), shaped)}, coords=labels)


@functools.partial(jax.jit, static_argnums=0)
def _simulated(
    model: TokenModel, path: TokenPath, sites: dict[str, Array], keys: Key[Array, " draws"]
) -> Float[Array, "draws networks layers n D"]:
    def simulate(drawn: tuple[dict[str, Array], PRNGKeyArray]) -> Array:
        values, key = drawn
        trace = handlers.trace(handlers.substitute(handlers.seed(model, key), values)).get_trace(path)
        return trace["tokens"]["value"]

    return jax.lax.map(simulate, (sites, keys))
