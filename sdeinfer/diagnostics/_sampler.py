"""Verdicts common to all fits: the sampler, what the data identify, and the truth."""

from collections.abc import Sequence

import numpy as np
import pandas as pd
import xarray as xr
from arviz_stats.base.array import array_stats

from sdeinfer.diagnostics._summary import draws_of
from sdeinfer.diagnostics._thresholds import (
    BFMI,
    CONTRACTION,
    DEVIATIONS,
    DIVERGENT,
    ESS,
    RHAT,
    ROUGH_ESS,
    ROUGH_RHAT,
)
from sdeinfer.diagnostics._verdict import Verdict, at_least, at_most

CONTRACTED = " contraction"


def of_chains(table: pd.DataFrame) -> list[Verdict]:
    """Whether the chains agree and are long enough, from rows of `summarise`."""
    longer = "run longer: more warmup and more draws"
    return [
        at_most("converged", "R-hat", table["rhat"].max(skipna=False), RHAT, longer, strict=True),
        at_least("converged", "bulk ESS", table["ess_bulk"].min(skipna=False), ESS, "draw more"),
        at_least("converged", "tail ESS", table["ess_tail"].min(skipna=False), ESS, "draw more"),
    ]


def of_geometry(post: xr.DataTree) -> list[Verdict]:
    """Symptoms of a posterior that is hard to explore, for example of weakly identified parameters."""
    if "sample_stats" not in post.children:
        return []
    statistics = post["sample_stats"].to_dataset()
    advice = "the posterior is hard to explore, where the data say little or contradict the law: raise the warmup"
    verdicts = [at_most("converged", "divergences", statistics["diverging"].mean(), DIVERGENT, advice)]
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
    advice = "posterior sds away: the model does not fit"
    known = [str(name) for name in table.index if np.isfinite(table.loc[name, "truth"])]
    return [at_most("true", f"{name} against truth", deviations[name], DEVIATIONS, advice) for name in known]


def of_contractions(post: xr.DataTree, names: Sequence[str]) -> list[Verdict]:
    """Whether the data say more of parameters than their priors, by draws of both.

    The contraction is one minus the ratio of the posterior's variance to the prior's, of positive parameters in
    logarithms.
    """
    verdicts = []
    for name in names:
        draws = [draws_of(post, group)[name].values for group in ("posterior", "prior")]
        posterior, prior = map(np.log, draws) if all((x > 0).all() for x in draws) else draws
        value, advice = 1 - posterior.var() / prior.var(), f"the data say little of {name}"
        verdicts.append(at_least("identified", f"{name}{CONTRACTED}", value, CONTRACTION, advice))
    return verdicts


def with_precision(name: str, table: pd.DataFrame) -> str:
    """A parameter with its relative standard deviation in percent, such as "gamma ± 1 %"."""
    percent = f"{100 * table.loc[name, 'sd'] / abs(table.loc[name, 'mean']):.2g}"
    return f"{name} ± {float(percent):g} %"
