"""Tests of covariances: do the layers obey the fitted law, and what do the data identify?"""

import dataclasses

from sdeinfer.diagnostics._advice import (
    of_identification,
    of_kept,
    of_layers,
    of_predictions,
    of_range,
    of_shared_noise,
    of_unknown_range,
)
from sdeinfer.diagnostics._alternatives import alternatives_of
from sdeinfer.diagnostics._conflict import of_conflict
from sdeinfer.diagnostics._consequences import consequences_of
from sdeinfer.diagnostics._fitted import require_groups
from sdeinfer.diagnostics._identification import identification_of
from sdeinfer.diagnostics._innovations import Sums, sums_of
from sdeinfer.diagnostics._networks import shared_noise
from sdeinfer.diagnostics._own import AbstractFitted, OwnTests
from sdeinfer.diagnostics._posterior import Posterior, has_prior
from sdeinfer.diagnostics._predictive import predictions_of
from sdeinfer.diagnostics._range import range_of
from sdeinfer.diagnostics._verdict import Verdict
from sdeinfer.observation._dataset import SHARED_WEIGHTS


@dataclasses.dataclass(frozen=True, eq=False)
class FittedCovariances(AbstractFitted):
    """A fit of covariances.

    Attributes:
        posterior: what is derived from it.
    """

    posterior: Posterior

    def tests(self) -> OwnTests:
        """The layers against the law and other architectures; the range of the law; networks left out."""
        posterior, tree, kind = self.posterior, self.tree, self.posterior.kind
        if kind is not None:
            require_groups(tree, "layers")
        sums = sums_of(posterior) if kind is not None and posterior.every_layer else None
        in_range, predicted = range_of(posterior), predictions_of(tree)
        verdicts, notes, assumed = _of_law(posterior, sums)
        beyond = {}
        if kind is not None and in_range is not None:
            verdicts += of_range(in_range, kind, tree.attrs)
            beyond = {name: of_unknown_range(in_range, name) for name in in_range.temperatures}
        notes += of_kept(tree.attrs)
        last = [] if predicted is None else of_predictions(predicted)
        if posterior.every_layer:
            notes += [f"{each.name} {each.value:.2g}: {each.advice}" for each in last if not each.passed]
            last = []
        contractions = []
        if has_prior(tree):
            contractions = of_identification(identification_of(posterior, None if sums is None else sums.information))
        skipped = _skipped(posterior, predicted=predicted is not None)
        return OwnTests(verdicts, contractions, notes, assumed, beyond, tuple(last), skipped)


def _of_law(posterior: Posterior, sums: Sums | None) -> tuple[list[Verdict], list[str], list[str]]:
    """Verdicts on priors, networks and layers, causes before consequences; notes; and what is assumed."""
    seen = SHARED_WEIGHTS in posterior.data.attrs
    if sums is None:
        return of_shared_noise(None, seen=seen), [], []
    others = alternatives_of(posterior, sums.dispersion) if posterior.has_alternatives else []
    verdicts, notes, assumed = of_layers(
        consequences_of(sums, posterior),
        others,
        posterior.known_kind,
        posterior.table["sd"].to_dict(),
        law=posterior.law,
        networks=posterior.data.sizes["network"],
    )
    first = of_conflict(sums, posterior) + of_shared_noise(shared_noise(posterior), seen=seen)
    return first + verdicts, notes, assumed


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
    return tuple(skipped)
