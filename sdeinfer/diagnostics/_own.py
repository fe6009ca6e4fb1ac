"""The tests of each kind of data: are they of the fitted law, and what do they identify?

Tests: `tests/diagnostics/test_check.py`.
"""

from collections.abc import Mapping, Sequence, Set
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import xarray as xr

from sdeinfer.diagnostics._alternatives import Alternative, alternatives_of
from sdeinfer.diagnostics._branch_tests import BranchTests
from sdeinfer.diagnostics._consequences import consequences_of, of_conflict, of_large_misfits, of_small_misfits
from sdeinfer.diagnostics._identification import identification_of, of_identification
from sdeinfer.diagnostics._innovations import ScoreSums, score_sums
from sdeinfer.diagnostics._networks import of_shared_noise
from sdeinfer.diagnostics._one_layer import of_unlike_layers
from sdeinfer.diagnostics._posterior import FittedPosterior, has_prior, require_groups
from sdeinfer.diagnostics._predictive import of_draws, of_predictions
from sdeinfer.diagnostics._range import of_range
from sdeinfer.diagnostics._shortcut import of_shortcuts
from sdeinfer.diagnostics._skewness import of_skewness
from sdeinfer.diagnostics._summary import fixed_of, identified_of, of_contractions
from sdeinfer.diagnostics._thresholds import EFFECT, EVIDENCE, LEVEL, MOST, MOVE
from sdeinfer.diagnostics._verdict import Verdict, at_most
from sdeinfer.layers import AbstractLayer, kind_in_words
from sdeinfer.layers._templates import call_of, is_named, sizes_in_words
from sdeinfer.observation._networks import MEASURED


class OwnTests(NamedTuple):
    """Verdicts and notes of the tests for one kind of data."""

    verdicts: list[Verdict]  # whether the data obey the law
    contractions: Mapping[str, Verdict]  # whether they identify a parameter; of use if they obey the law
    notes: Sequence[str]  # misfits that were seen and do not matter
    assumed: Mapping[str, str] = MappingProxyType({})  # what the data do not confirm, and what else would give
    beyond: Mapping[str, Verdict] = MappingProxyType({})  # whether a τ0 that they do not identify may leave the range
    last: Sequence[Verdict] = ()  # on predictions
    skipped: Sequence[str] = ()  # the tests that cannot be made, with reasons


def tests_of_branches(post: xr.DataTree, table: pd.DataFrame) -> OwnTests:
    """Tests of increments at the posterior's centre; strengths unlike the declared ones are notes, not defects."""
    names, prefix = identified_of(post), "declared_"
    attrs = {str(name): value for name, value in post.attrs.items()}
    declared = {name.removeprefix(prefix): float(x) for name, x in attrs.items() if name.startswith(prefix)}
    tests = BranchTests(
        xr.merge([post["observed_data"].to_dataset(), post["constant_data"].to_dataset()]).assign_attrs(post.attrs),
        post["coefficients"].to_dataset(),
        values=_centre(post) | {name: np.asarray(value) for name, value in fixed_of(post).items()},
        declared=declared,
        normed=str(post.attrs.get("normed", "")).split(),
    )
    verdicts, notes = tests.verdicts(), []
    for name in names:
        site = name.partition("[")[0]
        if site not in declared or not site.endswith("strength"):
            continue
        ratio, error = table.loc[name, "mean"] / declared[site], table.loc[name, "sd"] / declared[site]
        if abs(ratio - 1) > 4 * error:
            notes.append(f"{name} is {ratio:.3g} ± {error:.1g} times the declared {declared[site]:.3g}")
    # What was read from the weights needs no confirmation.
    unknown = all(verdict.passed for verdict in verdicts) and MEASURED not in post.attrs
    assumed = dict.fromkeys(tests.unconfirmed() if unknown else [], "")
    return OwnTests(verdicts, of_contractions(post, names), notes, assumed)


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


