"""The parameters of a posterior, the summary of each, and the verdicts of all fits: on the sampler and the truth.

Tests: `tests/diagnostics/test_check.py`.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr
from arviz_stats.base.array import array_stats
from arviz_stats.summary import summary

from sdeinfer._arguments import checked
from sdeinfer._files import InputError
from sdeinfer.diagnostics._thresholds import BFMI, CONTRACTION, DEVIATIONS, DIVERGENT, ESS, RHAT, ROUGH_ESS, ROUGH_RHAT
from sdeinfer.diagnostics._verdict import Verdict, at_least, at_most
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
    if group == "posterior" and not (draws.sizes.get("chain", 0) and draws.sizes.get("draw", 0) >= 4):
        raise InputError(f"post: a chain of at least 4 draws is needed, got {dict(draws.sizes)}")
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
            if name not in prior or not _constant(prior[name].isel(index).values):
                variables[f"{name}[{labels}]" if index else str(name)] = draws[name].isel(index, drop=True)
    return xr.Dataset(variables, attrs=draws.attrs)


def _constant(values: np.ndarray) -> bool:
    """Whether some draws are equal up to rounding."""
    return values.size >= 4 and bool(np.ptp(values) <= 1e-6 * np.abs(values).max())


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


def of_chains(table: pd.DataFrame) -> list[Verdict]:
    """Whether the chains agree and are long enough, from rows of `summarise`."""
    longer = "run longer: more warmup and more draws"
    return [
        at_most("converged", "R-hat", table["rhat"].max(skipna=False), RHAT, longer),
        at_least("converged", "bulk ESS", table["ess_bulk"].min(skipna=False), ESS, "draw more"),
        at_least("converged", "tail ESS", table["ess_tail"].min(skipna=False), ESS, "draw more"),
    ]


def of_geometry(post: xr.DataTree) -> list[Verdict]:
    """Symptoms of a posterior that is hard to explore, for example of weakly identified parameters."""
    if "sample_stats" not in post.children:
        return []
    statistics, verdicts = post["sample_stats"].to_dataset(), []
    if "diverging" in statistics:
        advice = (
            "the posterior is hard to explore, where the data identify little or contradict the law: raise the warmup"
        )
        verdicts.append(at_most("converged", "divergences", statistics["diverging"].mean(), DIVERGENT, advice))
    if "energy" in statistics:
        smallest = float(np.min(array_stats.bfmi(statistics["energy"].values)))
        advice = "the sampler explores the posterior's energies too slowly: run longer"
        verdicts.append(at_least("converged", "BFMI", smallest, BFMI, advice))
    return verdicts


def of_rough(table: pd.DataFrame) -> list[str]:
    """A note on Monte Carlo errors that are small and larger than usual."""
    rhat, ess = table["rhat"].to_numpy().max(), table[["ess_bulk", "ess_tail"]].to_numpy().min()
    if rhat < ROUGH_RHAT and ess >= ROUGH_ESS:
        return []
    return [f"R-hat {rhat:.3f} and the smallest ESS {ess:.0f}: means and intervals are rough; draw more for digits"]


def of_truth(table: pd.DataFrame) -> list[Verdict]:
    """Distances of the identified parameters from the truth, where it is known."""
    deviations = (table["mean"] - table["truth"]).abs() / table["sd"]
    advice = "the posterior mean is too far from the truth: the model does not fit"
    known = [str(name) for name in table.index if np.isfinite(table.loc[name, "truth"])]
    return [at_most("true", f"{name}, sds from truth", deviations[name], DEVIATIONS, advice) for name in known]


def of_contractions(post: xr.DataTree, names: Sequence[str]) -> dict[str, Verdict]:
    """Whether the posteriors of parameters are narrower than their priors, by draws of both.

    The contraction is one minus the ratio of the posterior's variance to the prior's, of positive parameters in
    logarithms.
    """
    verdicts = {}
    for name in names:
        draws = [draws_of(post, group)[name].values for group in ("posterior", "prior")]
        posterior, prior = map(np.log, draws) if all((x > 0).all() for x in draws) else draws
        value, advice = 1 - posterior.var() / prior.var(), f"the data hardly identify {name}"
        verdicts[name] = at_least("identified", f"{name} contraction", value, CONTRACTION, advice)
    return verdicts


def with_precision(name: str, table: pd.DataFrame) -> str:
    """A parameter with its relative standard deviation in percent, such as "gamma ± 1 %"."""
    percent = f"{100 * table.loc[name, 'sd'] / abs(table.loc[name, 'mean']):.2g}"
    return f"{name} ± {float(percent):g} %"
