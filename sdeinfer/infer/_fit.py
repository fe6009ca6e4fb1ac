"""From a model and data to a posterior."""

import contextlib
from collections.abc import Hashable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.random as jr
import numpy as np
import xarray as xr
from arviz_base import dict_to_dataset
from jaxtyping import PRNGKeyArray, PyTree
from numpy.typing import ArrayLike

from sdeinfer._files import InputError
from sdeinfer._progress import phase, with_progress_line
from sdeinfer.infer._chains import Draws
from sdeinfer.infer._checkpoint import Checkpoint
from sdeinfer.infer._densities import prior_draws
from sdeinfer.infer._expansion import prepare
from sdeinfer.infer._groups import labelled_draws, predict_each
from sdeinfer.infer._latent import draw_latent, given_latent
from sdeinfer.infer._metropolis import metropolis
from sdeinfer.infer._nuts import compile_nuts, nuts
from sdeinfer.infer._range import range_to_fit
from sdeinfer.infer._settings import LARGEST_LOGIT, LAWS, LIMIT_POSTERIOR, Law
from sdeinfer.infer._tree import attributes_of, groups_of_data
from sdeinfer.layers import ARCHITECTURES, Architecture, architecture_in
from sdeinfer.likelihood import Program, with_mask
from sdeinfer.observation import validate


@with_progress_line
def fit(
    model: Program,
    data: xr.Dataset,
    *,
    architecture: str | Architecture | None = None,
    law: Law = "finite-width",
    largest_logit: float = LARGEST_LOGIT,
    chains: int = 4,
    draws: int = 1000,
    warmup: int = 1000,
    predictions: int = 100,
    progress: bool = False,
    checkpoint: Checkpoint | None = None,
    key: PRNGKeyArray,
) -> xr.DataTree:
    """Fit a model to observed covariances: by NUTS, or, where there are latent layers, by Metropolis steps.

    Arguments:
        model: one of `sdeinfer.models`.
        data: observed networks, see `covariance_dataset`.
        architecture: "transformer", "attention", "feedforward" or "mlp", or an `Architecture` with its number of heads
            and the like; what the data's attributes say where None.
        law: "finite-width", the law of one layer of each network's width to the next order in 1/n; "limit"; or "both",
            the first with the posterior by the limit's law beside it, in the group `limit_posterior`.
        largest_logit: transitions that start where the logits in a row of the softmax spread more than this are left
            out, and others where that makes τ0 more accurate (see `in_range`); +∞ keeps all. Where none would be left,
            half are kept, and the attribute `out_of_range` says why.
        chains: how many chains.
        draws: kept draws of each chain.
        warmup: iterations of adaptation of each chain.
        predictions: how many prior and posterior draws the SDE is simulated at.
        progress: show progress bars, and on a terminal what is being done.
        checkpoint: a file for what the sampler has done so far, and whether to go on from it. A fit that goes on gives
            the draws of one that was never interrupted. The file stays until `Checkpoint.remove`.
        key: where the randomness comes from.

    Returns:
        A DataTree with the groups posterior, sample_stats, log_likelihood (one value a network), log_prior, prior,
        prior_predictive, posterior_predictive, observed_data and constant_data. Its attributes hold the architecture,
        the model, the truth where the data tell it, and the version.

    Raises:
        InputError: for data that are not valid or cannot identify the architecture's parameters.
    """
    data = model.select(validate(data))
    kind = architecture_of(data, architecture)
    require_settings(law, LAWS, chains=chains, draws=draws, warmup=warmup, predictions=predictions)
    if checkpoint is not None and not checkpoint.resume:
        checkpoint.remove()
    key_nuts, key_prior, key_before, key_after = (jr.fold_in(key, part) for part in np.arange(4, dtype=np.uint32))
    data = masked(model, data, kind, law)
    both, law = law == "both", "limit" if law == "limit" else "finite-width"
    program = model.given(architecture=kind, law=law)
    with _thread_beside() as beside:
        if program.path is not None and program.alike is None:
            shapes = {"tokens": data.sizes["token_a"], "widths": len(np.unique(data["width"])), "causal": kind.causal}
            beside.submit(compile_nuts, program, **shapes, warmup=warmup, x64=jax.config.jax_enable_x64)
        phase("finding the range of the law")
        data, pilot = range_to_fit(program, data, largest_logit)
        phase("preparing the data")
        prepared = prepare(program, data)
        prior = _sample_prior(program, prepared, draws, key_prior)
        count = min(predictions, draws)
        before = {name: value[:count] for name, value in prior.items()}
        # The prior's predictions do not wait for the posterior: they compile and run while NUTS compiles.
        predicted_before = beside.submit(predict_each, program, before, data, architecture=kind, key=key_before)
        sizes = {"chains": chains, "draws": draws, "warmup": warmup, "progress": progress}
        result = sample(program, prepared, **sizes, checkpoint=checkpoint, key=key_nuts)
        phase("predicting")
        groups = _sampled_groups(program, result, data)
        groups["prior"] = labelled_draws(program, {name: value[None] for name, value in prior.items()}, data)
        groups["prior_predictive"] = _labelled(predicted_before.result())
    chosen = np.linspace(0, chains * draws - 1, count).round().astype(int)
    after = {name: value.reshape(-1, *value.shape[2:])[chosen] for name, value in result.samples.items()}
    groups["posterior_predictive"] = _labelled(predict_each(program, after, data, architecture=kind, key=key_after))
    groups |= groups_of_data(data)
    if both:
        limit = program.given(law="limit")
        beside_it = None if checkpoint is None else checkpoint.beside()
        by_limit = sample(limit, prepare(limit, data), **sizes, checkpoint=beside_it, key=key_nuts)
        groups[LIMIT_POSTERIOR] = labelled_draws(limit, by_limit.samples, data)
    tree = xr.DataTree.from_dict(groups)
    tree.attrs = attributes_of(program, data, largest_logit=largest_logit) | pilot
    return tree


