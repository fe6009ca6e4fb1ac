"""Comparison of architectures by leave-one-network-out predictive densities."""

import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr
from arviz_base import dict_to_dataset
from arviz_stats.loo import loo
from arviz_stats.loo.compare import compare as compare_elpd
from jaxtyping import PRNGKeyArray

from sdeinfer._arguments import checked
from sdeinfer._compiler import make_room
from sdeinfer._files import InputError
from sdeinfer._progress import phase, with_progress_line
from sdeinfer.covariance import Pattern
from sdeinfer.infer._assume import architecture_of, masked, problem_of, require_identifiable, require_settings
from sdeinfer.infer._densities import densities_of_data, log_densities
from sdeinfer.infer._nuts import NUTS
from sdeinfer.infer._placed import placed
from sdeinfer.infer._problem import AbstractProblem
from sdeinfer.infer._range import in_range
from sdeinfer.infer._settings import LARGEST_LOGIT
from sdeinfer.layers import ARCHITECTURES, AbstractLayer, Architecture, architecture_in
from sdeinfer.likelihood import AbstractModel, Assumptions, EveryLayer, LatentLayers, used_of, with_used
from sdeinfer.observation import require_loaded, validate


@checked
@with_progress_line
@placed
def compare(
    model: AbstractModel,
    data: xr.Dataset,
    *,
    architectures: Sequence[str | Architecture | AbstractLayer | type[AbstractLayer]] | None = None,
    law: str = "finite-width",
    largest_logit: float = LARGEST_LOGIT,
    chains: int = 4,
    draws: int = 500,
    warmup: int = 500,
    progress: bool = False,
    key: PRNGKeyArray,
) -> pd.DataFrame:
    """Fit several architectures to the same networks, and rank them by leave-one-network-out cross-validation.

    All architectures are fitted to the transitions inside the range of every architecture with attention; networks
    without such transitions are left out. The predictive densities exclude the `Adjustment` of the posterior, which
    differs between architectures.

    Arguments:
        model: one of `sdeinfer.models`.
        data: observed networks.
        architectures: names, whose sizes, such as the number of heads, are those of the data; or `Architecture`s, with
            sizes of their own; or layers, whose parameters are ignored, or types of layers. If None, all named
            architectures that the number of tokens can identify.
        law: "finite-width" or "limit".
        largest_logit: as in `fit`.
        chains: number of chains.
        draws: kept draws of each chain.
        warmup: warmup iterations of each chain.
        progress: show progress bars.
        key: PRNG key.

    Returns:
        ArviZ's table, one row per architecture, the best first, with the sizes in the name where two differ in these
        only: the difference `elpd_diff` to the best in the expected log predictive density of new networks, with its
        standard error `dse`; the stacking `weight`; `elpd` with its `se`; the effective number of parameters `p`; and
        the warnings `diag_diff` and `diag_elpd`.

    Raises:
        InputError: for invalid data, for fewer than two networks or architectures, or for an architecture that the data
            cannot identify.
    """
    if not isinstance(model, AbstractModel) or (isinstance(model, EveryLayer) and model.makes_layers):
        raise InputError("model: architectures are compared by the package's models; a program builds its own layers")
    if isinstance(model, LatentLayers):
        raise InputError(f"model: {model.name} has latent layers; compare needs networks observed at every layer")
    require_loaded(data, "compare")
    data = validate(data)
    require_settings(law, ("finite-width", "limit"), chains=chains, draws=draws, warmup=warmup)
    phase("finding the range of the law")
    kinds = _labelled(_kinds(data, architectures))
    problems = {
        name: problem_of(model, Assumptions(kind, law))  # pyright: ignore[reportArgumentType]
        for name, kind in kinds.items()
    }
    data = _in_every_range(data, problems.values(), largest_logit)
    if data.sizes["network"] < 2:
        raise InputError(
            f"covariance: two networks inside the range of the law are needed, one to leave out; there are "
            f"{data.sizes['network']}"
        )
    sampler = NUTS(chains=chains, draws=draws, warmup=warmup)
    fits = {
        name: _fitted(problem, masked(data, problem.kind, law, model), sampler, progress=progress, key=key)
        for name, problem in problems.items()
    }
    phase("comparing")
    # ArviZ exponentiates each network's log density, which could overflow; a common factor changes no weight.
    largest = [density.mean(("chain", "draw")) for _, _, density in fits.values()]
    scale = xr.concat(largest, "architecture").max("architecture")
    with warnings.catch_warnings():
        # The table has this warning in a column.
        warnings.filterwarnings("ignore", "Estimated shape parameter of Pareto", UserWarning)
        left_out = {name: _left_out(*fit, scale) for name, fit in fits.items()}
        table = compare_elpd(left_out, round_to="none")
    for name, found in left_out.items():
        each = found.elpd_i + scale
        table.loc[name, ["elpd", "se"]] = float(each.sum()), float(np.sqrt(each.size * each.var()))
    return table


