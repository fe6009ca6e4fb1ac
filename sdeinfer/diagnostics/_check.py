"""The tests of a fit, in their order: of the fitted law, of the sampler, of what the data identify, and of the truth.

A test is a function of what was fitted, and returns a `Check`. A verdict has a statistic, which counts where it is
significant, a threshold, and a sentence.
"""

import numpy as np
import pandas as pd
import xarray as xr
from arviz_stats.base.array import array_stats

from sdeinfer._arguments import checked
from sdeinfer._progress import phase, with_progress_line
from sdeinfer.diagnostics import _thresholds as bounds
from sdeinfer.diagnostics._alternatives import check_alternatives
from sdeinfer.diagnostics._assumptions import check_shared_noise, check_shortcuts, check_skewness, check_unlike_layers
from sdeinfer.diagnostics._branch_tests import check_increments
from sdeinfer.diagnostics._consequences import (
    check_conflict,
    check_finite_width,
    check_misfit,
    check_move,
    check_scatter,
)
from sdeinfer.diagnostics._identification import contractions_by_draws, contractions_of
from sdeinfer.diagnostics._predictive import check_last_layer
from sdeinfer.diagnostics._range import check_range, cold_draws
from sdeinfer.diagnostics._residuals import Residuals
from sdeinfer.diagnostics._summary import constants_of, identified_of, require_groups, summarise, with_chains
from sdeinfer.diagnostics._verdict import Check, at_least, at_most, together
from sdeinfer.infer._assume import placed
from sdeinfer.layers import AbstractLayer

LAYER_TESTS = (
    *(check_conflict, check_shared_noise, check_finite_width, check_misfit, check_unlike_layers, check_alternatives),
    *(check_shortcuts, check_skewness, check_move, check_scatter, check_range),
)
"""The tests of covariances after every layer, causes before consequences."""


@checked
@with_progress_line
@placed
def check(
    post: xr.DataTree,
    data: xr.Dataset | None = None,
    *,
    architecture: AbstractLayer | type[AbstractLayer] | None = None,
    progress: bool = True,
) -> Check:
    """Check a fit: convergence, identification, calibration, agreement with the theory, and the truth if known.

    - calibrated: the one-step innovations in eight directions (`innovation_tests`), if every layer was observed. A
      misfit fails if it is significant and moves a parameter by more than `LARGEST_MOVE` posterior standard deviations
      (see `consequences`), or if it is larger than `MISFIT_EFFECT`; others are notes. The false-alarm probability is
      `LEVEL`, for all directions together. The noise of each layer against that of all. γ against that by the
      regression of hidden states on those before, if these were observed. With latent layers, each network given all
      others (`left_out_transforms`).
    - architecture: other architectures and sizes by their evidence, see `alternatives`.
    - agrees with the theory: what the law omits, by its consequences; the range of the law; with latent layers, also
      networks after the last layer against predictions.
    - converged: R-hat, effective sample sizes, divergences and BFMI.
    - identified: the contraction of each posterior from its prior, or the contraction expected from the Fisher
      information if that is less; see `identification`. Left out if the layers do not obey the law.
    - true: each parameter against the truth, if known.

    Of increments of residual branches, calibrated means: norms, independence of what is read and of other branches,
    fourth moments, assumed gains and temperatures, strengths of layers against each other, and χ². Where gains,
    temperatures or χ² fail, the verdict "evidence for another block" names what the network may have in place of the
    declared block: another norm, factor or mask (`AbstractBranch.alternatives`). Of tokens: score tests of their law.

    Arguments:
        post: the result of `fit`.
        data: the data that were fitted, to be compared with those in the posterior, which are checked: the transitions
            that the fit used; some of the networks for data in chunks (Dask), with a note.
        architecture: the layer, for a custom type of layer, which the posterior does not store.
        progress: whether a line on a terminal or in a notebook says what is done, after two seconds.

    Returns:
        The verdicts, each with value, threshold and advice; and the skipped tests.

    Raises:
        InputError: for data that were not fitted.
    """
    del progress  # for `with_progress_line`
    phase("checking the fit")
    tree = with_chains(post)
    table, names = summarise(tree), identified_of(tree)
    predictions, cold = Check(), {}
    if "coefficients" in tree.children:
        law, contractions = check_increments(tree, table), contractions_by_draws(tree, names)
    elif "score_tests" in tree.children:
        law, contractions = check_tokens(tree), contractions_by_draws(tree, names)
    else:
        residuals = Residuals.of(tree, data, architecture)
        law, contractions = check_covariances(residuals), contractions_of(residuals)
        predictions, cold = check_last_layer(residuals), cold_draws(residuals)
    contractions = contractions if law.passed else {}
    unidentified = [name for name, contraction in contractions.items() if not contraction.passed]
    identified = [with_precision(name, table) for name in names if name not in unidentified]
    # The first τ0 that the data do not identify: draws out of the law's range make the others depend on its prior.
    unidentified_tau0 = [name for name in unidentified if name in cold][:1]
    by_prior = [name for name in unidentified_tau0 if identified and not cold[name].passed]
    chains, geometry = check_chains(table.drop(index=[*constants_of(tree)], errors="ignore")), check_geometry(tree)
    verdicts = [
        *law.verdicts,
        *chains.verdicts,
        *contractions.values(),
        *(cold[name] for name in unidentified_tau0),
        *geometry.verdicts,
        *predictions.verdicts,
        *check_truth(table.loc[names]).verdicts,
    ]
    return Check(
        tuple(verdicts),
        skipped=(*law.skipped, *predictions.skipped, *geometry.skipped),
        identified=() if by_prior else tuple(identified),
        conditional=f"{', '.join(identified)} by the prior of {by_prior[0]}" if by_prior else "",
        unidentified=tuple(unidentified),
        notes=(*law.notes, *predictions.notes, *chains.notes, *(cold[name].advice for name in by_prior)),
        assumed=law.assumed if identified else {},
    )


