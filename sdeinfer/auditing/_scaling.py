"""Audits over sizes, a coordinate check with error bars; and in training."""

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

from sdeinfer._arguments import at_least_one
from sdeinfer._files import InputError
from sdeinfer.auditing._audit import audit
from sdeinfer.auditing._describe import drawn
from sdeinfer.auditing._estimates import PROBABILITY
from sdeinfer.auditing._find import find
from sdeinfer.auditing._inputs import default_inputs
from sdeinfer.auditing._observe import gradient_growth
from sdeinfer.auditing._recipe import Recipe
from sdeinfer.auditing._result import Audit


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
        return known.iloc[np.flatnonzero(2 * stats.norm.sf(z) * len(known) < 0.01)]  # 1 % for all together

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
    varied = [name for name, values in (("width", widths), ("layers", depths)) if len(set(values)) > 1]
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
            rows.append(_row(size, "growth of gradients", growth))
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
        rows.append(_row(size, each.name, log_value, each.sd, declared))
    if found.stream is not None:
        squares = np.trace(found.stream, axis1=-2, axis2=-1)
        growth = np.log(squares[:, -1] / squares[:, 0]).mean()
        rows.append(_row(size, "growth of the stream", growth))
    return rows


def _row(size: dict[str, int], quantity: str, value: float, sd: float = math.nan, declared: float = math.nan) -> dict:
    return {**size, "quantity": quantity, "log_value": value, "sd": sd, "declared": declared}


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


class Monitor:
    """Audits of a network in training: `monitor(step)` runs one at every k-th step, on a few tokens.

    A call costs one forward pass of the few tokens, in evaluation mode and without gradients, and the audit of its
    increments, which takes some tenths of a second once it is compiled. The model's state does not change.

    Arguments:
        model: the module in training.
        inputs: a short prompt, see `audit`; the same at all steps.
        every: k.
        settings: other arguments of `audit`.

    Attributes:
        audits: the audit of each step.
        refused: the steps whose increments have no density, as of collapsed tokens, with the reason. Nothing is raised,
            so that training goes on; a first audit raises.

    Example:
        ```python
        monitor = si.audit.Monitor(model, prompt, recipe="gpt2", every=100)
        for step, batch in enumerate(batches):
            monitor(step)
            train(model, batch)
        print(monitor)
        ```
    """

    def __init__(self, model: Any, inputs: Any = None, *, every: int = 100, **settings: Any):
        at_least_one(every=every)
        self.model, self.inputs, self.every, self.settings = model, inputs, every, settings
        self.audits: dict[int, Audit] = {}
        self.refused: dict[int, str] = {}

    def __call__(self, step: int) -> Audit | None:
        """Audit the network if `step` is a multiple of k."""
        if step % self.every:
            return None
        try:
            self.audits[step] = audit(self.model, self.inputs, **self.settings)
        except InputError as error:
            if not self.audits:
                raise
            self.refused[step] = str(error)
        return self.audits.get(step)

    def to_frame(self) -> pd.DataFrame:
        """The p-value of each branch (rows) at each step (columns), see `Audit.branches`."""
        return pd.DataFrame({step: each.branches["p"] for step, each in self.audits.items()}).rename_axis(
            columns="step"
        )

    @property
    def left(self) -> dict[str, int]:
        """The branches that have left the law, with the first step at which each had; the earliest first."""
        frame = self.to_frame()
        beyond = frame < 1e-4 / max(len(frame), 1)  # the false-alarm probability of all branches at one step
        steps = {
            str(branch): list(self.audits)[int(row.argmax())]
            for branch, row in zip(beyond.index, beyond.to_numpy(), strict=True)
            if row.any()
        }
        return dict(sorted(steps.items(), key=lambda item: item[1]))

    @property
    def verdict(self) -> str:
        """From which step on the network is not that of its initialisation, and where first, in one sentence."""
        if not self.audits:
            return "no step was audited"
        first, refused = (min(steps, default=None) for steps in (self.left.values(), self.refused))
        if refused is not None and (first is None or refused < first):
            return f"not at initialisation from step {refused} on: {self.refused[refused]}"
        if first is None:
            return f"at initialisation up to step {max(self.audits)}"
        names = [name for name, step in self.left.items() if step == first]
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        return f"not at initialisation from step {first} on, in {', '.join(names[:3])}{more}"

    def __repr__(self) -> str:
        """The verdict."""
        return self.verdict
