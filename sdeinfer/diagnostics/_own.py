"""Tests of other data than covariances: are they of the fitted law?

Such a fit has a group of what its own tests need: increments their `coefficients`, others a table of `score_tests`.
"""

import abc
import dataclasses
import functools
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import pandas as pd
import xarray as xr

from sdeinfer.diagnostics._branch_tests import BranchTests
from sdeinfer.diagnostics._sampler import of_contractions
from sdeinfer.diagnostics._summary import fixed_of, identified_of, summarise
from sdeinfer.diagnostics._thresholds import EFFECT, LEVEL, MOVE
from sdeinfer.diagnostics._verdict import Verdict, at_most

COEFFICIENTS, SCORE_TESTS = "coefficients", "score_tests"


class OwnTests(NamedTuple):
    """What the tests of one kind of data say of a fit.

    Attributes:
        verdicts: whether the data obey the law.
        contractions: whether the data say more of each parameter than its prior; of use where they obey the law.
        notes: misfits that were seen and do not matter.
        assumed: what the parameters depend on and the data do not confirm.
        beyond: for parameters that may leave the range of the law if the data do not identify them, whether they do.
        last: verdicts on predictions.
        skipped: the tests that cannot be made, with reasons.
    """

    verdicts: list[Verdict]
    contractions: list[Verdict]
    notes: list[str]
    assumed: list[str]
    beyond: Mapping[str, Verdict] = MappingProxyType({})
    last: tuple[Verdict, ...] = ()
    skipped: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, eq=False)
class AbstractFitted(abc.ABC):
    """The result of a fit to one kind of data; a further kind is a subclass that `check` knows by a group.

    Attributes:
        tree: the result, with its axis of chains.
    """

    tree: xr.DataTree

    @functools.cached_property
    def table(self) -> pd.DataFrame:
        """The summary of all parameters."""
        return summarise(self.tree)

    @functools.cached_property
    def identified(self) -> list[str]:
        """Names of the parameters on which the law depends."""
        return identified_of(self.tree)

    @abc.abstractmethod
    def tests(self) -> OwnTests:
        """The tests of this kind of data."""


@dataclasses.dataclass(frozen=True, eq=False)
class FittedBranches(AbstractFitted):
    """A fit of increments; declared strengths that differ are notes, as they are its question and no defect."""

    def tests(self) -> OwnTests:
        """The tests of `BranchTests` at the posterior's centre, and at the fixed and the declared values."""
        tests = _branch_tests(self.tree)
        verdicts, notes = tests.verdicts(), _declared_strengths(self.table, self.identified, tests.declared)
        assumed = tests.unconfirmed() if all(each.passed for each in verdicts) else []
        return OwnTests(verdicts, of_contractions(self.tree, self.identified), notes, assumed)


@dataclasses.dataclass(frozen=True, eq=False)
class FittedScores(AbstractFitted):
    """A fit that made a table of score tests of its law, as of tokens."""

    def tests(self) -> OwnTests:
        """The largest misfit, and the largest move of a parameter by one."""
        verdicts, notes = of_score_tests(self.tree[SCORE_TESTS].to_dataset())
        return OwnTests(verdicts, of_contractions(self.tree, self.identified), notes, [])


def of_score_tests(tests: xr.Dataset) -> tuple[list[Verdict], list[str]]:
    """Verdicts on the largest misfit and on the largest move of a parameter by one, and notes on small ones.

    A misfit counts if it is significant, at `LEVEL` for all directions together.
    """
    table = tests.to_dataframe()
    if not np.isfinite(table["effect"]).all():
        advice = "not this law: it is not finite at the posterior means, as where chains did not meet"
        return [at_most("calibrated", "misfit of the layers", np.nan, EFFECT, advice)], []
    significant = table.loc[table["p"] * len(table) < LEVEL]
    verdicts = []
    for column, name, threshold in (
        ("effect", "misfit of the layers", EFFECT),
        ("move", "move by the misfit, posterior sds", MOVE),
    ):
        # The largest of the means if there is one, since it shows in the noise too.
        large = significant.loc[significant[column] > threshold]
        worst = large.sort_values(["of_noise", column], ascending=[True, False])
        advice = f"not this law: {worst['cause'].iloc[0]}" if len(worst) else ""
        verdicts.append(at_most("calibrated", name, max(significant[column], default=0.0), threshold, advice))
    small = significant.loc[(significant["effect"] <= EFFECT) & (significant["move"] <= MOVE)]
    return verdicts, [f"{name} {row['effect']:.2g}, small: {row['cause']}" for name, row in small.iterrows()]


def _branch_tests(post: xr.DataTree) -> BranchTests:
    """The tests at the posterior's centre, and at the fixed and the declared values."""
    declared = {
        str(name).removeprefix("declared_"): float(value)
        for name, value in post.attrs.items()
        if str(name).startswith("declared_")
    }
    return BranchTests(
        xr.merge([post["observed_data"].to_dataset(), post["constant_data"].to_dataset()]).assign_attrs(post.attrs),
        post[COEFFICIENTS].to_dataset(),
        values=_centre(post) | {name: np.asarray(value) for name, value in fixed_of(post).items()},
        declared=declared,
        normed=str(post.attrs.get("normed", "")).split(),
    )


def _declared_strengths(table: pd.DataFrame, names: list[str], declared: Mapping[str, float]) -> list[str]:
    """Notes on strengths that differ from the declared ones."""
    notes = []
    for name in names:
        own = name.partition("[")[0]
        if own not in declared or not own.endswith("strength"):
            continue
        ratio, error = table.loc[name, "mean"] / declared[own], table.loc[name, "sd"] / declared[own]
        if abs(ratio - 1) > 4 * error:
            notes.append(f"{name} is {ratio:.3g} ± {error:.1g} times the declared {declared[own]:.3g}")
    return notes


def _centre(post: xr.DataTree) -> dict[str, np.ndarray]:
    """The posterior means; with a latent gain or temperature the draw of the largest likelihood.

    Strength and gain lie along a curve where the branch is nearly linear, and their means do not.
    """
    draws = post["posterior"].to_dataset()
    if all(str(name).endswith(("strength", "strength_sd")) for name in draws.data_vars):
        return {str(name): values.values for name, values in draws.mean(("chain", "draw")).data_vars.items()}
    likelihood = post["log_likelihood"].to_dataset()["increments"].sum(("network", "branch"))
    best = draws.isel(likelihood.argmax(("chain", "draw")))
    return {str(name): values.values for name, values in best.data_vars.items()}