@contextlib.contextmanager
def _thread_beside() -> Iterator[ThreadPoolExecutor]:
    """A thread for what can be done ahead, for which nobody waits where the fit is refused."""
    pool = ThreadPoolExecutor(1)
    try:
        yield pool
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        raise
    pool.shutdown()


def sample(program: Program, prepared: PyTree, *, checkpoint: Checkpoint | None = None, **settings: Any) -> Draws:
    """Sample a posterior by the sampler for its kind.

    Arguments:
        program: the model, with its options given.
        prepared: what the program needs of its data.
        checkpoint: of the fit.
        settings: chains, draws, warmup, progress and key, as in `fit`.
    """
    phase("compiling the sampler")
    sampler = nuts if program.latent is None else metropolis
    return sampler(program, prepared, **settings, checkpoint=checkpoint)


def _sample_prior(model: Program, prepared: PyTree, draws: int, key: PRNGKeyArray) -> dict[str, Any]:
    """Draws of all sites but latent layers and the observed ones, whose laws are of statistics: not to be sampled."""
    pooled = model.pool(prepared)
    latent = None if model.latent is None else draw_latent(model, pooled, key)
    return prior_draws(given_latent(model), pooled, latent, draws=draws, key=key)


def _labelled(predicted: xr.Dataset) -> xr.Dataset:
    return predicted.assign_coords(draw=np.arange(predicted.sizes["draw"])).expand_dims(chain=[0])


def architecture_of(data: xr.Dataset, architecture: str | Architecture | None) -> Architecture:
    """The architecture to fit: the one asked for, or the one that the data name.

    A mere name takes its sizes, such as the number of heads, from data of that name.

    Raises:
        InputError: where neither names one, or where the data cannot identify it.
    """
    if architecture is None or architecture == data.attrs.get("architecture"):
        kind = architecture_in(data.attrs)
    else:
        kind = Architecture(architecture) if isinstance(architecture, str) else architecture
    if kind is None:
        raise InputError(f"architecture: the data do not name it; choose one of {', '.join(ARCHITECTURES)}")
    require_identifiable(kind.name, data.sizes["token_a"])
    return kind


def masked(model: Program, data: xr.Dataset, kind: Architecture, law: str) -> xr.Dataset:
    """The data as an architecture sees them: with its causal mask, or without.

    Raises:
        InputError: for a causal mask with a model or a law for which none has been derived.
    """
    if kind.causal and (model.latent is not None or model.alike is not None):
        raise InputError(f"model: {model.name} knows no causal mask; models.full_path does")
    if kind.causal and law != "limit":
        raise InputError(f"law: with a causal mask there is the limit's law only, law='limit'; got {law!r}")
    return with_mask(data, causal=kind.causal)


def require_settings(law: str, laws: Sequence[str], **counts: int) -> None:
    """Check the settings of a fit.

    Raises:
        InputError: for an unknown law, and for a count below 1.
    """
    if law not in laws:
        raise InputError(f"law: must be one of {', '.join(laws)}, got {law!r}")
    for name, value in counts.items():
        if value < 1:
            raise InputError(f"{name}: at least 1 is needed, got {value}")


def require_identifiable(architecture: str, tokens: int) -> None:
    """Check that networks of an architecture with so many tokens can identify its parameters at all.

    Raises:
        InputError: for an unknown architecture, and for one token where there is a τ0: a softmax over one token is 1.
    """
    if tokens == 1 and "tau0" in Architecture(architecture).parameters:
        raise InputError(
            f"tokens: {architecture} has tau0, which one token cannot identify; use feedforward or mlp, or two tokens"
        )


def _sampled_groups(program: Program, result: Draws, data: xr.Dataset) -> dict[str, xr.Dataset]:
    dims: dict[Hashable, Sequence[Hashable]] = dict.fromkeys(result.log_likelihood, ["network"])
    coords: dict[Any, ArrayLike] = {"network": data["network"].values}
    return {
        "posterior": labelled_draws(program, result.samples, data),
        "sample_stats": dict_to_dataset(result.statistics),
        "log_likelihood": dict_to_dataset(result.log_likelihood, dims=dims, coords=coords),
        "log_prior": labelled_draws(program, result.log_prior, data),
    }
