"""A posterior: its groups and its axis of chains, its parameters, and the summary of each.

Tests: `tests/diagnostics/test_check.py`.
"""

import math
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr
from arviz_stats.summary import summary

from sdeinfer._arguments import checked
from sdeinfer._files import InputError
from sdeinfer.diagnostics._thresholds import EQUAL_NUMBERS, FEWEST_DRAWS
from sdeinfer.observation._dataset import truth_of
from sdeinfer.parameters import C_GAP, C_MEAN, C_MINUS, C_PLUS, SLOPES, Parameter

HDI = 0.94
"""Probability of the highest-density intervals."""


@checked
def summarise(post: xr.DataTree, *, group: str = "posterior") -> pd.DataFrame:
    """Summarise the posterior of every public parameter, and of those of groups of networks.

    Arguments:
        post: the result of `fit`.
        group: "posterior" or "prior".

    Returns:
        One row per parameter, `w[0]`, `w[1]`, … for a site of several numbers; fixed ones last with an sd of 0, and
        `group_<name>[<label>]` for parameters of groups; with columns mean, sd, hdi_low, hdi_high (94 % highest
        density), truth (NaN if unknown), rhat, ess_bulk and ess_tail. Of a single chain, `rhat` compares its halves.
    """
    if group not in post.children:
        raise InputError(f"group: one of {', '.join(post.children)} is needed, got {group!r}")
    names = parameters_of(post)
    groups = with_chain(post[group].to_dataset())
    groups = groups[[name for name in map("group_{}".format, identified_of(post)) if name in groups]]
    draws = xr.merge([draws_of(post, group)[names], groups], compat="override", join="override")
    tree = xr.DataTree.from_dict({"posterior": draws})
    with np.errstate(invalid="ignore"):  # of chains that do not move
        table = summary(tree, ci_kind="hdi", ci_prob=HDI, round_to="none")
    if draws.sizes["chain"] == 1:
        table["r_hat"] = _of_halves(draws)
    interval = [column for column in table.columns if column.startswith("hdi")]
    table = table.rename(columns={interval[0]: "hdi_low", interval[1]: "hdi_high", "r_hat": "rhat"})
    truth = known_truth(post)
    table["truth"] = [truth.get(str(name), float("nan")) for name in table.index]
    for name, value in constants_of(post).items():
        if not _is(name, C_MEAN):
            known = {"mean": value, "sd": 0.0, "hdi_low": value, "hdi_high": value, "truth": truth.get(name, math.nan)}
            table.loc[name, list(known)] = list(known.values())
    columns = ["mean", "sd", "hdi_low", "hdi_high", "truth", "rhat", "ess_bulk", "ess_tail"]
    return table.loc[:, columns].astype(float)


def _of_halves(draws: xr.Dataset) -> Any:
    """R-hat of the two halves of a single chain; ArviZ has none of one chain."""
    half = draws.sizes["draw"] // 2
    first = draws.isel(chain=0, draw=slice(2 * half), drop=True).drop_vars("draw", errors="ignore")
    halves = xr.DataTree.from_dict({"posterior": first.coarsen(draw=half).construct(draw=("chain", "draw"))})
    with np.errstate(invalid="ignore"):
        return summary(halves, kind="diagnostics", round_to="none")["r_hat"]


def with_chain(draws: xr.Dataset) -> xr.Dataset:
    """Draws with their axis of chains, which the selection of one chain leaves out."""
    return draws.expand_dims("chain") if "chain" in draws.coords and "chain" not in draws.dims else draws


def with_chains(post: xr.DataTree) -> xr.DataTree:
    """A posterior with its axis of chains, also where one chain was selected, as by `post.isel(chain=0)`."""
    tree = xr.DataTree.from_dict({name: with_chain(group.to_dataset()) for name, group in post.children.items()})
    tree.attrs = dict(post.attrs)
    return tree


def has_prior(post: xr.DataTree) -> bool:
    """Whether a posterior has draws of its prior; a selection of chains may leave none."""
    return "prior" in post.children and bool(post["prior"].sizes["chain"] * post["prior"].sizes["draw"])


def require_groups(post: xr.DataTree, *names: str) -> None:
    """Raise an InputError where a tree has not the groups of a fit."""
    missing = [name for name in names if name not in post.children]
    if missing:
        raise InputError(f"post: a result of `fit` is needed; this one has no group {', '.join(missing)}")


