"""Verdicts with advice, in words, from what was measured of covariances and their layers."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from sdeinfer.diagnostics._alternatives import Alternative
from sdeinfer.diagnostics._consequences import SCATTER
from sdeinfer.diagnostics._directions import DIRECTIONS
from sdeinfer.diagnostics._innovations import OMISSIONS, WIDTH
from sdeinfer.diagnostics._networks import SharedNoise
from sdeinfer.diagnostics._predictive import Predictions
from sdeinfer.diagnostics._range import Range
from sdeinfer.diagnostics._sampler import CONTRACTED
from sdeinfer.diagnostics._thresholds import (
    BEYOND,
    CONTRACTION,
    EFFECT,
    EVIDENCE,
    EXCLUDED,
    FEWEST_USED,
    FLOORS,
    LEAST_USED,
    LEVEL,
    MANY,
    MANY_LEFT_OUT,
    MOVE,
    SCATTER_RATIO,
    SHARED,
    SHARED_LEVEL,
    SPREAD,
)
from sdeinfer.diagnostics._verdict import IN_RANGE, THEORY, Verdict, at_least, at_most
from sdeinfer.layers import AbstractLayer, kind_in_words
from sdeinfer.layers._templates import call_of, sizes_in_words

OUT_OF_RANGE = " out of range, probability"

DISTANCE = "distance from the SDE, floors"

ALL_EXPLODE = "every prediction explodes before the last layer, as no network does: see the priors, and the range"


def of_shared_noise(found: SharedNoise | None, *, seen: bool) -> list[Verdict]:
    """The verdict on the independence of networks."""
    if found is None and not seen:
        return []
    correlation = found.correlation if found is not None and found.p < SHARED_LEVEL else 0.0
    advice = (
        "networks share weights, as prompts of one network do, and are counted as independent ones: give the prompts a "
        "dimension of their own, shape (networks, layers, prompts, tokens, width)"
    )
    return [at_most("calibrated", "correlation between networks", 1.0 if seen else correlation, SHARED, advice)]


def of_layers(
    misfits: pd.DataFrame,
    others: Sequence[Alternative],
    kind: AbstractLayer,
    sd: Mapping[Any, float],
    *,
    law: str,
    networks: int,
) -> tuple[list[Verdict], list[str], list[str]]:
    """Verdicts on the layers against the law, notes, and the sizes that the data do not confirm."""
    large, (small, notes) = _of_large_misfits(misfits, kind), _of_small_misfits(misfits, law, networks)
    if not others:
        return large + small, notes, []
    verdict, more, assumed = _of_alternatives(others, kind, sd)
    return [*large, verdict, *small], notes + more, assumed


def _of_large_misfits(table: pd.DataFrame, kind: AbstractLayer) -> list[Verdict]:
    """Verdicts on what the limit's law leaves out, and on layers that are clearly of something else."""
    verdicts = []
    if WIDTH in table.index:
        largest, moved = _largest(table.loc[[WIDTH]])
        advice = (
            f"the limit's law leaves out what moves {moved} by {largest:.2g} posterior sds: fit by law='finite-width'"
        )
        verdicts.append(at_most(THEORY, "finite width, posterior sds", largest, MOVE, advice))
    p, large = table["p"].to_dict(), _seen(table)["effect"].abs().to_dict()
    worst = min([name for name in large if large[name] > EFFECT], key=lambda name: p[name], default="")
    what = f"not layers of a shaped {kind.name}, by {worst}: {DIRECTIONS[worst]}" if worst else ""
    largest = large[worst] if worst else max(large.values(), default=0.0)
    return [*verdicts, at_most("calibrated", "misfit of the layers", largest, EFFECT, what)]


