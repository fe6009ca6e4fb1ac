"""Whether to believe a fit, and why not."""

import dataclasses
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr

from sdeinfer.check._summary import IDENTIFIED, summarise
from sdeinfer.observe import validate

RHAT = 1.01
ESS = 400
LOGITS = 0.6
LARGEST_LOGIT = 1.2
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
    """Judge a fit: convergence of the sampler, range of the limit, and the truth where it is known.

    Arguments:
        post: the result of `fit`.
        data: the data that were fitted; the posterior's own copy where None.

    Returns:
        The verdicts, each with its number, its threshold and what to do.
    """
    data = observed(post) if data is None else validate(data)
    table = summarise(post)
    stats = post["sample_stats"].to_dataset()
    verdicts = [
        _at_most("R-hat", table["rhat"].max(skipna=False), RHAT, "run longer: more warmup and more draws", strict=True),
        _at_least("bulk ESS", table["ess_bulk"].min(skipna=False), ESS, "draw more"),
        _at_least("tail ESS", table["ess_tail"].min(skipna=False), ESS, "draw more"),
        _at_most(
            "divergences", float(stats["diverging"].sum()), 0, "raise the warmup; look at the pairs of parameters"
        ),
    ]
    if "tau0" in table.index:
        logits = logit_range(data, table.loc["tau0", "mean"])
        advice = "the limit expands the softmax: leave out layers with large covariances, or use smaller tokens"
        verdicts.append(_at_most("logit sd, 99 % of layers", np.quantile(logits, 0.99), LOGITS, advice))
        verdicts.append(_at_most("logit sd, largest", logits.max(), LARGEST_LOGIT, advice))
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
    data = post.children["observed_data"].to_dataset()
    return validate(data.assign_coords(width=("network", post.children["constant_data"].to_dataset()["width"].values)))


def logit_range(data: xr.Dataset, tau0: float) -> np.ndarray:
    """Standard deviation of the softmax logits, max V/(τ0 √n), at the covariance from which each transition starts.

    The limit expands the softmax in it: at 0.6 the variance of one step is 2 to 3 % off, at 1.2 already 6 to 19 %.

    Returns:
        Shape (networks, transitions).
    """
    starts = data["covariance"].isel(layer=slice(None, -1)).values
    norms = np.diagonal(starts, axis1=-2, axis2=-1).max(axis=-1)
    return norms / (tau0 * np.sqrt(data["width"].values))[:, None]


def _at_most(name: str, value: Any, threshold: float, advice: str, *, strict: bool = False) -> Verdict:
    value = float(value)
    return Verdict(name, value, threshold, value < threshold if strict else value <= threshold, advice)


def _at_least(name: str, value: Any, threshold: float, advice: str) -> Verdict:
    value = float(value)
    return Verdict(name, value, threshold, value >= threshold, advice)
