"""Whether to believe a fit, and why not."""

import dataclasses
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr

from sdeinfer.check._summary import IDENTIFIED, summarise
from sdeinfer.infer import logit_scale
from sdeinfer.likelihood import USED, used_of
from sdeinfer.observe import groups_of, validate

RHAT = 1.01
ESS = 400
PARETO_K = 0.7
LOGITS = {"finite-width": 0.7, "limit": 0.35}
"""Largest spread of the logits in a row of the softmax at which a law can be believed: see `infer.in_range`."""
LEFT_OUT = 0.5
DEVIATIONS = 4.0


@dataclasses.dataclass(frozen=True)
class Verdict:
    """One question put to a fit.

    Attributes:
        name: what was looked at.
        value: the number found.
        threshold: what it was compared with.
        passed: whether it stands on the right side.
        advice: what to do where it does not.
    """

    name: str
    value: float
    threshold: float
    passed: bool
    advice: str


@dataclasses.dataclass(frozen=True)
class Check:
    """Every verdict on a fit.

    Attributes:
        verdicts: in the order in which they should be read.
    """

    verdicts: tuple[Verdict, ...]

    @property
    def passed(self) -> bool:
        """Whether every verdict is good."""
        return all(verdict.passed for verdict in self.verdicts)

    @property
    def verdict(self) -> str:
        """The overall verdict in a line."""
        failed = [verdict.name for verdict in self.verdicts if not verdict.passed]
        return f"do not trust yet: {', '.join(failed)}" if failed else "good"

    def to_frame(self) -> pd.DataFrame:
        """One row a verdict."""
        return pd.DataFrame([dataclasses.asdict(verdict) for verdict in self.verdicts]).set_index("name")


def check(post: xr.DataTree, data: xr.Dataset | None = None) -> Check:
    """Judge a fit: convergence of the sampler, range of the law, and the truth where it is known.

    An approximation is judged by the Pareto k of its importance weights instead of the sampler's convergence.

    Arguments:
        post: the result of `fit` or of `approximate`.
        data: the data that were fitted; the posterior's own copy where None.

    Returns:
        The verdicts, each with its number, its threshold and what to do.
    """
    data = observed(post) if data is None else validate(data)
    table = summarise(post)
    verdicts = _of_approximation(post) if "pareto_k" in post.attrs else _of_sampler(post, table)
    if "tau0" in table.index:
        used = used_of(data)
        largest = (logit_scale(data) / _tau0(post, data))[used].max()
        advice = "the law expands the softmax: lower largest_logit, use smaller tokens or wider networks"
        verdicts.append(_at_most("logit spread, largest", largest, LOGITS[post.attrs.get("law", "limit")], advice))
        advice = "most of the data start outside the range of the law: use smaller tokens or wider networks"
        verdicts.append(_at_most("transitions left out", 1 - used.mean(), LEFT_OUT, advice))
    for name in IDENTIFIED:
        if name in table.index and np.isfinite(table.loc[name, "truth"]):
            row = table.loc[name]
            deviations = abs(row["mean"] - row["truth"]) / row["sd"]
            verdicts.append(
                _at_most(f"{name} against truth", deviations, DEVIATIONS, "posterior sds away: the model does not fit")
            )
    return Check(tuple(verdicts))


def observed(post: xr.DataTree) -> xr.Dataset:
    """The data that a posterior was fitted to."""
    data, constant = (post.children[group].to_dataset() for group in ("observed_data", "constant_data"))
    if USED in constant:
        data = data.assign({USED: constant[USED]})
    return validate(data.assign_coords(width=("network", constant["width"].values)))


def _of_sampler(post: xr.DataTree, table: pd.DataFrame) -> list[Verdict]:
    divergences = post["sample_stats"].to_dataset()["diverging"].sum()
    return [
        _at_most("R-hat", table["rhat"].max(skipna=False), RHAT, "run longer: more warmup and more draws", strict=True),
        _at_least("bulk ESS", table["ess_bulk"].min(skipna=False), ESS, "draw more"),
        _at_least("tail ESS", table["ess_tail"].min(skipna=False), ESS, "draw more"),
        _at_most("divergences", divergences, 0, "raise the warmup; look at the pairs of parameters"),
    ]


def _of_approximation(post: xr.DataTree) -> list[Verdict]:
    return [_at_most("Pareto k", post.attrs["pareto_k"], PARETO_K, "the posterior is not near to normal: use fit")]


def _tau0(post: xr.DataTree, data: xr.Dataset) -> np.ndarray:
    """The mean of the τ0 of each network, or of all, with an axis of transitions."""
    draws = post["posterior"].to_dataset()
    if "group_tau0" not in draws:
        return draws["tau0"].mean().values
    return draws["group_tau0"].mean(("chain", "draw")).values[groups_of(data).group][:, None]


def _at_most(name: str, value: Any, threshold: float, advice: str, *, strict: bool = False) -> Verdict:
    value = float(value)
    return Verdict(name, value, threshold, value < threshold if strict else value <= threshold, advice)


def _at_least(name: str, value: Any, threshold: float, advice: str) -> Verdict:
    value = float(value)
    return Verdict(name, value, threshold, value >= threshold, advice)
