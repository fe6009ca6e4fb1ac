"""Verdicts on a fit of increments: are they those of the blocks, and independent?"""

import numpy as np
import pandas as pd
import xarray as xr

from sdeinfer.diagnostics._advice import of_contractions, sampler_verdicts, with_precision
from sdeinfer.diagnostics._branch_tests import BranchTests
from sdeinfer.diagnostics._summary import fixed_of, identified_of, summarise
from sdeinfer.diagnostics._verdict import Check


def check_branches(post: xr.DataTree) -> Check:
    """Check a fit of increments, see `check`: the law of the branches, the sampler and identification.

    - calibrated: norms; independence of increments from what is read and from each other; tails; strengths of layers
      against each other; gains and temperatures that are assumed; χ² of all increments. A misfit fails if it is
      significant at `LEVEL`, for all tests together, and larger than its threshold.
    - converged and identified: as of other fits.

    Declared strengths that differ are notes: they are the question of a fit, not a defect.
    """
    declared = {
        str(name).removeprefix("declared_"): float(value)
        for name, value in post.attrs.items()
        if str(name).startswith("declared_")
    }
    tests = BranchTests(
        xr.merge([post["observed_data"].to_dataset(), post["constant_data"].to_dataset()]).assign_attrs(post.attrs),
        post["coefficients"].to_dataset(),
        values=_centre(post) | {name: np.asarray(value) for name, value in fixed_of(post).items()},
        declared=declared,
        normed=str(post.attrs.get("normed", "")).split(),
    )
    table = summarise(post)
    names = identified_of(post)
    verdicts = tests.verdicts()
    of_sampler, rough = sampler_verdicts(post, table.loc[names])
    obeyed = all(verdict.passed for verdict in verdicts)
    contracted, unidentified = of_contractions(post, names if obeyed else [])
    verdicts += [*of_sampler, *contracted]
    known = [name for name in names if name not in unidentified]
    return Check(
        tuple(verdicts),
        identified=tuple(with_precision(name, table) for name in known),
        unidentified=unidentified,
        notes=tuple([*_declared_strengths(table, names, declared), *rough]),
        assumed=tuple(tests.unconfirmed()) if obeyed else (),
    )


def _declared_strengths(table: pd.DataFrame, names: list[str], declared: dict[str, float]) -> list[str]:
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