def with_precision(name: str, table: pd.DataFrame) -> str:
    """A parameter with its relative standard deviation in percent, such as "gamma ± 1 %"."""
    percent = f"{100 * table.loc[name, 'sd'] / abs(table.loc[name, 'mean']):.2g}"
    return f"{name} ± {float(percent):g} %"


def check_covariances(residuals: Residuals) -> Check:
    """The verdicts on layers, other architectures and the range of the law."""
    if residuals.kind is not None:
        require_groups(residuals.tree, "layers")
    known = residuals.every_layer and residuals.kind is not None
    tests = LAYER_TESTS if known else (check_unknown_layers, check_range)
    return together(test(residuals) for test in (*tests, check_left_out))


def check_unknown_layers(residuals: Residuals) -> Check:
    """Why there are no innovations."""
    if not residuals.every_layer:
        return Check(skipped=("one-step innovations: layers are latent",))
    if "layers" in residuals.tree.children:
        name = residuals.tree.attrs.get("architecture")
        return Check(skipped=(f"one-step innovations and the range of the law: give the layer, architecture={name}",))
    reason = (
        "one-step innovations, other architectures and the range of the law: the program has no single layer, and "
        "its likelihood has no adjustment, without which intervals of narrow networks are too short"
    )
    return Check(skipped=(reason,))


def check_left_out(residuals: Residuals) -> Check:
    """Notes on networks of data in chunks that were damaged or are not in the posterior, and on layers left out."""
    attrs, notes = residuals.tree.attrs, []
    if attrs.get("kept_networks", 0) < attrs.get("networks", 0):
        notes.append(f"layers and predictions are checked on {attrs['kept_networks']} of {attrs['networks']} networks")
    if "damaged_networks" in attrs:
        notes.append(f"{attrs['damaged_networks']} damaged networks are left out")
    left_out = float(attrs.get("left_out", 0.0))
    if 1 - left_out < bounds.FRACTION_IN_RANGE:
        notes.append(f"{left_out:.1%} of the transitions start outside the range of the law, and are left out")
    return Check(notes=tuple(notes))


