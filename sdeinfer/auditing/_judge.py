"""Observed branches against declared blocks: estimates, and tests of the law."""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr
from jaxtyping import Float
from scipy import stats

from sdeinfer.auditing._causes import NEAR, SDS, causes, in_digits
from sdeinfer.auditing._estimates import IDENTIFIED, Estimate, Likelihood, shape_estimate, strength_estimate
from sdeinfer.auditing._observe import Seen
from sdeinfer.auditing._recipe import Recipe, matrices
from sdeinfer.auditing._recipes import SD
from sdeinfer.auditing._result import Audit
from sdeinfer.blocks import Block
from sdeinfer.blocks._coefficients import branch_coefficients, labelled
from sdeinfer.blocks._information import adjusted_coefficients
from sdeinfer.blocks._order import BlockOrder
from sdeinfer.diagnostics import Verdict
from sdeinfer.diagnostics._branch_tests import OF_OTHERS, BranchTests
from sdeinfer.diagnostics._dependence import dependence_of_pairs
from sdeinfer.layers import Stack

ALIKE = 1.05
"""Largest acceptable ratio of a significant strength of a block to the declared one, or its inverse."""

SIGNIFICANT = 0.002
"""False-alarm probability of the strengths of all blocks together."""

COPIED = 0.5
"""Share of an increment in that of the same block of another layer, above which their weights are called the same."""


@dataclasses.dataclass(frozen=True)
class _OfBlock:
    """Estimates of a block, common to all layers."""

    block: Block
    strength: Estimate
    shape: Estimate
    likelihood: Likelihood


def log_densities(data: xr.Dataset, architecture: Stack) -> Float[np.ndarray, "networks branches grid 4"]:
    """All that a judgement needs of the law of the blocks; see `blocks.adjusted_coefficients`."""
    order = BlockOrder.of_data(architecture, data)
    return adjusted_coefficients(branch_coefficients(data, order), data, order)


