"""The order in which a fit is checked: what is measured, and the verdicts on it."""

import xarray as xr

from sdeinfer._arguments import checked
from sdeinfer.diagnostics._advice import (
    CONTRACTED,
    OUT_OF_RANGE,
    of_chains,
    of_geometry,
    of_identification,
    of_kept,
    of_layers,
    of_predictions,
    of_range,
    of_rough,
    of_shared_noise,
    of_truth,
    of_unknown_range,
    with_precision,
)
from sdeinfer.diagnostics._alternatives import alternatives_of
from sdeinfer.diagnostics._conflict import of_conflict
from sdeinfer.diagnostics._consequences import consequences_of
from sdeinfer.diagnostics._fitted import require_groups
from sdeinfer.diagnostics._identification import identification_of
from sdeinfer.diagnostics._innovations import sums_of
from sdeinfer.diagnostics._networks import shared_noise
from sdeinfer.diagnostics._own import brings_its_tests, check_own
from sdeinfer.diagnostics._posterior import Posterior, has_prior
from sdeinfer.diagnostics._predictive import predictions_of
from sdeinfer.diagnostics._range import range_of
from sdeinfer.diagnostics._summary import constants_of
from sdeinfer.diagnostics._verdict import Check
from sdeinfer.infer import placed
from sdeinfer.layers import AbstractLayer, Architecture
from sdeinfer.observation import SHARED_WEIGHTS


@checked
@placed
def check(
    post: xr.DataTree,
    data: xr.Dataset | None = None,
    *,
    architecture: AbstractLayer | type[AbstractLayer] | Architecture | None = None,
) -> Check:
    """Check a fit: convergence, identification, calibration, agreement with the theory, and the truth if known.

    - calibrated: the one-step innovations in eight directions (`innovation_tests`), if every layer was observed. A
      misfit fails if it is significant and moves a parameter by more than `MOVE` posterior standard deviations (see
      `consequences`), or if it is larger than `EFFECT`; others are reported as notes. The false-alarm probability of
      each test is `LEVEL`, for all directions together. With latent layers, each network given all others
      (`left_out_transforms`). First of all, a tight prior that contradicts the data is named.
    - architecture: other architectures and sizes by their evidence, see `alternatives`.
    - agrees with the theory: what the law omits, by its consequences; the range of the law; with latent layers, also
      networks after the last layer against the SDE.
    - converged: R-hat, effective sample sizes, divergences and BFMI.
    - identified: the contraction of each posterior from its prior, or the contraction expected from the Fisher
      information if that is less; see `identification`. A parameter that is not identified is no defect of a fit. Left
      out if the layers do not obey the law.
    - true: each parameter against the truth, if known.

    Of increments of residual branches, calibrated means: norms, independence of what is read and of other branches,
    fourth moments, assumed gains and temperatures, strengths of layers against each other, and χ². Strengths that
    differ from the declared ones are notes. Of tokens: score tests of their law in some directions, of which a misfit
    fails by the same rule as innovations.

    No check of a solver's step is needed for latent layers: they are the layers of the networks, not solver steps.

    Arguments:
        post: the result of `fit`.
        data: the data that were fitted, to be compared with those in the posterior, which are checked: the transitions
            that the fit used; of data in chunks (Dask) some of the networks, which a note says.
        architecture: the layer, for a custom type of layer, which the posterior does not store.

    Returns:
        The verdicts, each with value, threshold and advice; and the skipped tests.

    Raises:
        InputError: for data that were not fitted.
    """
    if brings_its_tests(post):
        return check_own(post)
    posterior = Posterior.of(post, data, architecture)
    tree, kind, table = posterior.tree, posterior.kind, posterior.table
    if kind is not None:
        require_groups(tree, "layers")
    attrs, sampled = tree.attrs, table.drop(index=[*constants_of(tree)], errors="ignore")

    sums = sums_of(posterior) if kind is not None and posterior.every_layer else None
    misfits = None if sums is None else consequences_of(sums, posterior)
    others = alternatives_of(posterior, sums.dispersion) if sums is not None and posterior.has_alternatives else []
    in_range, predicted = range_of(posterior), predictions_of(tree)
    information = None if sums is None else sums.information
    contractions = identification_of(posterior, information) if has_prior(tree) else None

    verdicts, notes, assumed, shared = [], [], [], None
    if kind is not None and misfits is not None:
        sizes = {"law": posterior.law, "networks": posterior.data.sizes["network"]}
        verdicts, notes, assumed = of_layers(misfits, others, kind, table["sd"].to_dict(), **sizes)
        shared = shared_noise(posterior)
    verdicts = of_shared_noise(shared, seen=SHARED_WEIGHTS in posterior.data.attrs) + verdicts
    verdicts = ([] if sums is None else of_conflict(sums, posterior)) + verdicts
    if kind is not None and in_range is not None:
        verdicts += of_range(in_range, kind, attrs)
    notes += of_kept(attrs)
    obeyed = all(verdict.passed for verdict in verdicts)
    verdicts += of_chains(sampled)
    notes += of_rough(sampled)
    of_contraction = of_identification(contractions) if obeyed and contractions is not None else []
    unidentified = [each.name.removesuffix(CONTRACTED) for each in of_contraction if not each.passed]
    unknown = of_unknown_range(in_range, unidentified) if in_range is not None else []
    verdicts += of_contraction + unknown
    notes += [each.advice for each in unknown if not each.passed]
    verdicts += of_geometry(tree)
    of_last_layer = [] if predicted is None else of_predictions(predicted)
    if posterior.every_layer:
        notes += [f"{each.name} {each.value:.2g}: {each.advice}" for each in of_last_layer if not each.passed]
    else:
        verdicts += of_last_layer
    verdicts += of_truth(table.loc[posterior.identified])
    known = [name for name in posterior.identified if name not in unidentified and name in table.index]
    precisions = tuple(with_precision(name, table) for name in known)
    conditional = [each.name.removesuffix(OUT_OF_RANGE) for each in unknown if not each.passed]
    return Check(
        tuple(verdicts),
        skipped=_skipped(posterior, predicted=predicted is not None),
        identified=() if conditional else precisions,
        conditional=f"only by the prior of {conditional[0]}: {', '.join(precisions)}" if conditional else "",
        unidentified=tuple(unidentified),
        notes=tuple(notes),
        assumed=tuple(assumed) if known else (),
    )


