"""Fit a model to data."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import jax
import jax.random as jr
import numpy as np
import pandas as pd
import xarray as xr
from arviz_base import dict_to_dataset
from jaxtyping import Float, PRNGKeyArray, PyTree

from sdeinfer._arguments import checked
from sdeinfer._files import InputError
from sdeinfer._progress import phase, with_progress_line
from sdeinfer.infer._assume import architecture_of, assume, masked, require_settings
from sdeinfer.infer._chains import Draws
from sdeinfer.infer._checkpoint import Checkpoint
from sdeinfer.infer._densities import (
    adjustment_of,
    attributes_of_adjustment,
    densities_of_data,
    log_densities,
    prior_draws,
)
from sdeinfer.infer._groups import Labels
from sdeinfer.infer._latent import draw_latent, given_latent
from sdeinfer.infer._metropolis import Metropolis
from sdeinfer.infer._nuts import NUTS, compile_nuts
from sdeinfer.infer._precision import in_enough_precision
from sdeinfer.infer._predictive import predict
from sdeinfer.infer._prepare import prepare_chunks, prepare_for
from sdeinfer.infer._range import range_to_fit
from sdeinfer.infer._samplers import AbstractSampler
from sdeinfer.infer._sandwich import compile_scatter
from sdeinfer.infer._settings import ADJUSTED_LIKELIHOOD, LARGEST_LOGIT, LAWS, LIMIT_POSTERIOR, Law
from sdeinfer.infer._survey import attributes_of_chunks, kept_networks, require_one_layer, survey
from sdeinfer.infer._tree import attributes_of, fixed_by_program, groups_of_data, layers_group
from sdeinfer.layers import AbstractArchitecture, AbstractLayer, architecture_in
from sdeinfer.likelihood import (
    AbstractModel,
    Assumptions,
    EveryLayer,
    Groups,
    LatentLayers,
    Transitions,
    as_model,
    checked_priors,
    transitions_of,
)
from sdeinfer.observation import in_chunks, require_loaded, validate


@checked
@with_progress_line
@in_enough_precision
def fit(
    model: Callable[..., None],
    data: xr.Dataset,
    *,
    architecture: str | AbstractArchitecture | AbstractLayer | type[AbstractLayer] | None = None,
    law: Law = "finite-width",
    prior: Mapping[str, Any] | None = None,
    largest_logit: float = LARGEST_LOGIT,
    chains: int = 4,
    draws: int = 1000,
    warmup: int = 1000,
    sampler: AbstractSampler | None = None,
    predictions: int = 100,
    compressed: bool = True,
    progress: bool = False,
    checkpoint: Checkpoint | None = None,
    leave_out_damaged: bool = False,
    key: PRNGKeyArray,
) -> xr.DataTree:
    """Fit a model to observed covariances.

    Arguments:
        model: one of `sdeinfer.models`; or any NumPyro program, a function of the prepared path that samples
            parameters, builds a layer (or one per network) and observes a `likelihood.CovariancePath` of it.
        data: observed networks, see `covariance_dataset`. Covariances backed by Dask, as of `xarray.open_zarr`, are
            read in chunks of networks, on the current `distributed.Client` or by the scheduler of Dask's configuration;
            for `full_path` and programs of one layer for all networks. With more than 65,536 terms, m(m + 1)/2 of each
            transition, sums are made in double precision also where JAX is in single precision.
        architecture: "transformer", "attention", "feedforward" or "mlp"; an `Architecture`, for sizes such as the
            number of heads; or a layer such as a `Stack` or a custom layer, whose parameter values are ignored. If
            None, the architecture in the data's attributes. Must be None for a program that builds its own layers.
        law: "finite-width", the law of one layer at each network's width to the next order in 1/n; "limit"; or "both",
            the first, with the posterior by the limit's law in the group `limit_posterior`.
        prior: for names of sampled coordinates (such as gamma, tau0, c_gap, c_mean), a NumPyro distribution that
            replaces the default prior, or a number that fixes the coordinate.
        largest_logit: largest spread of the logits in a row of the softmax at which a transition may start; further
            transitions are left out if that makes τ0 more accurate (see `in_range`). +∞ keeps all. If none would be
            left, half are kept, and the attribute `out_of_range` gives the reason.
        chains: number of chains.
        draws: kept draws of each chain.
        warmup: warmup iterations of each chain.
        sampler: a sampler, whose chains, draws and warmup replace the three arguments above. If None, `NUTS`, or
            `Metropolis` for models with latent layers.
        predictions: number of prior and posterior draws at which the SDE is simulated, at 9 or fewer observed layers.
        compressed: reduce the transitions to sufficient statistics; otherwise sample with the plain likelihood, see
            `likelihood.Transitions`. Models of networks observed at every layer only.
        progress: show progress bars, and on a terminal the current phase.
        checkpoint: a file for the state of the sampler. A resumed fit gives the draws of an uninterrupted one. The file
            is kept until `Checkpoint.remove`.
        leave_out_damaged: of data in chunks, leave out the networks that cannot be read or are no covariances; the
            attribute `damaged_networks` counts them. Otherwise they are an error.
        key: PRNG key.

    Returns:
        A DataTree with the groups posterior, sample_stats, log_likelihood (the log density of each network's used
        transitions), adjusted_log_likelihood (what the sampler used instead by the law of finite width, see
        `likelihood.Adjustment`), log_prior, prior, prior_predictive, posterior_predictive, layers (each network's
        parameters at the posterior mean of their coordinates), observed_data and constant_data. Its attributes hold the
        architecture, the model, the true parameters if the data include them, the version, and `adjustment_error`, the
        relative Monte Carlo error that the adjustment adds to the standard deviations. Of data in chunks, all groups
        with networks have 256 of them, evenly spaced; the attributes `networks` and `used_transitions` count those that
        were fitted.

    Raises:
        InputError: for invalid data, data that cannot identify the architecture's parameters, and priors outside a
            coordinate's range.
    """
    model = as_model(model)
    require_settings(law, LAWS, chains=chains, draws=draws, warmup=warmup, predictions=predictions)
    if sampler is None:
        kind_of_sampler = Metropolis if isinstance(model, LatentLayers) else NUTS
        sampler = kind_of_sampler(chains=chains, draws=draws, warmup=warmup)
    if checkpoint is not None and not checkpoint.resume:
        checkpoint.remove()
    key_sampler, key_prior, key_before, key_after = (jr.fold_in(key, part) for part in np.arange(4, dtype=np.uint32))
    both = law == "both"
    data, assumptions, kind = assume(model, data, architecture, law, prior)
    data = _examined(model, data, assumptions, kind, compressed=compressed, leave_out_damaged=leave_out_damaged)
    with _background_threads() as background:
        if isinstance(model, EveryLayer) and not model.makes_layers and type(sampler) is NUTS and compressed:
            widths = np.unique(data["width"])
            shapes = {"tokens": data.sizes["token_a"], "widths": len(widths), "x64": jax.config.jax_enable_x64}
            if assumptions.law != "limit":
                background.submit(compile_scatter, assumptions.kind, **shapes, width=int(widths[0]))
            background.submit(compile_nuts, sampler, model, assumptions, **shapes, pattern=assumptions.kind.pattern)
        phase("finding the range of the law")
        data, pilot = range_to_fit(model, data, assumptions, largest_logit)
        phase("preparing the data")
        whole, each = data, None
        if in_chunks(data):
            assert isinstance(model, EveryLayer)
            # From here on `data` are some of the networks, in memory.
            data = kept_networks(whole)
            prepared, each = prepare_chunks(model, whole, data, assumptions)
            pilot |= attributes_of_chunks(whole, data)
        else:
            prepared = prepare_for(model, data, assumptions, compressed=compressed)
        before, layers = _sample_prior(model, prepared, sampler.draws, key_prior)
        before_at, after_at = predicted_draws(predictions, sampler.draws, sampler.chains)
        # The prior predictions compile and run while NUTS compiles.
        predicted_before = None
        if kind is not None and layers is not None:
            x64 = jax.config.jax_enable_x64
            predicted_before = background.submit(_predict, x64, layers[before_at], data, kind, key_before)
        phase("compiling the sampler")
        settings = {"progress": progress, "key": key_sampler}
        result = sampler.sample(model, prepared, **settings, checkpoint=checkpoint)
        if each is not None:
            result = result._replace(log_likelihood=log_densities(model, each, result.samples)[0])
        phase("predicting")
        labels = Labels.of(model, prepared, data)
        groups = {
            "posterior": labels.of_draws(result.samples),
            "sample_stats": dict_to_dataset(result.statistics),
            **_likelihoods(model, result, prepared if each is None else each, labels),
            "log_prior": labels.of_densities(result.log_prior),
            "prior": labels.of_draws({name: value[None] for name, value in before.items()}),
        }
        if predicted_before is not None:
            groups["prior_predictive"] = _labelled(predicted_before.result(), 1, before_at)
    if kind is not None and result.layers is not None:
        predicted = result.layers[:, after_at].reshape(-1, *result.layers.shape[2:])
        replicates = predict(_of_networks(model, prepared, predicted), data, architecture=kind, key=key_after)
        groups["posterior_predictive"] = _labelled(replicates, sampler.chains, after_at)
        layers = _of_networks(model, prepared, result.layers.reshape(-1, *result.layers.shape[2:]))
        mean = np.broadcast_to(layers.mean(axis=0), (data.sizes["network"], layers.shape[-1]))
        groups["layers"] = layers_group(kind, mean, data)
    groups |= groups_of_data(data)
    if both:
        limit = dataclasses.replace(assumptions, law="limit")
        limit_checkpoint = None if checkpoint is None else checkpoint.for_limit()
        if each is None:
            by_limit = prepare_for(model, data, limit, compressed=compressed)
        else:  # the statistics do not depend on the law
            by_limit = dataclasses.replace(prepared, assumptions=limit, adjustment=None)
        by_limit = sampler.sample(model, by_limit, **settings, checkpoint=limit_checkpoint)
        groups[LIMIT_POSTERIOR] = labels.of_draws(by_limit.samples)
    tree = xr.DataTree.from_dict(groups)
    sampled = [name for name in result.log_prior if labels.of_all(name)]
    tree.attrs = attributes_of(model, whole, assumptions, kind, sampled, largest_logit=largest_logit) | pilot
    tree.attrs |= attributes_of_adjustment(prepared)
    tree.attrs |= fixed_by_program(model, kind, result.layers, {name: result.samples[name] for name in sampled})
    return tree


@checked
def prepare(
    model: Callable[..., None],
    data: xr.Dataset,
    *,
    architecture: str | AbstractArchitecture | AbstractLayer | type[AbstractLayer] | None = None,
    law: Literal["finite-width", "limit"] = "finite-width",
    prior: Mapping[str, Any] | None = None,
    largest_logit: float = LARGEST_LOGIT,
    compressed: bool = True,
) -> PyTree:
    """Prepare data for a model as `fit` does, for any other inference method.

    `MCMC(NUTS(model), …).run(key, sdeinfer.prepare(model, data))` samples the posterior of `fit`. The function selects
    the transitions inside the range of the law, reduces them to sufficient statistics, finds the mode of the posterior,
    and computes the adjustment of the likelihood from the scatter of the scores. NumPyro's MCMC, SVI and handlers run
    the program on the result, `Predictive` on the result's `unobserved()`.

    Arguments:
        model: as in `fit`.
        data: observed networks, see `covariance_dataset`.
        architecture: as in `fit`.
        law: "finite-width" or "limit".
        prior: as in `fit`.
        largest_logit: as in `fit`.
        compressed: as in `fit`.

    Returns:
        The program's argument: a `PathStatistics` or, if not compressed, `Transitions`; a `GroupedStatistics`; or
        `Bridges`.

    Raises:
        InputError: as in `fit`.
    """
    require_settings(law, ("finite-width", "limit"))
    settings = {"architecture": architecture, "law": law, "prior": prior, "largest_logit": largest_logit}
    return _prepared(as_model(model), data, **settings, compressed=compressed)


def prepare_in_parts(
    model: Callable[..., None], data: xr.Dataset, *, law: Law = "finite-width", **settings: Any
) -> None:
    """Make the passes over data in chunks that `fit` makes, and in its order; see `sdeinfer._parts`.

    Arguments:
        model: as in `fit`.
        data: as in `fit`.
        law: as in `fit`.
        settings: architecture, prior, largest_logit and leave_out_damaged, as in `fit`.
    """
    require_settings(law, LAWS)
    _prepared(as_model(model), data, law=law, **settings)


def _prepared(
    model: AbstractModel,
    data: xr.Dataset,
    *,
    architecture: str | AbstractArchitecture | AbstractLayer | type[AbstractLayer] | None = None,
    law: Law,
    prior: Mapping[str, Any] | None,
    largest_logit: float,
    compressed: bool = True,
    leave_out_damaged: bool = False,
) -> PyTree:
    data, assumptions, kind = assume(model, data, architecture, law, prior)
    data = _examined(model, data, assumptions, kind, compressed=compressed, leave_out_damaged=leave_out_damaged)
    data, _ = range_to_fit(model, data, assumptions, largest_logit)
    return prepare_for(model, data, assumptions, compressed=compressed)


@checked
def transitions(
    data: xr.Dataset,
    *,
    architecture: str | AbstractArchitecture | AbstractLayer | type[AbstractLayer] | None = None,
    law: Literal["finite-width", "limit"] = "finite-width",
    prior: Mapping[str, Any] | None = None,
) -> Transitions:
    """The transitions of observed networks with their plain likelihood, all of them and without an adjustment.

    `likelihood.CovariancePath(layer, path).log_prob(path.observed)` is the log density of each network. Use `prepare`
    for the posterior of `fit`, which leaves out transitions outside the range of the law.

    Arguments:
        data: observed networks, see `covariance_dataset`.
        architecture: as in `fit`; only the package's models use it and the priors.
        law: "finite-width" or "limit".
        prior: as in `fit`.

    Raises:
        InputError: as in `fit`.
    """
    require_settings(law, ("finite-width", "limit"))
    require_loaded(data, "transitions")
    if architecture is None and architecture_in(validate(data).attrs) is None:
        return transitions_of(data, Assumptions(law=law))
    kind = architecture_of(data, architecture)
    return transitions_of(masked(data, kind, law), Assumptions(kind, law, checked_priors(prior, kind)))


def _examined(
    model: AbstractModel,
    data: xr.Dataset,
    assumptions: Assumptions,
    kind: AbstractArchitecture | None,
    *,
    compressed: bool,
    leave_out_damaged: bool = False,
) -> xr.Dataset:
    """Data in chunks after their `survey`; others unchanged, which `assume` has validated."""
    if not in_chunks(data):
        if leave_out_damaged:
            raise InputError("leave_out_damaged: is for data in chunks (Dask), as of xarray.open_zarr")
        return data
    phase("examining the data")
    require_one_layer(model, data, assumptions, compressed=compressed)
    spreads = kind is not None and bool(kind.coordinates.temperatures)
    return survey(data, spreads=spreads, leave_out_damaged=leave_out_damaged)


def _predict(
    x64: bool,  # noqa: FBT001
    layers: Float[np.ndarray, "draws *networks coordinates"],
    data: xr.Dataset,
    kind: AbstractArchitecture,
    key: PRNGKeyArray,
) -> xr.Dataset:
    """Predict in another thread; `jax.enable_x64` is thread-local."""
    with jax.enable_x64(x64):
        return predict(layers, data, architecture=kind, key=key)


@contextlib.contextmanager
def _background_threads() -> Iterator[ThreadPoolExecutor]:
    """Background threads; their pending tasks are cancelled if the fit raises an error."""
    pool = ThreadPoolExecutor(2)
    try:
        yield pool
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        raise
    pool.shutdown()


def _sample_prior(
    model: AbstractModel, prepared: PyTree, draws: int, key: PRNGKeyArray
) -> tuple[dict[str, Any], Float[np.ndarray, "draws *networks coordinates"] | None]:
    """Prior draws of the unobserved sites except latent layers; and the coordinates of every network's layer."""
    pooled = model.pool(prepared)
    latent = draw_latent(model, pooled, key) if isinstance(model, LatentLayers) else None
    sites, layers = prior_draws(given_latent(model), pooled, latent, draws=draws, key=key)
    if layers is None and isinstance(model, EveryLayer):
        return sites, None
    if layers is None:
        coordinates = prepared.assumptions.kind.coordinates
        layers = np.moveaxis(coordinates.unconstrained({name: sites[name] for name in coordinates.declared}), 0, -1)
    return sites, _of_networks(model, prepared, layers)


