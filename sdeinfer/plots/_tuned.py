"""The statistics of a tuned layer over networks, with the bounds that it was tuned for."""

import dataclasses
from collections.abc import Sequence

import numpy as np
import pandas as pd
from jaxtyping import Bool, Float, PRNGKeyArray
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from sdeinfer._files import InputError
from sdeinfer.criteria import Constraint, Expectation, Probability, Quantile, Spread
from sdeinfer.plots._correlations import NETWORKS, SDE
from sdeinfer.tuning import Tuned

MOST = 4
"""Number of panels of a new figure."""

BINS = 40

OUTER = 0.005
"""Share of networks on either side that an axis leaves out, so that single ones do not stretch it."""

WIDE = 20.0
"""Ratio of positive values from which their axis is logarithmic."""


def plot_tuned(
    tuned: Tuned, *, paths: int = 512, key: PRNGKeyArray, axes: Axes | Sequence[Axes] | None = None
) -> list[Axes]:
    """Plot the distribution over networks of the statistic of each constraint, with its bound, a panel for each.

    With several prompts there is a panel for each constraint and prompt, or one of all prompts where the tuning was for
    their mean. The distribution is that of new paths at the tuned parameters; values in the legends are those of
    `tuned.criteria`, which come from more paths.

    Arguments:
        tuned: the result of `tune`.
        paths: number of paths of each prompt; at most as many as in the tuning, if parameters are from a posterior.
        key: PRNG key.
        axes: where to plot, in the order of the rows of `tuned.criteria`; None for a new figure with the first four.

    Raises:
        InputError: if there are more axes than constraints, or no constraints; and for too many paths.
    """
    problem = tuned.problem
    prompts = 1 if problem.over == "mean" else len(tuned.V0)
    count = prompts * len(tuned.constraints)
    if axes is None:
        shown = max(1, min(count, MOST))
        figure = Figure(figsize=(5.6, 2.7 * shown), layout="constrained")
        panels: list[Axes] = list(figure.subplots(shown, 1, squeeze=False)[:, 0])
    else:
        panels = [axes] if isinstance(axes, Axes) else list(axes)
    if len(panels) > count:
        raise InputError(f"axes: there are {count} constraints to plot, got {len(panels)} axes")
    if problem.space.drawn and paths > problem.paths:
        raise InputError(f"paths: the posterior was drawn for {problem.paths}, got {paths}")
    # As for `tuned.criteria`: new paths, with half the step.
    fresh = dataclasses.replace(problem.with_fresh_paths(key, problem.step / 2), paths=paths)
    samples = fresh.samples(tuned.u)
    exploded = np.stack([sample.exploded for sample in samples])
    for number, panel in enumerate(panels):
        constraint, prompt = tuned.constraints[number // prompts], number % prompts
        statistic = [str(each) for each in problem.statistics].index(str(constraint.criterion.statistic))
        values = np.stack([sample.values[statistic] for sample in samples])
        mine = slice(None) if problem.over == "mean" else slice(prompt, prompt + 1)
        _panel(panel, constraint, tuned.criteria.iloc[number], values[mine].ravel(), exploded[mine].ravel())
    return panels


def _panel(
    axes: Axes,
    constraint: Constraint,
    row: pd.Series,
    values: Float[np.ndarray, " networks"],
    exploded: Bool[np.ndarray, " networks"],
) -> None:
    criterion, bound = constraint.criterion, constraint.bound
    value, found = row["value"], f"{row['value']:.3g} ± {row['error']:.1g}"
    parts, bounds, marks = {"networks": values}, {f"bound {bound:g}": bound}, {}
    match criterion:
        case Probability():
            inside = (criterion.sign * (values - criterion.value) > 0) & ~exploded
            parts = {f"P = {found}": values[inside], f"1 − P, bound {1 - bound:.3g}": values[~inside]}
            bounds = {"": criterion.value}
        case Spread():
            middle = values.mean()
            bounds = {f"mean ± bound {bound:g}": middle - bound, "": middle + bound}
            marks = {f"mean ± sd, {found}": middle - value, "": middle + value}
        case Quantile():
            marks = {f"{100 * criterion.level:g}% quantile, {found}": value}
        case Expectation():
            marks = {f"mean, {found}": value}
    edges, scale = _edges(values, [*bounds.values(), *marks.values()])
    share = [np.full(len(part), 1 / len(values)) for part in parts.values()]
    colours = [SDE, NETWORKS][: len(parts)]
    axes.hist(
        list(parts.values()), edges, weights=share, stacked=True, color=colours, alpha=0.55, label=list(parts)
    )  # fmt: skip
    for label, place in marks.items():
        axes.axvline(place, color=SDE, label=label or None)
    for label, place in bounds.items():
        axes.axvline(place, color="black", ls="--", label=label or None)
    axes.set(xscale=scale, xlim=(edges[0], edges[-1]), xlabel=str(criterion.statistic), ylabel="share of networks")
    axes.set_title(str(row.name), loc="left", fontsize="medium")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize="small")


def _edges(values: Float[np.ndarray, " networks"], marks: Sequence[float]) -> tuple[Float[np.ndarray, " edges"], str]:
    """Edges of bins between the outer values, or the marks if these are further out; and the axis's scale."""
    low, high = np.quantile(values, [OUTER, 1 - OUTER])
    low, high = min(low, *marks), max(high, *marks)
    if low > 0 and high / low > WIDE:
        return np.geomspace(low / 1.1, high * 1.1, BINS + 1), "log"
    margin = 0.04 * (high - low) or max(abs(low), 1.0) / 20
    return np.linspace(low - margin, high + margin, BINS + 1), "linear"
