"""Verdicts on observed layers: misfits of the law by their consequences, and other architectures."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
import xarray as xr

from sdeinfer.diagnostics._alternatives import EVIDENCE, Alternative, alternatives, different_sizes
from sdeinfer.diagnostics._consequences import SCATTER, consequences_of
from sdeinfer.diagnostics._innovations import DIRECTIONS, OMISSIONS, WIDTH, sums_of
from sdeinfer.diagnostics._verdict import THEORY, Verdict, at_most
from sdeinfer.layers import Architecture

LEVEL = 0.01
"""False-alarm probability of each of the two tests of calibration."""

MOVE = 1.0
"""Largest acceptable move of a parameter by a misfit, in posterior standard deviations."""

EFFECT = 0.2
"""Root mean square of a misfit, in standard deviations of a layer's increments, above which layers are of something
else, whether or not it moves a parameter. Shaped layers at the edge of the law's range are below 0.1."""

SCATTER_RATIO = 1.5
"""Largest acceptable ratio of a standard deviation by the scatter of networks to that of the posterior."""


def layers_against_law(
    post: xr.DataTree, data: xr.Dataset, kind: Architecture | None, sd: Mapping[Any, float]
) -> tuple[list[Verdict], list[str], list[str]]:
    """Verdicts on the layers against the law, notes, and the sizes that the data do not confirm.

    Arguments:
        post: the result of `fit`.
        data: the data that were fitted.
        kind: the kind of layer, if it is known.
        sd: posterior standard deviations of the parameters.
    """
    if kind is None or not post.attrs.get("every_layer"):
        return [], [], []
    sums = sums_of(post, data, kind)
    table = consequences_of(sums, post, kind)
    large, (small, notes) = _of_large_misfits(table, kind), _of_small_misfits(table, post)
    if not has_alternatives(post, kind):
        return large + small, notes, []
    others, more, assumed = _of_alternatives(alternatives(post, data, kind, dispersion=sums.dispersion()), kind, sd)
    return large + others + small, notes + more, assumed


def has_alternatives(post: xr.DataTree, kind: Architecture) -> bool:
    """Whether other architectures are tried: for a named architecture with one layer for all networks."""
    return kind.is_named and post.attrs.get("model") == "full_path"


def _seen(table: pd.DataFrame) -> pd.DataFrame:
    """The directions with a significant misfit."""
    tests = table.drop(index=[*OMISSIONS, SCATTER], errors="ignore")
    return tests.loc[[name for name, p in tests["p"].to_dict().items() if p * len(tests) < LEVEL]]


def _of_large_misfits(table: pd.DataFrame, kind: Architecture) -> list[Verdict]:
    """Verdicts on what the limit's law leaves out, and on layers that are clearly of something else."""
    verdicts, moves = [], _moves(table)
    if WIDTH in moves.index:
        largest, moved = _largest(moves.loc[[WIDTH]])
        advice = (
            f"the limit's law leaves out what moves {moved} by {largest:.2g} posterior sds: fit by law='finite-width'"
        )
        verdicts.append(at_most(THEORY, "finite width, posterior sds", largest, MOVE, advice))
    large = {name: abs(each["effect"]) for name, each in _seen(table).to_dict("index").items()}
    p = table["p"].to_dict()
    worst = min([name for name in large if large[name] > EFFECT], key=lambda name: p[name], default="")
    what = f"not layers of a shaped {kind.name}, by {worst}: {DIRECTIONS.get(str(worst), '')}"
    largest = large[worst] if worst else max(large.values(), default=0.0)
    return [*verdicts, at_most("calibrated", "misfit of the layers", largest, EFFECT, what)]


def _of_small_misfits(table: pd.DataFrame, post: xr.DataTree) -> tuple[list[Verdict], list[str]]:
    """Verdicts on misfits that move a parameter, and on the scatter of networks; notes on those that do not matter."""
    seen, notes, what = _seen(table), [], ""
    largest, moved = _largest(_moves(seen))
    if moved:
        worst = str(_moves(seen)[moved].idxmax())
        effect = abs(float(table["effect"].to_dict()[worst]))
        what = f"{worst}: a misfit of {effect:.1%} of an increment's sd moves {moved} by {largest:.2g} posterior sds; "
        if largest <= MOVE:
            notes.append(what + "it is seen and does not matter")
        limit = post.attrs.get("law", "limit") == "limit"
        remedy = "fit by law='finite-width'" if limit else "check the architecture and its sizes"
        what += f"{DIRECTIONS[worst]}: {remedy}"
    verdicts = [at_most("calibrated", "move by the misfit, posterior sds", largest, MOVE, what)]
    if SCATTER in table.index:
        largest, moved = _largest(_moves(table.loc[[SCATTER]]))
        advice = (
            f"the networks scatter more than the posterior of {moved} by this factor: layers of a network are not "
            "independent; fit fewer layers, as by `data.isel(layer=slice(2))`"
        )
        bound = SCATTER_RATIO * (1 + 2 / math.sqrt(2 * post["observed_data"].sizes["network"]))
        verdicts.append(at_most("calibrated", "scatter of networks", largest, bound, advice))
    return verdicts, notes


def _moves(table: pd.DataFrame) -> pd.DataFrame:
    return table.drop(columns=["effect", "z", "p"]).abs()


def _largest(moves: pd.DataFrame) -> tuple[float, str]:
    """The largest move, and the parameter that it moves; 0 and no name if there is none."""
    if moves.empty:
        return 0.0, ""
    of_each = moves.max()
    return float(of_each.max()), str(of_each.idxmax())


def _of_alternatives(
    found: Sequence[Alternative], kind: Architecture, sd: Mapping[Any, float]
) -> tuple[list[Verdict], list[str], list[str]]:
    own = next(each for each in found if each.architecture == kind)
    best, advice, notes, assumed = 0.0, "", [], []
    for each in found:
        shared = [name for name in each.values if name in own.values and sd.get(name, 0.0) > 0]
        moves = {name: abs(each.values[name] - own.values[name]) / sd[name] for name in shared}
        if each.evidence < -EVIDENCE or max(moves.values(), default=0.0) <= MOVE:
            continue
        name = max(shared, key=lambda name: moves[name])
        what = f"{str(each.architecture)} ({name} {each.values[name]:.3g} instead of {own.values[name]:.3g})"
        if each.evidence <= EVIDENCE:
            notes.append(f"these data do not exclude {what}")
            assumed += different_sizes(kind, each.architecture)
        elif each.evidence > best:
            best, remedy = (
                each.evidence,
                f"check the network's code, or fit by architecture={repr(each.architecture)}",
            )
            advice = f"{what} fits better, by a log evidence of {best:.2g}: {remedy}"
    verdict = at_most("architecture", "evidence for another architecture", best, EVIDENCE, advice)
    return [verdict], notes, list(dict.fromkeys(assumed))