def parameters_of(post: xr.DataTree) -> list[str]:
    """Names of the parameters of a posterior: the identified ones first, then the slopes, then the others.

    Fixed ones are left out, and the mean of the slopes, which is redundant with c₊ and c₋.
    """
    constant = constants_of(post)
    scalars = [str(name) for name in draws_of(post).data_vars if name not in constant]
    first = [name for name in identified_of(post) if name in scalars]
    slopes = [name for slope in (C_PLUS, C_MINUS) for name in scalars if _is(name, slope)]
    rest = [name for name in scalars if name not in (*first, *slopes) and not _is(name, C_MEAN)]
    return [*first, *slopes, *rest]


def identified_of(post: xr.DataTree) -> list[str]:
    """Sampled coordinates on which the limit depends, without fixed ones; for a custom program, all sampled sites."""
    known = [str(name) for name in draws_of(post).data_vars]
    sites = str(post.attrs.get("identified", "")).split()
    return [name for site in sites for name in known if name == site or name.startswith(f"{site}[")]


def draws_of(post: xr.DataTree, group: str = "posterior") -> xr.Dataset:
    """Draws with a variable for each parameter: `w[0]`, `w[1]`, … for the numbers of a site `w` of several.

    Sites of each network or group are left out, unless there are no others; and numbers that the prior does not vary,
    as the zeros of a Cholesky factor.
    """
    draws = with_chain(post[group].to_dataset())
    # With fewer there is neither an R-hat nor an interval.
    if group == "posterior" and not (draws.sizes.get("chain", 0) and draws.sizes.get("draw", 0) >= FEWEST_DRAWS):
        raise InputError(f"post: a chain of at least {FEWEST_DRAWS} draws is needed, got {dict(draws.sizes)}")
    axes = {name: values.dims[2:] for name, values in draws.transpose("chain", "draw", ...).data_vars.items()}
    named = {name for name, dims in axes.items() if any(not str(dim).startswith(f"{name}_dim_") for dim in dims)}
    prior = post["prior"].to_dataset() if "prior" in post.children else xr.Dataset()
    variables: dict[str, xr.DataArray] = {}
    for name, dims in axes.items():
        if name in named and len(named) < len(axes):
            continue
        for place in np.ndindex(*(draws.sizes[dim] for dim in dims)):
            index = dict(zip(dims, place, strict=True))
            labels = ", ".join(str(draws[dim].values[number]) for dim, number in index.items())
            of_prior = prior[name].isel(index).values if name in prior else np.zeros(0)
            constant = of_prior.size >= FEWEST_DRAWS and np.ptp(of_prior) <= EQUAL_NUMBERS * np.abs(of_prior).max()
            if not constant:
                variables[f"{name}[{labels}]" if index else str(name)] = draws[name].isel(index, drop=True)
    return xr.Dataset(variables, attrs=draws.attrs)


def fixed_of(post: xr.DataTree) -> dict[str, float]:
    """Values of the fixed coordinates by name."""
    return {
        str(name).removeprefix("fixed_"): float(value)
        for name, value in post.attrs.items()
        if str(name).startswith("fixed_")
    }


def constants_of(post: xr.DataTree) -> dict[str, float]:
    """Values of the fixed coordinates, and of the parameters computed from fixed coordinates only, by name."""
    constant = fixed_of(post)
    gaps = [name for name in constant if _is(name, C_GAP)]
    for prefix in (name.removesuffix(C_GAP.name) for name in gaps):
        if prefix + C_MEAN.name in constant:
            slopes = SLOPES.from_sampled(constant[prefix + C_GAP.name], constant[prefix + C_MEAN.name])
            constant |= {prefix + parameter: value for parameter, value in zip(SLOPES.parameters, slopes, strict=True)}
    return constant


def _is(name: str, parameter: Parameter) -> bool:
    """Whether a name is that of a parameter, possibly with the prefix of a layer in a stack."""
    return name.rpartition(".")[2] == parameter.name


def known_truth(post: xr.DataTree) -> dict[str, float]:
    """The true parameters, ordered c₊ ≥ c₋ as in the models, and the gap c₊ − c₋."""
    truth = truth_of(post.attrs)
    for plus in [name for name in truth if _is(name, C_PLUS)]:
        prefix = plus.removesuffix(C_PLUS.name)
        minus = prefix + C_MINUS.name
        if minus in truth:
            upper, lower = max(truth[plus], truth[minus]), min(truth[plus], truth[minus])
            truth |= {plus: upper, minus: lower, prefix + C_GAP.name: upper - lower}
    return truth
