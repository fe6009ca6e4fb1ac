"""Fit strengths, gains and temperatures to the increments of residual branches."""

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import jax.random as jr
import numpy as np
import xarray as xr
from arviz_base import dict_to_dataset
from jaxtyping import PRNGKeyArray

from sdeinfer._files import InputError
from sdeinfer._progress import phase
from sdeinfer.blocks import BlockOrder, labelled
from sdeinfer.infer._densities import prior_draws
from sdeinfer.infer._samplers import AbstractSampler
from sdeinfer.infer._tree import stamp
from sdeinfer.layers import AbstractLayer
from sdeinfer.likelihood import BranchModel, BranchPath
from sdeinfer.observation import validate_branches


def fit_branches(
    model: BranchModel,
    data: xr.Dataset,
    *,
    architecture: Any,
    prior: Mapping[str, Any] | None,
    sampler: AbstractSampler,
    progress: bool,
    key: PRNGKeyArray,
) -> xr.DataTree:
    """`fit` for a model of increments and a Dataset of branches, see `observe_branches`.

    Priors are of strengths, gains and temperatures by their names. The DataTree has the groups posterior, sample_stats,
    log_likelihood, log_prior, prior, observed_data, constant_data and coefficients (of `blocks.adjusted_coefficients`,
    for `check`); declared values are attributes such as `declared_attention.strength`.
    """
    if "increment" not in data:
        raise InputError(f"data: {model.name} takes increments of branches, as of si.observe_branches")
    data = validate_branches(data)
    if not isinstance(architecture, AbstractLayer):
        raise InputError("architecture: a si.blocks.Block, or a si.Stack of the blocks of a layer, is needed")
    order = BlockOrder.of_data(architecture, data)
    phase("preparing the increments")
    path = BranchPath.of(data, order, prior)
    key_sampler, key_prior = (jr.fold_in(key, number) for number in np.arange(2, dtype=np.uint32))
    before, _ = prior_draws(model, path, draws=sampler.draws, key=key_prior)
    phase("compiling the sampler")
    draws = sampler.sample(model, path, progress=progress, key=key_sampler)
    coords: dict[Any, Any] = {name: data[name].values for name in ("network", "branch")}
    sampled = {**draws.samples, **{name: value[None] for name, value in before.items()}}
    dims: dict[Hashable, Sequence[Hashable]] = {name: ["layer"] for name, value in sampled.items() if value.ndim == 3}
    of_data: dict[Hashable, Sequence[Hashable]] = {"increments": ["network", "branch"]}
    read = ["input", "mean"]
    tree = xr.DataTree.from_dict(
        {
            "posterior": dict_to_dataset(draws.samples, dims=dims),
            "sample_stats": dict_to_dataset(draws.statistics),
            "log_likelihood": dict_to_dataset(draws.log_likelihood, dims=of_data, coords=coords),
            "log_prior": dict_to_dataset(draws.log_prior, dims=dims),
            "prior": dict_to_dataset({name: value[None] for name, value in before.items()}, dims=dims),
            "observed_data": data.drop_vars(read),
            "constant_data": data[read],
            "coefficients": labelled(np.asarray(path.coefficients), order, data),
        }
    )
    tree.attrs = {
        **data.attrs,
        **{f"declared_{name}": value for name, value in (order.strengths | order.shapes).items()},
        **{f"fixed_{name}": each.value for name, each in path.prior if isinstance(each.value, float)},
        "model": model.name,
        "identified": " ".join(name for name in draws.log_prior if not name.endswith("_offset")),
        "normed": " ".join(order.normed),
        **stamp(),
    }
    return tree