def _of_small_misfits(table: pd.DataFrame, law: str, networks: int) -> tuple[list[Verdict], list[str]]:
    """Verdicts on misfits that move a parameter, and on the scatter of networks; notes on those that do not matter."""
    seen, notes, what = _seen(table), [], ""
    largest, moved = _largest(seen)
    if moved:
        worst = str(seen[moved].abs().idxmax())
        effect = abs(float(table["effect"].to_dict()[worst]))
        what = f"{worst}: a misfit of {effect:.1%} of an increment's sd moves {moved} by {largest:.2g} posterior sds; "
        if largest <= MOVE:
            notes.append(what + "it is seen and does not matter")
        remedy = "fit by law='finite-width'" if law == "limit" else "check the architecture and its sizes"
        what += f"{DIRECTIONS[worst]}: {remedy}"
    verdicts = [at_most("calibrated", "move by the misfit, posterior sds", largest, MOVE, what)]
    if SCATTER in table.index:
        largest, moved = _largest(table.loc[[SCATTER]])
        advice = (
            f"the networks scatter more than the posterior of {moved} by this factor: layers of a network are not "
            "independent; fit fewer layers, as by `data.isel(layer=slice(2))`"
        )
        bound = SCATTER_RATIO * (1 + 2 / math.sqrt(2 * networks))
        verdicts.append(at_most("calibrated", "scatter of networks", largest, bound, advice))
    return verdicts, notes


def _seen(table: pd.DataFrame) -> pd.DataFrame:
    """The directions with a significant misfit."""
    tests = table.drop(index=[*OMISSIONS, SCATTER], errors="ignore")
    return tests.loc[[name for name, p in tests["p"].to_dict().items() if p * len(tests) < LEVEL]]


def _largest(table: pd.DataFrame) -> tuple[float, str]:
    """The largest move, and the parameter that it moves; 0 and no name if there is none."""
    of_each = table.drop(columns=["effect", "z", "p"]).abs().max()
    if of_each.isna().all():
        return 0.0, ""
    return float(of_each.max()), str(of_each.idxmax())


def _of_alternatives(
    found: Sequence[Alternative], kind: AbstractLayer, sd: Mapping[Any, float]
) -> tuple[Verdict, list[str], list[str]]:
    """The verdict on other architectures, notes, and the sizes that the data do not confirm."""
    own = next(each for each in found if each.architecture == kind)
    best, advice, notes, assumed = 0.0, "", [], []
    own_mask = kind.sizes.get("pattern")
    for each in found:
        shared = [name for name in each.values if name in own.values and sd.get(name, 0.0) > 0]
        moves = {name: abs(each.values[name] - own.values[name]) / sd[name] for name in shared}
        # Another mask changes what later tokens do, also where the parameters are the same.
        other_mask = each.architecture.name == kind.name and each.architecture.sizes.get("pattern") != own_mask
        masked = each.evidence > EVIDENCE and other_mask
        if each.evidence < -EVIDENCE or (max(moves.values(), default=0.0) <= MOVE and not masked):
            continue
        name = max(shared, key=lambda name: moves[name])
        what = f"{kind_in_words(each.architecture)} ({name} {each.values[name]:.3g} instead of {own.values[name]:.3g})"
        if each.evidence <= EVIDENCE:
            notes.append(f"these data do not exclude {what}")
            assumed += different_sizes(kind, each.architecture)
        elif each.evidence > best:
            best = each.evidence
            remedy = f"check the network's code, or fit by architecture={call_of(each.architecture)}"
            advice = f"{what} fits better, by a log evidence of {best:.2g}: {remedy}"
    verdict = at_most("architecture", "evidence for another architecture", best, EVIDENCE, advice)
    return verdict, notes, list(dict.fromkeys(assumed))


def different_sizes(kind: AbstractLayer, other: AbstractLayer) -> list[str]:
    """The sizes of an architecture that differ from those of another of the same name, in words."""
    if kind.name != other.name:
        return []
    return [words for size, words in sizes_in_words(kind).items() if kind.sizes[size] != other.sizes[size]]


