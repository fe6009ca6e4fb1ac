"""Fit a model to data."""

from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import jax.random as jr
import numpy as np
import xarray as xr
from jaxtyping import PRNGKeyArray, PyTree

from sdeinfer._arguments import at_least_one, checked, given
from sdeinfer._progress import phase, with_progress_line
from sdeinfer.infer._assume import architecture_of, masked, placed, pose, require_laws
from sdeinfer.infer._chunks import prepared_of
from sdeinfer.infer._predictive import predicted_draws
from sdeinfer.infer._samplers import AbstractSampler
from sdeinfer.infer._settings import LARGEST_LOGIT, Law
from sdeinfer.layers import AbstractLayer
from sdeinfer.likelihood._assumptions import Assumptions, checked_priors
from sdeinfer.likelihood._model import as_model
from sdeinfer.likelihood._path import Transitions, in_default_types, transitions_of
from sdeinfer.observation import validate


@checked
@with_progress_line
@placed
def fit(
    model: Callable[..., None],
    data: xr.Dataset,
    *,
    architecture: str | AbstractLayer | type[AbstractLayer] | None = None,
    law: Law = "finite-width",
    prior: Mapping[str, Any] | None = None,
    largest_logit: float = LARGEST_LOGIT,
    chains: int = 4,
    draws: int = 1000,
    warmup: int = 1000,
    sampler: AbstractSampler | None = None,
    predictions: int | Literal["auto"] | None = "auto",
    predictive: Law | None = None,
    progress: bool = True,
    leave_out_damaged: bool = False,
    key: PRNGKeyArray,
) -> xr.DataTree:
    """Fit a model to observed covariances, in double precision whatever JAX's default.

    Arguments:
        model: one of `sdeinfer.models`; or any NumPyro program, a function of the prepared path that samples
            parameters, builds a layer for all networks and observes a `likelihood.CovariancePath` of it; one with
            numbers of each network is declared by `models.each_network`.
        data: observed networks, see `covariance_dataset`, increments of branches or tokens, as the model needs.
            Covariances backed by Dask are read in chunks, for `full_path` and programs of one layer for all networks.
        architecture: "transformer", "attention", "feedforward" or "mlp"; or a layer, such as a `Stack` or a custom
            layer, whose sizes count and whose parameter values are ignored: `si.layers.template("attention", heads=4)`.
            If None, the architecture in the data's attributes. Must be None for a program that builds its own layers.
            For increments, a `blocks.Block` or a `Stack` of blocks, whose gains and temperatures are assumed unless
            they have a prior, and with whose strengths `check` compares.
        law: "finite-width", the law of one layer at each network's width to the next order in 1/n; or "limit".
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
        predictions: number of posterior draws at which the observed networks are replicated; and of the prior, as many
            as of one chain. "auto" is 100, and fewer, 20 at least, for networks with more than 650 layers in all. All
            draws if None, so that ArviZ's functions of predictions need no selection of draws.
        predictive: law of the replicates, that of the fit if None: by "finite-width" networks of the observed widths,
            drawn by their exact chain; by "limit" paths of the SDE.
        progress: whether a line on a terminal or in a notebook says what is done, after two seconds.
        leave_out_damaged: of data in chunks, leave out the networks that cannot be read or are no covariances; the
            attribute `damaged_networks` counts them. Otherwise they are an error.
        key: PRNG key.

    Returns:
        A DataTree with the groups posterior, sample_stats, log_likelihood (the log density of each network's used
        transitions), adjusted_log_likelihood (what the sampler used instead by the law of finite width, see
        `likelihood.Adjustment`), log_prior, prior, prior_predictive, posterior_predictive, layers (each network's
        parameters at the posterior mean of their coordinates), observed_data and constant_data. Observed and predicted
        covariances are the coordinate `covariance` of their groups; the variables, which ArviZ compares, are the mean
        correlation and the largest and smallest log-eigenvalue after the last layer, one number a network. Its
        attributes hold the architecture, the model, the true parameters if the data include them, the version, and
        `adjustment_error`, the relative Monte Carlo error that the adjustment adds to the standard deviations. Of data
        in chunks, all groups with networks have 256 of them, evenly spaced; the attributes `networks` and
        `used_transitions` count those that were fitted.

    Raises:
        InputError: for invalid data, data that cannot identify the architecture's parameters, and priors outside a
            coordinate's range.
    """
    counts = given(predictions=None if predictions == "auto" else predictions)
    predictive = law if predictive is None else predictive
    require_laws(law=law, predictive=predictive)
    at_least_one(chains=chains, draws=draws, warmup=warmup, **counts)
    data, problem = pose(as_model(model), data, architecture=architecture, law=law, prior=prior)
    prepared = prepared_of(problem, data, largest_logit, leave_out_damaged=leave_out_damaged)
    sampler = problem.sampler(chains=chains, draws=draws, warmup=warmup) if sampler is None else sampler
    labels = problem.labels(prepared)
    # Keys of the sampler, the prior draws, and the predictions before and after the data.
    keys = [jr.fold_in(key, part) for part in np.arange(4, dtype=np.uint32)]
    before, layers = problem.prior(prepared, draws=sampler.draws, key=keys[1])
    count = problem.affordable_draws(prepared) if predictions == "auto" else predictions
    indices = predicted_draws(count, sampler.draws, sampler.chains)
    phase("compiling the sampler")
    drawn = sampler.sample(problem.model, prepared.joint, each=prepared.networks, progress=progress, key=keys[0])
    phase("predicting")
    groups = problem.label(labels, prepared, before, drawn) | {
        "prior_predictive": problem.predict(prepared, before, layers, indices, law=predictive, key=keys[2]),
        "posterior_predictive": problem.predict(
            prepared, drawn.samples, drawn.layers, indices, law=predictive, key=keys[3]
        ),
    }
    tree = xr.DataTree.from_dict({name: group for name, group in groups.items() if group is not None})
    tree.attrs = problem.attributes(labels, prepared, drawn) | prepared.attributes
    return tree


@checked
def prepare(
    model: Callable[..., None],
    data: xr.Dataset,
    *,
    architecture: str | AbstractLayer | type[AbstractLayer] | None = None,
    law: Law = "finite-width",
    prior: Mapping[str, Any] | None = None,
    largest_logit: float = LARGEST_LOGIT,
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

    Returns:
        The program's argument, `PathStatistics` or `Bridges`, computed in double precision and in JAX's default types.

    Raises:
        InputError: as in `fit`.
    """
    require_laws(law=law)
    with jax.enable_x64(True):  # noqa: FBT003
        data, problem = pose(as_model(model), data, architecture=architecture, law=law, prior=prior)
        prepared = prepared_of(problem, data, largest_logit).joint
    return in_default_types(prepared)


@checked
def transitions(
    data: xr.Dataset,
    *,
    architecture: str | AbstractLayer | type[AbstractLayer] | None = None,
    law: Law = "finite-width",
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
    require_laws(law=law)
    kind = architecture_of(validate(data), architecture)
    assumptions = Assumptions(kind, law, () if kind is None else checked_priors(prior, kind))
    return transitions_of(masked(data, kind, law), assumptions)