def judge(
    seen: Seen,
    architecture: Stack,
    coefficients: Float[np.ndarray, "networks branches grid 4"],
    recipe: Recipe | None,
    *,
    name: str,
    sd: float | None = None,
) -> Audit:
    """Compare observed branches with the blocks of one layer; strengths are judged if a recipe declares them."""
    data = seen.data
    order = BlockOrder.of_data(architecture, data)
    at_declared = coefficients[:, :, coefficients.shape[2] // 2]
    found = _estimates(order, coefficients, at_declared)
    tests = BranchTests(
        data,
        labelled(coefficients, order, data),
        values={each.strength.name: np.asarray(each.strength.value) for each in found},
        declared=order.strengths | order.shapes,
        normed=order.normed,
    )
    branches = _by_branch(data, order, at_declared).assign(p=tests.of_each())
    verdicts = [_of_shape(verdict, found, recipe) for verdict in tests.verdicts()]
    if recipe is not None:
        verdicts += [_of_strength(each.strength, recipe, len(found)) for each in found]
    sizes = {"width": int(data["width"].values[0]), "layers": order.layers}
    return Audit(
        name=name,
        recipe=recipe,
        strengths=tuple(each.strength for each in found),
        shapes=tuple(each.shape for each in found if each.shape.sd < IDENTIFIED),
        assumed=tuple(each.shape.name for each in found if each.shape.sd >= IDENTIFIED),
        branches=branches,
        verdicts=tuple(verdicts),
        causes=_copies(data, order, verdicts) | (_causes(found, verdicts, recipe, sizes) if recipe else {}),
        words=_words(found, branches, sizes, sd),
        architecture=architecture,
        data=data,
        stream=seen.stream,
    )


def _estimates(
    order: BlockOrder,
    coefficients: Float[np.ndarray, "networks branches grid 4"],
    at_declared: Float[np.ndarray, "networks branches 4"],
) -> list[_OfBlock]:
    found, part = [], np.asarray(order.part)
    shapes = list(order.shapes.items())
    for number, (name, block) in enumerate(order.named()):
        own, declared = coefficients[:, part == number], float(block.strength)
        strength = strength_estimate(f"{name}.strength", declared, at_declared[:, part == number])
        likelihood = Likelihood(declared, own.sum((0, 1)))
        found.append(_OfBlock(block, strength, shape_estimate(*shapes[number], own), likelihood))
    return found


def _by_branch(
    data: xr.Dataset, order: BlockOrder, at_declared: Float[np.ndarray, "networks branches 4"]
) -> pd.DataFrame:
    rows = []
    for branch, number in enumerate(order.part):
        block = order.names[number]
        name = f"{block}.strength"
        found = strength_estimate(name, order.strengths[name], at_declared[:, branch])
        place = {"branch": str(data["name"].values[branch]), "block": block, "layer": branch // len(order.names)}
        rows.append({**place, **found.row})
    return pd.DataFrame(rows).set_index("branch")


def _of_strength(found: Estimate, recipe: Recipe, count: int) -> Verdict:
    """The strength of a block against the declared one."""
    value = float(np.exp(abs(found.log_ratio))) if found.p < SIGNIFICANT / count else 1.0
    advice = f"{found.name} is {found} {_times(recipe)}"
    return Verdict("declared", f"ratio of {found.name} to the declared one", value, ALIKE, value <= ALIKE, advice)


def _of_shape(verdict: Verdict, found: list[_OfBlock], recipe: Recipe | None) -> Verdict:
    """A test of a gain or temperature in words of an audit; another test as it is."""
    for each in found:
        if verdict.name == f"ratio of {each.shape.name} to the assumed one":
            advice = f"{each.shape.name} is {each.shape} {_times(recipe)}"
            return dataclasses.replace(verdict, topic="declared", advice=advice)
    return verdict


def _times(recipe: Recipe | None) -> str:
    return "times the configured one" if recipe is None else f"times what {recipe.name} declares"


def _causes(
    found: list[_OfBlock], verdicts: list[Verdict], recipe: Recipe, sizes: dict[str, int]
) -> dict[str, tuple[str, ...]]:
    """The mistakes that explain the parameters of each block that failed."""
    sentences = {}
    for verdict in verdicts:
        name = verdict.name.removeprefix("ratio of ").partition(" to the ")[0]
        for each in found:
            if not verdict.passed and name in (each.strength.name, each.shape.name):
                likely = causes(each.likelihood, block=each.block, recipe=recipe, **sizes)
                sentences |= {verdict.name: tuple(cause.sentence for cause in likely)} if likely else {}
    return sentences


def _copies(data: xr.Dataset, order: BlockOrder, verdicts: list[Verdict]) -> dict[str, tuple[str, ...]]:
    """The layers of each block that have the same weights, if increments are correlated."""
    failed = next((each.name for each in verdicts if each.name == OF_OTHERS and not each.passed), None)
    if failed is None:
        return {}
    pairs, shares, _ = dependence_of_pairs(data)
    same: dict[int, set[int]] = {}
    for (b, c), share in zip(pairs, shares, strict=True):
        if share > COPIED and order.part[b] == order.part[c]:
            same.setdefault(order.part[b], set()).update((b // len(order.blocks), c // len(order.blocks)))
    sentences = [
        f"{order.names[part]} branches of layers {', '.join(map(str, sorted(layers)))} have the same weights"
        for part, layers in same.items()
    ]
    return {failed: (*sentences, "or the network was trained")} if same else {}


def _words(found: list[_OfBlock], branches: pd.DataFrame, sizes: dict[str, int], sd: float | None) -> str:
    """The standard deviations of the last matrices, in words."""
    kinds = []
    for each in found:
        block = each.strength.name.rpartition(".")[0]
        own = branches.loc[branches["block"] == block]
        *_, last = matrices(each.block, **sizes).values()
        strengths, sds = own[["strength", "sd"]].to_numpy().T
        kinds.append(Found(block, strengths, sds, last.fan_in, float(getattr(each.block.branch, "gain"))))  # noqa: B009
    return in_words(kinds, width=sizes["width"], sd=sd)


@dataclasses.dataclass(frozen=True, eq=False)
class Found:
    """The branches of one kind: strengths g of layers, with the sd of their logs; rows u of last matrices; the gain."""

    kind: str
    strengths: Float[np.ndarray, " layers"]
    sd_log: Float[np.ndarray, " layers"]
    units: int
    gain: float


def in_words(found: Sequence[Found], *, width: int, sd: float | None = None) -> str:
    """The standard deviations of last matrices, g/√u, as expressions in sizes, and whether layers are alike.

    As "attention branches 0.00408 = 0.02/√24, all layers alike (if first matrices have 0.0200)".
    """
    parts = [f"{each.kind} branches {_last_matrix(each, width, SD if sd is None else sd)}" for each in found]
    firsts = dict.fromkeys(in_digits(math.sqrt(each.gain / width)) for each in found)
    return f"{'; '.join(parts)} (if first matrices have {' and '.join(firsts)})"


def _last_matrix(found: Found, width: int, sd: float) -> str:
    logs, weights = np.log(found.strengths) - math.log(found.units) / 2, found.sd_log**-2.0
    mean, error = float(np.average(logs, weights=weights)), float(weights.sum() ** -0.5)
    if _random(logs - mean, weights, 1):
        return f"{in_digits(math.exp(mean))}{_expression(mean, error, found, width, sd)}, all layers alike"
    depth = np.log(np.arange(1, len(logs) + 1))
    centred = depth - np.average(depth, weights=weights)
    slope = float((weights * centred * logs).sum() / (weights * centred**2).sum())
    slope_error = float((weights * centred**2).sum() ** -0.5)
    if _random(logs - mean - slope * centred, weights, 2):
        first = math.exp(mean + slope * float(centred[0]))
        return f"{in_digits(first)} in the first layer, times (layer + 1)^({slope:.2f} ± {slope_error:.2f})"
    low, high = int(logs.argmin()), int(logs.argmax())
    ends = (f"{in_digits(math.exp(logs[layer]))} in layer {layer}" for layer in (low, high))
    return f"{' to '.join(ends)}: layers differ"


def _random(residuals: Float[np.ndarray, " layers"], weights: Float[np.ndarray, " layers"], fitted: int) -> bool:
    """Whether χ² of what is left over has a p-value of 1 % at least."""
    freedom = len(residuals) - fitted
    return freedom == 0 or bool(stats.chi2.sf((weights * residuals**2).sum(), freedom) >= 0.01)


def _expression(log_sd: float, error: float, found: Found, width: int, sd: float) -> str:
    """The first expression in sizes within three standard deviations and 3 %."""
    layers, u = len(found.strengths), found.units
    known: dict[str, Any] = {
        f" = {sd:g}: not scaled with depth": sd,
        f" = {sd:g}/√{2 * layers}": sd / math.sqrt(2 * layers),
        f" = {sd:g}/√{layers}": sd / math.sqrt(layers),
        f" = {sd:g}/{2 * layers}": sd / (2 * layers),
    }
    for (name, value), (suffix, scale) in itertools.product(
        {
            f"1/√(3 · {u}), the default of torch.nn.Linear": (3 * u) ** -0.5,
            f"1/√{u}, of fan_in": u**-0.5,
            f"√(2/({u} + {width})), Xavier": math.sqrt(2 / (u + width)),
            f"√(2/{u}), Kaiming": math.sqrt(2 / u),
        }.items(),
        ((": not scaled with depth", 1.0), (f", over √{2 * layers}", 1 / math.sqrt(2 * layers))),
    ):
        known[f" = {name}{suffix}"] = value * scale
    near = min(SDS * error, NEAR)
    return next((text for text, value in known.items() if abs(log_sd - math.log(value)) <= near), "")