def tests_of_scores(post: xr.DataTree) -> OwnTests:
    """Verdicts on the largest misfit in a table of score tests and on the largest move of a parameter by one.

    Small ones are notes. A misfit counts if it is significant, at `LEVEL` for all directions together.
    """
    table, contractions = post["score_tests"].to_dataset().to_dataframe(), of_contractions(post, identified_of(post))
    if not np.isfinite(table["effect"]).all():
        advice = "not this law: it is not finite at the posterior means, as where chains did not meet"
        return OwnTests([at_most("calibrated", "misfit of the layers", np.nan, EFFECT, advice)], contractions, [])
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
    notes = [f"{name} {row['effect']:.2g}, small: {row['cause']}" for name, row in small.iterrows()]
    return OwnTests(verdicts, contractions, notes)


def tests_of_covariances(posterior: FittedPosterior, sd: Mapping[Any, float]) -> OwnTests:
    """The layers against the law and other architectures; the range of the law; networks left out."""
    tree, every_layer, sums = posterior.tree, bool(posterior.tree.attrs.get("every_layer")), None
    if posterior.kind is not None:
        require_groups(tree, "layers")
        sums = score_sums(posterior) if every_layer else None
    contractions = {}
    if has_prior(tree):
        contractions = of_identification(identification_of(posterior, None if sums is None else sums.information))
    known = {name for name in sd if name not in contractions or contractions[name].passed}
    verdicts, notes, assumed = _of_law(posterior, sums, sd, known)
    of_spread, beyond = of_range(posterior)
    notes += _of_kept(tree.attrs)
    predicted = of_predictions(tree)
    last = predicted or []
    if every_layer:
        notes += [f"{verdict.name} {verdict.value:.2g}: {verdict.advice}" for verdict in last if not verdict.passed]
        last = of_draws(tree)
    skipped = _skipped(posterior, predicted=predicted is not None)
    return OwnTests(verdicts + of_spread, contractions, notes, assumed, beyond, last, skipped)


def _of_law(
    posterior: FittedPosterior, sums: ScoreSums | None, sd: Mapping[Any, float], known: Set[Any]
) -> tuple[list[Verdict], list[str], dict[str, str]]:
    """Verdicts on priors, networks and layers, causes before consequences; notes; and what is assumed."""
    if sums is None:
        return [], [], {}
    kind, misfits = posterior.known_kind, consequences_of(sums, posterior)
    verdicts = of_conflict(sums, posterior) + of_shared_noise(posterior)
    verdicts += of_large_misfits(misfits, kind)
    data = posterior.data
    verdicts += of_unlike_layers(sums.noise, data.sizes["token_a"], data["layer"].values)
    of_weights = of_shortcuts(posterior) + of_skewness(posterior)
    small, notes = of_small_misfits(misfits, posterior.law, posterior.data.sizes["network"])
    if not _has_alternatives(posterior):
        return [*verdicts, *of_weights, *small], notes, {}
    verdict, alternative_notes, assumed = of_alternatives(alternatives_of(posterior, sums.dispersion), kind, sd, known)
    return [*verdicts, verdict, *of_weights, *small], notes + alternative_notes, assumed


def _has_alternatives(posterior: FittedPosterior) -> bool:
    """Whether other architectures are tried: for a named architecture with one layer for all networks."""
    return posterior.kind is not None and is_named(posterior.kind) and posterior.one_layer