def check_tokens(post: xr.DataTree) -> Check:
    """The verdicts on the largest misfit in a table of score tests and on the largest move of a parameter by one.

    Small ones are notes. A misfit counts if it is significant, at `LEVEL` for all directions together.
    """
    table = post["score_tests"].to_dataset().to_dataframe()
    if not np.isfinite(table["effect"]).all():
        advice = "not this law: it is not finite at the posterior means, as where chains did not meet"
        return Check((at_most("calibrated", "misfit of the layers", np.nan, bounds.MISFIT_EFFECT, advice),))
    significant, verdicts = table.loc[table["p"] * len(table) < bounds.LEVEL], []
    for column, name, threshold in (
        ("effect", "misfit of the layers", bounds.MISFIT_EFFECT),
        ("move", "move by the misfit, posterior sds", bounds.LARGEST_MOVE),
    ):
        # The largest of the means if there is one, since it shows in the noise too.
        large = significant.loc[significant[column] > threshold]
        worst = large.sort_values(["of_noise", column], ascending=[True, False])
        advice = f"not this law: {worst['cause'].iloc[0]}" if len(worst) else ""
        verdicts.append(at_most("calibrated", name, max(significant[column], default=0.0), threshold, advice))
    small = significant.loc[
        (significant["effect"] <= bounds.MISFIT_EFFECT) & (significant["move"] <= bounds.LARGEST_MOVE)
    ]
    notes = [f"{name} {row['effect']:.2g}, small: {row['cause']}" for name, row in small.iterrows()]
    return Check(tuple(verdicts), notes=tuple(notes))


def check_chains(table: pd.DataFrame) -> Check:
    """Whether the chains agree and are long enough, from rows of `summarise`; a note on rough means."""
    rhat, bulk, tail = table["rhat"], table["ess_bulk"], table["ess_tail"]
    verdicts = (
        at_most("converged", "R-hat", rhat.max(skipna=False), bounds.RHAT, "run longer: more warmup and more draws"),
        at_least("converged", "bulk ESS", bulk.min(skipna=False), bounds.ESS, "draw more"),
        at_least("converged", "tail ESS", tail.min(skipna=False), bounds.ESS, "draw more"),
    )
    worst, least = rhat.to_numpy().max(), table[["ess_bulk", "ess_tail"]].to_numpy().min()
    if worst < bounds.ROUGH_RHAT and least >= bounds.ROUGH_ESS:
        return Check(verdicts)
    rough = f"R-hat {worst:.3f} and the smallest ESS {least:.0f}: means and intervals are rough; draw more for digits"
    return Check(verdicts, notes=(rough,))


def check_geometry(post: xr.DataTree) -> Check:
    """Symptoms of a posterior that is hard to explore, for example of weakly identified parameters."""
    statistics = post.children.get("sample_stats", xr.DataTree()).to_dataset()
    verdicts, skipped = [], []
    if "diverging" in statistics:
        share = statistics["diverging"].mean()
        advice = (
            "the posterior is hard to explore, where the data identify little or contradict the law: raise the warmup"
        )
        verdicts.append(at_most("converged", "divergences", share, bounds.DIVERGENT_FRACTION, advice))
    else:
        skipped.append("divergences: the sampler has no statistic diverging")
    if "energy" in statistics:
        smallest = float(np.min(array_stats.bfmi(statistics["energy"].values)))
        advice = "the sampler explores the posterior's energies too slowly: run longer"
        verdicts.append(at_least("converged", "BFMI", smallest, bounds.BFMI, advice))
    else:
        skipped.append("BFMI: the sampler has no statistic energy")
    if "sample_stats" not in post.children:
        skipped = ["divergences and energies: there is no group sample_stats"]
    if post["posterior"].sizes["chain"] == 1:
        skipped.append("agreement of chains: there is one, and R-hat compares its halves; run two chains or more")
    return Check(tuple(verdicts), skipped=tuple(skipped))


def check_truth(table: pd.DataFrame) -> Check:
    """Distances of the identified parameters from the truth, where it is known."""
    known = table.dropna(subset="truth")
    deviations = (known["mean"] - known["truth"]).abs() / known["sd"]
    advice = "the posterior mean is too far from the truth: the model does not fit"
    verdicts = (
        at_most("true", f"{name}, sds from truth", value, bounds.LARGEST_DEVIATION, advice)
        for name, value in zip(known.index, deviations, strict=True)
    )
    return Check(tuple(verdicts))