def _skipped(posterior: Posterior, *, predicted: bool) -> tuple[str, ...]:
    """The tests that cannot be made, with reasons."""
    post, skipped = posterior.tree, []
    if not posterior.every_layer:
        skipped.append("one-step innovations: layers are latent")
    elif "layers" not in post.children:
        skipped.append(
            "one-step innovations, other architectures and the range of the law: the program has no single layer, and "
            "its likelihood has no adjustment, without which intervals of narrow networks are too short"
        )
    elif posterior.kind is None:
        name = post.attrs.get("architecture")
        skipped.append(f"one-step innovations and the range of the law: give the layer, architecture={name}")
    elif not posterior.has_alternatives:
        skipped.append("other architectures and sizes: they are tried for a named architecture, one layer for all")
    if not {"posterior_predictive", "log_likelihood"} <= post.children.keys():
        without = "log likelihoods" if "posterior_predictive" in post.children else "predictions"
        skipped.append(f"networks left out and distance from the SDE: there are no {without}")
    elif not predicted:
        skipped.append(
            "networks left out and distance from the SDE: no draw that is left has predictions; select by sel"
        )
    if "sample_stats" not in post.children:
        skipped.append("divergences and energies: there is no group sample_stats")
    if post["posterior"].sizes["chain"] == 1:
        skipped.append("agreement of chains: there is one, and R-hat compares its halves; run two chains or more")
    return tuple(skipped)