def _of_networks(model: AbstractModel, prepared: PyTree, layers: np.ndarray) -> np.ndarray:
    """Layers of every network, shape (draws, networks, coordinates), from the layers of pooled groups."""
    return layers[:, np.asarray(prepared.path.width)] if isinstance(model, Groups) else layers


def predicted_draws(predictions: int, draws: int, chains: int) -> tuple[np.ndarray, np.ndarray]:
    """Indices of the draws of the prior and of each chain at which to predict, evenly spaced.

    The draws of the chains are among those of the prior, so `post.sel(draw=post.posterior_predictive.draw)` has the
    same draws in all groups, as ArviZ's predictive functions require.
    """
    count = min(predictions, draws)
    of_prior = draws // count * np.arange(count)
    return of_prior, of_prior[::chains]


def _labelled(predicted: xr.Dataset, chains: int, draws: np.ndarray) -> xr.Dataset:
    """Predictions with the chain and draw labels of their parameters."""
    both = pd.MultiIndex.from_product([np.arange(chains), draws], names=["chain", "draw"])
    index = xr.Coordinates.from_pandas_multiindex(both, "sample")
    return predicted.rename(draw="sample").assign_coords(index).unstack("sample").transpose("chain", "draw", ...)


def _likelihoods(model: AbstractModel, result: Draws, prepared: PyTree, labels: Labels) -> dict[str, xr.Dataset]:
    """The groups of log densities of the data, and of what the sampler used where that differs."""
    if adjustment_of(prepared) is None:
        return {"log_likelihood": labels.of_densities(result.log_likelihood)}
    of_data, _ = log_densities(model, densities_of_data(prepared), result.samples)
    return {
        "log_likelihood": labels.of_densities(of_data),
        ADJUSTED_LIKELIHOOD: labels.of_densities(result.log_likelihood),
    }
