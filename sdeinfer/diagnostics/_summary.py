"""The posterior of each parameter as a row of numbers."""

import pandas as pd
import xarray as xr
from arviz_stats.summary import summary

from sdeinfer.observation import truth_of

HDI = 0.94
"""Probability of the highest-density intervals."""

PARAMETERS = ("gamma", "tau0", "c_gap", "c_plus", "c_minus", "gamma_sd", "tau0_sd", "c_gap_sd")
"""Public names, in the order of reports; an architecture has some of them, and only groups have standard deviations."""

IDENTIFIED = ("gamma", "tau0", "c_gap")
"""Those that the limit depends on; of c₊ and c₋ it knows only the gap."""


def parameters_of(post: xr.DataTree) -> list[str]:
    """The public parameters that a posterior has."""
    return [name for name in PARAMETERS if name in post["posterior"].data_vars]


def summarise(post: xr.DataTree, *, group: str = "posterior") -> pd.DataFrame:
    """Summarise the posterior of every public parameter, and of those of groups of networks.

    Arguments:
        post: the result of `fit`.
        group: "posterior", or `LIMIT_POSTERIOR` where the fit was made by both laws.

    Returns:
        One row a parameter, `group_<name>[<label>]` for that of a group, with columns mean, sd, hdi_low, hdi_high (94 %
        highest density), truth (NaN where not known), rhat, ess_bulk and ess_tail.
    """
    names = parameters_of(post)
    of_groups = [name for name in map("group_{}".format, IDENTIFIED) if name in post["posterior"].data_vars]
    table = summary(post, group=group, var_names=[*names, *of_groups], ci_kind="hdi", ci_prob=HDI, round_to="none")
    interval = [column for column in table.columns if column.startswith("hdi")]
    table = table.rename(columns={interval[0]: "hdi_low", interval[1]: "hdi_high", "r_hat": "rhat"})
    truth = known_truth(post)
    table["truth"] = [truth.get(str(name), float("nan")) for name in table.index]
    columns = ["mean", "sd", "hdi_low", "hdi_high", "truth", "rhat", "ess_bulk", "ess_tail"]
    return table.loc[:, columns].astype(float)


def known_truth(post: xr.DataTree) -> dict[str, float]:
    """The parameters that made the networks, in the order c₊ ≥ c₋ in which they are sampled, and their gap."""
    truth = truth_of(post.attrs)
    if "c_plus" in truth and "c_minus" in truth:
        upper, lower = max(truth["c_plus"], truth["c_minus"]), min(truth["c_plus"], truth["c_minus"])
        truth |= {"c_plus": upper, "c_minus": lower, "c_gap": upper - lower}
    return truth
