"""Exponents of strengths and norms over width and depth: a coordinate check with error bars."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax.random as jr
import numpy as np
import pandas as pd
from jaxtyping import PRNGKeyArray
from scipy import stats
from tqdm import tqdm

from sdeinfer._files import InputError
from sdeinfer.auditing._audit import audit
from sdeinfer.auditing._describe import drawn
from sdeinfer.auditing._estimates import PROBABILITY
from sdeinfer.auditing._find import find
from sdeinfer.auditing._gradients import gradient_growth
from sdeinfer.auditing._inputs import default_inputs
from sdeinfer.auditing._recipe import Recipe
from sdeinfer.auditing._result import Audit

OVER = ("width", "layers")
"""Sizes over which exponents are estimated."""

LEVEL = 0.01
"""False-alarm probability of all exponents together."""

_UNKNOWN = {"sd": math.nan, "declared": math.nan}


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Scaling:
    """How strengths and norms grow with width and depth.

    Attributes:
        sizes: one row for each network and quantity: width, layers, log value and its standard deviation; the declared
            log value, if there is a recipe.
        exponents: one row for each quantity and size over which it was measured: exponent, its 95 % interval, its
            standard deviation, and the declared exponent.
        recipe: what was declared, or None.
    """

    sizes: pd.DataFrame
    exponents: pd.DataFrame
    recipe: Recipe | None

    @property
    def wrong(self) -> pd.DataFrame:
        """The exponents that differ from the declared ones."""
        known = self.exponents.dropna(subset="declared")
        z = np.abs(known["exponent"].to_numpy() - known["declared"].to_numpy()) / known["sd"].to_numpy()
        return known.iloc[np.flatnonzero(2 * stats.norm.sf(z) * len(known) < LEVEL)]

    @property
    def passed(self) -> bool:
        """Whether every exponent is the declared one."""
        return len(self.wrong) == 0

    @property
    def verdict(self) -> str:
        """The verdict in one sentence."""
        rows = self.exponents if self.passed else self.wrong
        parts = []
        for row in rows.reset_index().to_dict("records"):
            declared = "" if math.isnan(row["declared"]) else f" (declared {row['declared']:z.2f})"
            of_size = f"{row['over']}^{row['exponent']:.3f} ± {row['sd']:.3f}"
            parts.append(f"{row['quantity']} ∝ {of_size}{declared}")
        return f"{'passed' if self.passed else 'failed'}: {', '.join(parts)}"

    def to_frame(self) -> pd.DataFrame:
        """The table of exponents."""
        return self.exponents

    def __repr__(self) -> str:
        """The verdict."""
        return self.verdict


def scaling(
    make: Callable[[int, int], Any],
    inputs: Any = None,
    *,
    widths: Iterable[int],
    depths: Iterable[int],
    recipe: str | Recipe | Mapping[str, float] | None = None,
    gradients: bool = False,
    progress: bool = False,
    seed: int = 0,
    key: PRNGKeyArray | None = None,
    **settings: Any,
) -> Scaling:
    """Measure how strengths of branches and norms of the residual stream grow with width and depth.

    Log strengths of all sizes are fitted by a plane in log n and log L, weighted by their posterior precisions; the
    spread about it widens the intervals if it is larger. Norms of the stream have no known error, and need at least
    two sizes more than exponents.

    Arguments:
        make: makes a model, or a function that draws one, from its width and its number of layers.
        inputs: the input of all models, or a function of the width that returns it; see `audit`.
        widths: the widths.
        depths: the numbers of layers.
        recipe: what is declared; see `audit`.
        gradients: measure the growth of gradients from the last to the first layer, too; for PyTorch modules.
        progress: show a progress bar.
        seed: seed of the weights; each size has its own, since networks of one seed may have the same first layers.
        key: PRNG key of the weights, see `audit`.
        settings: other arguments of `audit`.

    Raises:
        InputError: for fewer than two widths and depths together, and as `audit`.
    """
    widths, depths = list(widths), list(depths)
    varied = [name for name, values in zip(OVER, (widths, depths), strict=True) if len(set(values)) > 1]
    if not varied:
        raise InputError("widths: at least two widths, or two depths, are needed")
    rows: list[dict[str, Any]] = []
    rule = None
    pairs = list(itertools.product(widths, depths))
    for number, (width, layers) in enumerate(tqdm(pairs, desc="networks", disable=not progress)):
        given = inputs(width) if callable(inputs) else inputs
        model = make(width, layers)
        own = {"seed": seed + number, "key": None if key is None else jr.fold_in(key, number)}
        found = audit(model, given, recipe=recipe, **own, **settings)
        rule = found.recipe
        size = {"width": width, "layers": layers}
        rows += _rows(found, size)
        if gradients:
            network, _ = drawn(model, seed=seed + number)
            asked = default_inputs(network) if given is None else given
            growth = gradient_growth(network, asked, find(network, settings.get("branches"))[1])
            rows.append({**size, "quantity": "growth of gradients", **_UNKNOWN, "log_value": growth})
    sizes = pd.DataFrame(rows)
    fitted = {
        (quantity, over): row
        for quantity, own in sizes.groupby("quantity", sort=False)
        for over, row in _exponents(own, varied).items()
    }
    exponents = pd.DataFrame(fitted).T.rename_axis(["quantity", "over"])
    return Scaling(sizes, exponents, rule)


def _rows(found: Audit, size: dict[str, int]) -> list[dict[str, Any]]:
    rows = []
    for each in found.strengths:
        declared = math.nan if found.recipe is None else math.log(each.declared)
        log_value = each.log_ratio + math.log(each.declared)
        rows.append({**size, "quantity": each.name, "log_value": log_value, "sd": each.sd, "declared": declared})
    if found.stream is not None:
        squares = np.trace(found.stream, axis1=-2, axis2=-1)
        growth = np.log(squares[:, -1] / squares[:, 0]).mean()
        rows.append({**size, "quantity": "growth of the stream", **_UNKNOWN, "log_value": growth})
    return rows


def _exponents(rows: pd.DataFrame, varied: list[str]) -> dict[str, dict[str, float]]:
    """Weighted least squares of log values on the logs of the sizes that vary."""
    design = np.column_stack([np.ones(len(rows)), *(np.log(rows[name].to_numpy(float)) for name in varied)])
    free = len(rows) - design.shape[1]
    sds, values = rows["sd"].to_numpy(float), rows["log_value"].to_numpy(float)
    known = bool(np.isfinite(sds).all())
    if free < 1 and not known:
        return {}
    weight = 1 / sds if known else np.ones(len(rows))
    covariance = np.linalg.inv((design * weight[:, None] ** 2).T @ design)
    found = covariance @ (design.T @ (weight**2 * values))
    spread = np.square(weight * (values - design @ found)).sum() / free if free > 0 else 1.0
    # Posterior errors alone where the values scatter less.
    sd = np.sqrt(np.diagonal(covariance) * (max(spread, 1.0) if known else spread))
    law = stats.norm if known else stats.t(free)
    low, high = found + np.outer(law.interval(PROBABILITY), sd)
    of_recipe = rows["declared"].to_numpy(float)
    declared = np.linalg.lstsq(design, of_recipe, rcond=None)[0] if np.isfinite(of_recipe).all() else None
    return {
        name: {
            "exponent": found[k],
            "low": low[k],
            "high": high[k],
            "sd": sd[k],
            "declared": math.nan if declared is None else declared[k],
        }
        for k, name in enumerate(varied, 1)
    }