def _in_every_range(data: xr.Dataset, problems: Iterable[AbstractProblem], largest_logit: float) -> xr.Dataset:
    """The networks with transitions in the range of all problems, and these transitions."""
    used = used_of(data)
    for problem in problems:
        seen = masked(data, problem.kind, problem.assumptions.law, problem.model)
        used &= used_of(in_range(problem, seen, largest_logit)[0])
    return with_used(data, used).isel(network=used.any(axis=1))


def _fitted(
    problem: AbstractProblem, data: xr.Dataset, sampler: NUTS, *, progress: bool, key: PRNGKeyArray
) -> tuple[dict[str, Any], xr.DataArray, xr.DataArray]:
    """Draws of a posterior, and each network's log likelihood by the sampler and log density."""
    make_room()
    model, prepared = problem.model, problem.prepare(data).each
    result = sampler.sample(model, prepared, progress=progress, key=key)
    densities, _ = log_densities(model, densities_of_data(prepared), result.samples)
    likelihood, density = (
        dict_to_dataset(values, dims={"covariance": ["network"]})["covariance"]
        for values in (result.log_likelihood, densities)
    )
    return result.samples, likelihood, density


def _left_out(samples: dict[str, Any], likelihood: xr.DataArray, density: xr.DataArray, scale: xr.DataArray) -> Any:
    """PSIS-LOO: weights from the adjusted likelihood remove a network from the posterior; they average its density."""
    log_weights, pareto_k = likelihood.azstats.psislw(dim=["chain", "draw"])
    groups = {"posterior": dict_to_dataset(samples), "log_likelihood": (density - scale).to_dataset(name="covariance")}
    return loo(xr.DataTree.from_dict(groups), log_weights=log_weights, pareto_k=pareto_k, pointwise=True)


def _kinds(
    data: xr.Dataset, architectures: Sequence[str | Architecture | AbstractLayer | type[AbstractLayer]] | None
) -> list[Architecture]:
    tokens = data.sizes["token_a"]
    if isinstance(architectures, str):
        raise InputError(f"architectures: a list of them is needed, got {architectures!r}")
    if architectures is None:
        of_one_token = [name for name in ARCHITECTURES if not Architecture(name).coordinates.temperatures]
        architectures = list(ARCHITECTURES) if tokens > 1 else of_one_token
    known = architecture_in(data.attrs)
    shared = {"pattern": Pattern.in_attributes(data.attrs), **(known.sizes if known else {})}
    kinds: list[Architecture] = []
    for each in architectures:
        if isinstance(each, str):
            kind = Architecture(each)
            kind = kind.with_sizes(**{size: shared[size] for size in kind.sizes if size in shared})
        else:
            kind = architecture_of(data, each)
        require_identifiable(kind, tokens)
        kinds.append(kind)
    if len(set(kinds)) < max(len(kinds), 2):
        names = ", ".join(sorted({kind.name for kind in kinds}))
        raise InputError(f"architectures: two or more different ones are needed, got {names}")
    return kinds


def _labelled(kinds: Sequence[Architecture]) -> dict[str, Architecture]:
    """Architectures by their names, with sizes where two have one name, and numbers where these are equal too."""
    names = [kind.name for kind in kinds]
    names = [str(kind) if names.count(kind.name) > 1 else kind.name for kind in kinds]
    # Custom layers, such as two stacks, may have one name.
    return {
        f"{name} {names[: place + 1].count(name)}" if names.count(name) > 1 else name: kind
        for place, (name, kind) in enumerate(zip(names, kinds, strict=True))
    }
