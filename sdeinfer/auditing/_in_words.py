"""An initialisation in words, from its increments, without a recipe."""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float
from scipy import stats

from sdeinfer.auditing._causes import NEAR, SDS, in_digits
from sdeinfer.auditing._recipes import SD

SIGNIFICANT = 0.01
"""Probability below which layers are not alike."""


@dataclasses.dataclass(frozen=True, eq=False)
class Found:
    """The branches of one kind.

    Attributes:
        kind: "attention" or "mlp".
        strengths: g of each layer.
        sd_log: standard deviations of their logarithms.
        units: u, the number of rows of the last matrix.
        gain: w, assumed or found.
    """

    kind: str
    strengths: Float[np.ndarray, " layers"]
    sd_log: Float[np.ndarray, " layers"]
    units: int
    gain: float


def in_words(found: Sequence[Found], *, width: int, sd: float | None = None) -> str:
    """The standard deviations of last matrices, g/√u, as expressions in sizes, and whether layers are alike.

    As "attention branches 0.00408 = 0.02/√24, all layers alike; mlp branches 0.0200 = 0.02: not scaled with depth, all
    layers alike (if first matrices have 0.0200)"; `sd` is that of the model's configuration, or None for 0.02.
    """
    parts = [f"{each.kind} branches {_last_matrix(each, width, SD if sd is None else sd)}" for each in found]
    firsts = dict.fromkeys(in_digits(math.sqrt(each.gain / width)) for each in found)
    return f"{'; '.join(parts)} (if first matrices have {' and '.join(firsts)})"


def _last_matrix(found: Found, width: int, sd: float) -> str:
    logs, weights = np.log(found.strengths) - math.log(found.units) / 2, found.sd_log**-2.0
    mean, error = float(np.average(logs, weights=weights)), float(weights.sum() ** -0.5)
    if _misfit(logs - mean, weights, 1) >= SIGNIFICANT:
        return f"{in_digits(math.exp(mean))}{_expression(mean, error, found, width, sd)}, all layers alike"
    depth = np.log(np.arange(1, len(logs) + 1))
    centred = depth - np.average(depth, weights=weights)
    slope = float((weights * centred * logs).sum() / (weights * centred**2).sum())
    slope_error = float((weights * centred**2).sum() ** -0.5)
    if _misfit(logs - mean - slope * centred, weights, 2) >= SIGNIFICANT:
        first = math.exp(mean + slope * float(centred[0]))
        return f"{in_digits(first)} in the first layer, times (layer + 1)^({slope:.2f} ± {slope_error:.2f})"
    low, high = int(logs.argmin()), int(logs.argmax())
    ends = (f"{in_digits(math.exp(logs[layer]))} in layer {layer}" for layer in (low, high))
    return f"{' to '.join(ends)}: layers differ"


def _misfit(residuals: Float[np.ndarray, " layers"], weights: Float[np.ndarray, " layers"], fitted: int) -> float:
    """The probability of a larger χ²; 1 if nothing is left over."""
    freedom = len(residuals) - fitted
    return float(stats.chi2.sf((weights * residuals**2).sum(), freedom)) if freedom > 0 else 1.0


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
