"""Audits over sizes: how strengths and the stream grow with width and depth, a coordinate check with error bars.

Tests: `tests/auditing/test_audit.py`.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
from scipy import stats

from sdeinfer._files import InputError
from sdeinfer.auditing._audit import recipe_of
from sdeinfer.auditing._books import books_of
from sdeinfer.auditing._recipe import Recipe
from sdeinfer.auditing._tests import Row, rows_of
from sdeinfer.passes._models import made


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Scaling:
    """How strengths and norms grow with width and depth.

    Attributes:
        sizes: one row for each network and quantity: width, layers, log value and its standard deviation; the declared
            log value, if there is a recipe.
        exponents: one row for each quantity and size over which it was measured: exponent, its 95 % interval, its
            standard deviation, and the declared exponent.
        recipe: the declaration, or None.
    """

    sizes: tuple[Mapping[str, Any], ...]
    exponents: tuple[Mapping[str, Any], ...]
    recipe: Recipe | None

    @property
    def wrong(self) -> list[Mapping[str, Any]]:
        """The exponents that differ from the declared ones, at 1 % for all together."""
        known = [row for row in self.exponents if math.isfinite(row["declared"])]
        return [
            row
            for row in known
            if 2 * stats.norm.sf(abs(row["exponent"] - row["declared"]) / row["sd"]) * len(known) < 0.01
        ]

    @property
    def passed(self) -> bool:
        """Whether every exponent is the declared one."""
        return not self.wrong

    @property
    def verdict(self) -> str:
        """The verdict in one sentence."""
        parts = []
        for row in self.wrong or self.exponents:
            declared = "" if math.isnan(row["declared"]) else f" (declared {row['declared']:z.2f})"
            parts.append(f"{row['quantity']} ∝ {row['over']}^{row['exponent']:.3f} ± {row['sd']:.3f}{declared}")
        return f"{'passed' if self.passed else 'failed'}: {', '.join(parts)}"

    def to_frame(self) -> Any:
        """The table of exponents."""
        import pandas as pd

        return pd.DataFrame(list(self.exponents)).set_index(["quantity", "over"])

    def __repr__(self) -> str:
        """The verdict."""
        return self.verdict


def scaling(
    make: Callable[[int, int], Any],
    inputs: Any = None,
    *,
    widths: Iterable[int],
    depths: Iterable[int],
    recipe: str | Recipe | Mapping[str, Any] | None = None,
    seed: int = 0,
) -> Scaling:
    """Measure how strengths of branches and the mean square of the stream grow with width and depth.

    The strength of a writer is c σ √fan_in, with the error of σ̂. Log values of all sizes are fitted by
    a plane in log n and log L, weighted by their precisions; the spread about it widens the intervals if it is larger.

    Arguments:
        make: makes a model, or a function of a seed that makes one, from its width and its number of layers.
        inputs: the input of all models, or a function of the width that returns it; see `audit`.
        widths: the widths.
        depths: the numbers of layers.
        recipe: the declaration; see `audit`.
        seed: seed of the weights; each size has its own, since networks of one seed may have the same first layers.

    Raises:
        InputError: for fewer than two widths and depths together, and as `audit`.
    """
    widths, depths = list(widths), list(depths)
    varied = [name for name, values in (("width", widths), ("layers", depths)) if len(set(values)) > 1]
    if not varied:
        raise InputError("widths: at least two widths, or two depths, are needed")
    rows: list[Mapping[str, Any]] = []
    rule = None
    for number, (width, layers) in enumerate(itertools.product(widths, depths)):
        network = made(make(width, layers), seed + number)
        books = books_of(network, inputs(width) if callable(inputs) else inputs)
        rule = recipe_of(recipe, network)
        size = {"width": width, "layers": layers}
        for kind, group in _writers(rows_of(books.account, books.laws, rule)).items():
            rows.append(size | _strength(books.account, kind, group))
        chain = max(books.account.streams, key=len, default=[])
        if chain:
            growth = chain[-1].sum.square / chain[0].skip.origin.square
            if growth > 0:
                rows.append(size | _row("growth of the stream", math.log(growth)))
    quantities = dict.fromkeys(row["quantity"] for row in rows)
    exponents = []
    for quantity in quantities:
        exponents += _exponents(quantity, [row for row in rows if row["quantity"] == quantity], varied)
    return Scaling(tuple(rows), tuple(exponents), rule)


def _writers(rows: list[Row]) -> dict[str, list[Row]]:
    groups: dict[str, list[Row]] = {}
    for row in rows:
        if row.matrix.last and row.law.sd > 0:
            groups.setdefault(row.matrix.role.removesuffix(" output"), []).append(row)
    return groups


def _strength(account: Any, kind: str, rows: list[Row]) -> dict[str, Any]:
    """Log of c σ √u, common to all layers, and its standard deviation."""
    weights = np.array([row.law.error**-2.0 for row in rows])
    factors = [abs(account.writers[row.matrix.array][0].factor) for row in rows]
    strengths = [row.law.sd * factor * math.sqrt(row.matrix.fan_in) for row, factor in zip(rows, factors, strict=True)]
    logs = np.log(strengths)
    # A declared factor of the branch is in `row.factor`, which is that found over it.
    declared = [
        math.log(strength * row.declared / row.law.sd / abs(row.factor))
        for row, strength in zip(rows, strengths, strict=True)
        if row.declared
    ]
    mean = float(np.mean(declared)) if len(declared) == len(rows) else math.nan
    return _row(f"{kind}.strength", float(weights @ logs / weights.sum()), float(weights.sum() ** -0.5), mean)


def _row(quantity: str, value: float, sd: float = math.nan, declared: float = math.nan) -> dict[str, Any]:
    return {"quantity": quantity, "log_value": value, "sd": sd, "declared": declared}


def _exponents(quantity: str, rows: list[Mapping[str, Any]], varied: list[str]) -> list[dict[str, Any]]:
    """Weighted least squares of log values on the logs of the sizes that vary."""
    design = np.column_stack([np.ones(len(rows)), *([math.log(row[name]) for row in rows] for name in varied)])
    free = len(rows) - design.shape[1]
    sds, values, rule = (np.array([row[name] for row in rows]) for name in ("sd", "log_value", "declared"))
    known = bool(np.isfinite(sds).all())
    if free < 1 and not known:
        return []
    weight = 1 / sds if known else np.ones(len(rows))
    covariance = np.linalg.inv((design * weight[:, None] ** 2).T @ design)
    fit = covariance @ (design.T * weight**2)
    exponents, declared = fit @ values, fit @ rule
    spread = np.square(weight * (values - design @ exponents)).sum() / free if free > 0 else 1.0
    sd = np.sqrt(np.diagonal(covariance) * (max(spread, 1.0) if known else spread))
    law = stats.norm if known else stats.t(free)
    low, high = exponents + np.outer(law.interval(0.95), sd)
    columns = {"exponent": exponents, "low": low, "high": high, "sd": sd, "declared": declared}
    return [
        {"quantity": quantity, "over": size, **{name: column[k] for name, column in columns.items()}}
        for k, size in enumerate(varied, 1)
    ]