def of_range(found: Range, kind: AbstractLayer, attrs: Mapping[Any, Any]) -> list[Verdict]:
    """Verdicts on the range of the law."""
    smaller = "the law expands the softmax: lower largest_logit, use smaller tokens or wider networks"
    spread = at_most(THEORY, "logit spread, mean", found.spread, SPREAD[attrs.get("law", "limit")], smaller)
    outside = (
        "nearly all transitions start outside the range of the law: tokens are too large for τ0, networks too narrow, "
        "or the temperature is not τ0 √(n n_k)"
    )
    if "out_of_range" in attrs:
        return [at_least(THEORY, IN_RANGE, 0.0, LEAST_USED, str(attrs["out_of_range"])), spread]
    if found.exact is None:
        return [at_least(THEORY, IN_RANGE, found.share, FEWEST_USED, outside), spread]
    z = float(np.max(np.abs(found.exact["z"])))
    advice = f"{outside}, and they are not those of a shaped {kind.name} with these parameters"
    return [spread, at_most("calibrated", "layers out of range, sds", z, EXCLUDED, advice)]


def of_kept(attrs: Mapping[Any, Any]) -> list[str]:
    """Notes on networks of data in chunks that were damaged or are not in the posterior, and on layers left out."""
    notes = []
    if attrs.get("kept_networks", 0) < attrs.get("networks", 0):
        notes.append(f"layers and predictions are checked on {attrs['kept_networks']} of {attrs['networks']} networks")
    if "damaged_networks" in attrs:
        notes.append(f"{attrs['damaged_networks']} damaged networks are left out")
    left_out = float(attrs.get("left_out", 0.0))
    if left_out > MANY_LEFT_OUT:
        notes.append(f"{left_out:.1%} of the transitions start outside the range of the law, and are left out")
    return notes


def of_identification(table: pd.DataFrame) -> list[Verdict]:
    """Verdicts on what the data identify, from the table of `identification`."""
    verdicts = []
    for name in table.index:
        advice = f"the data say little of {name}"
        if "networks" in table:
            times = float(table.loc[name, "networks"])
            two_digits = f"{float(f'{times:.2g}'):,g}"  # without an exponent
            more = f"to know it to 10 % takes about {two_digits} times as many" if times < MANY else "nor would more"
            advice += f"; {more} networks like these, or other tokens"
        contraction = table.loc[name, ["contraction", "expected"] if "expected" in table else ["contraction"]].min()
        verdicts.append(at_least("identified", f"{name}{CONTRACTED}", contraction, CONTRACTION, advice))
    return verdicts


def of_unknown_range(found: Range, name: str) -> Verdict:
    """Whether the law holds at all values of a τ0 that the data do not identify.

    Where the softmax chooses one token, the noise of attention is up to 2 − 1/m times that of the law: γ absorbs it.
    """
    advice = (
        f"the data do not exclude {name} below {found.limit:.2g}, where the softmax leaves the law's range and "
        f"gamma is smaller: give {name} a narrower prior, or take smaller tokens or wider networks"
    )
    return at_most("identified", f"{name}{OUT_OF_RANGE}", found.beyond, BEYOND, advice)


def of_predictions(found: Predictions) -> list[Verdict]:
    """Verdicts on networks after the last layer."""
    if found.exploded:
        return [at_most(THEORY, DISTANCE, np.inf, FLOORS, ALL_EXPLODE)]
    verdicts, each, distances = [], found.p_values, found.distances
    if each is not None:
        advice = f"{each.idxmin()} after the last layer varies between networks otherwise than the SDE predicts"
        p = min(1.0, each.min() * len(each))
        verdicts.append(at_least("calibrated", "networks left out, p", p, LEVEL, advice))
    ratio = (distances["wasserstein"] / distances["floor"]).fillna(0.0)  # 0/0 where all are equal
    far = distances.loc[ratio.idxmax()]
    advice = (
        f"{ratio.idxmax()} after the last layer is {far['wasserstein']:.2g} sds from the SDE, where samples of one law "
        f"would be {far['floor']:.2g}: another architecture, or networks too narrow for the limit"
    )
    return [*verdicts, at_most(THEORY, DISTANCE, ratio.max(), FLOORS, advice)]