def of_alternatives(
    candidates: Sequence[Alternative], kind: AbstractLayer, sd: Mapping[Any, float], known: Set[Any]
) -> tuple[Verdict, list[str], dict[str, str]]:
    """The verdict on other architectures, notes, and what the data do not confirm, with what another would give.

    An architecture that fits as well matters if it moves, or lacks, one of the `known` parameters, which the data
    identify; one that fits better if it moves any.
    """
    fitted = next(candidate for candidate in candidates if candidate.architecture == kind)
    best, advice, notes, assumed = 0.0, "", [], {}
    fitted_mask = kind.sizes.get("pattern")
    for candidate in candidates:
        lacks = [name for name in fitted.values if name in known and sd[name] > 0 and name not in candidate.values]
        shared = [name for name in candidate.values if name in fitted.values and sd.get(name, 0.0) > 0]
        moves = {name: abs(candidate.values[name] - fitted.values[name]) / sd[name] for name in shared}
        # Another mask changes what later tokens do, also where the parameters are the same.
        other_mask = (
            candidate.architecture.name == kind.name and candidate.architecture.sizes.get("pattern") != fitted_mask
        )
        masked = candidate.evidence > EVIDENCE and other_mask
        far = {name for name, move in moves.items() if move > MOVE and (name in known or candidate.evidence > EVIDENCE)}
        if candidate.evidence < -EVIDENCE or not (far or lacks or masked):
            continue
        moved = f"without {lacks[0]}" if lacks else ""
        if not lacks:
            name = max(far or shared, key=lambda name: moves[name])
            moved = f"{name} {candidate.values[name]:.3g} in place of {fitted.values[name]:.3g}"
        description = f"{kind_in_words(candidate.architecture)} ({moved})"
        if candidate.evidence <= EVIDENCE:
            notes.append(f"these data do not exclude {description}")
            assumed = _assumed(kind, candidate.architecture, moved) | assumed  # of the best alternative
        elif candidate.evidence > best:
            best = candidate.evidence
            remedy = f"check the network's code, or fit by architecture={call_of(candidate.architecture)}"
            advice = f"{description} fits better, by a log evidence of {best:.2g}: {remedy}"
    verdict = at_most("architecture", "evidence for another architecture", best, EVIDENCE, advice)
    in_order = (kind_in_words(kind), *sizes_in_words(kind).values())
    return verdict, notes, {words: assumed[words] for words in in_order if words in assumed}


def _assumed(kind: AbstractLayer, other_kind: AbstractLayer, moved: str) -> dict[str, str]:
    """The sizes, or the kind, that an architecture has in place of another's, each with what the other would give."""
    if kind.name != other_kind.name:
        return {kind_in_words(kind): f"{kind_in_words(other_kind)}: {moved}"}
    other_sizes = ", ".join(different_sizes(other_kind, kind))
    return {words: f"{other_sizes}: {moved}" for words in different_sizes(kind, other_kind)}


def different_sizes(kind: AbstractLayer, other_kind: AbstractLayer) -> list[str]:
    """The sizes of an architecture that differ from those of another of the same name, in words."""
    if kind.name != other_kind.name:
        return []
    return [words for size, words in sizes_in_words(kind).items() if kind.sizes[size] != other_kind.sizes[size]]


def _of_kept(attrs: Mapping[Any, Any]) -> list[str]:
    """Notes on networks of data in chunks that were damaged or are not in the posterior, and on layers left out."""
    notes = []
    if attrs.get("kept_networks", 0) < attrs.get("networks", 0):
        notes.append(f"layers and predictions are checked on {attrs['kept_networks']} of {attrs['networks']} networks")
    if "damaged_networks" in attrs:
        notes.append(f"{attrs['damaged_networks']} damaged networks are left out")
    left_out = float(attrs.get("left_out", 0.0))
    if 1 - left_out < MOST:
        notes.append(f"{left_out:.1%} of the transitions start outside the range of the law, and are left out")
    return notes


def _skipped(posterior: FittedPosterior, *, predicted: bool) -> tuple[str, ...]:
    """The tests that cannot be made, with reasons."""
    post, skipped = posterior.tree, []
    if not post.attrs.get("every_layer"):
        skipped.append("one-step innovations: layers are latent")
    elif "layers" not in post.children:
        skipped.append(
            "one-step innovations, other architectures and the range of the law: the program has no single layer, and "
            "its likelihood has no adjustment, without which intervals of narrow networks are too short"
        )
    elif posterior.kind is None:
        name = post.attrs.get("architecture")
        skipped.append(f"one-step innovations and the range of the law: give the layer, architecture={name}")
    elif not _has_alternatives(posterior):
        skipped.append("other architectures and sizes: only for si.models.full_path with a named architecture")
    if not {"posterior_predictive", "log_likelihood"} <= post.children.keys():
        without = "log likelihoods" if "posterior_predictive" in post.children else "predictions"
        skipped.append(f"networks left out and distance from predictions: there are no {without}")
    elif not predicted:
        skipped.append(
            "networks left out and distance from predictions: no draw that is left has predictions; select by sel"
        )
    return tuple(skipped)
