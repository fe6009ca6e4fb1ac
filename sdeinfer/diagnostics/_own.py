"""Verdicts on fits of other data than covariances: are they of the fitted law?

Such a fit has a group of what its own tests need: increments their `coefficients`, others a table of `score_tests`.
"""

from collections.abc import Mapping

import numpy as np
import pandas as pd
import xarray as xr

from sdeinfer.diagnostics._advice import of_contractions, of_truth, sampler_verdicts, with_precision
from sdeinfer.diagnostics._branch_tests import BranchTests
from sdeinfer.diagnostics._summary import fixed_of, identified_of, summarise
from sdeinfer.diagnostics._thresholds import EFFECT, LEVEL, MOVE
from sdeinfer.diagnostics._verdict import Check, Verdict, at_most

COEFFICIENTS, SCORE_TESTS = "coefficients", "score_tests"


def brings_its_tests(post: xr.DataTree) -> bool:
    """Whether a fit has what tests of its own need."""
    return bool({COEFFICIENTS, SCORE_TESTS} & post.children.keys())


def check_own(post: xr.DataTree) -> Check:
    """Check a fit by tests of its own, and the sampler, identification and the truth as of other fits, see `check`."""
    table, names = summarise(post), identified_of(post)
    if COEFFICIENTS in post.children:
        tests = _tests_of_branches(post)
        verdicts, notes = tests.verdicts(), _declared_strengths(table, names, tests.declared)
        assumed = tuple(tests.unconfirmed())
    else:
        verdicts, notes = of_score_tests(post[SCORE_TESTS].to_dataset())
        assumed = ()
    obeyed = all(verdict.passed for verdict in verdicts)
    of_sampler, rough = sampler_verdicts(post, table.loc[names])
    contracted, unidentified = of_contractions(post, names if obeyed else [])
    verdicts += [*of_sampler, *contracted, *of_truth(table.loc[names])]
    known = [name for name in names if name not in unidentified]
    return Check(
        tuple(verdicts),
        identified=tuple(with_precision(name, table) for name in known),
        unidentified=unidentified,
        notes=tuple([*notes, *rough]),
        assumed=assumed if obeyed else (),
    )


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


def _tests_of_branches(post: xr.DataTree) -> BranchTests:
    """Tests of increments.

    Norms; independence of increments from what is read and from each other; tails; strengths of layers against each
    other; gains and temperatures that are assumed; χ² of all increments. Declared strengths that differ are notes: they
    are the question of a fit, not a defect.
    """
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
