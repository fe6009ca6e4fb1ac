"""The statistics of a tuned layer over networks, with the bounds that it was tuned for."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, PRNGKeyArray
from matplotlib.axes import Axes

from sdeinfer._files import InputError
from sdeinfer.criteria import Constraint, Expectation, GradientFactor, NormFactor, Probability, Quantile, Spread
from sdeinfer.plots import SDE, WRONG, finish, panels_of
from sdeinfer.tuning._tuned import Tuned

MOST = 4
"""Number of panels of a new figure."""

BINS = 30

OUTER = 0.005
"""Share of networks on either side that an axis leaves out, so that single ones do not stretch it."""

WIDE = 20.0
"""Ratio of factors from which their axis is logarithmic."""


def plot_tuned(
    tuned: Tuned, *, paths: int = 512, key: PRNGKeyArray, axes: Axes | Iterable[Axes] | None = None
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

    Example:
        ```python
        tuned = si.tune(
            "transformer", V0, width=256, depth=64, maximise="gamma", subject_to=[goal], fixed={"tau0": 1.0}, key=key
        )
        tuned.plot(key=key)
        ```
    """
    problem, rows = tuned.problem, tuned.constraint_rows()
    if not rows:
        raise InputError("tuned: it was tuned without constraints, of which this figure has a panel each")
    if axes is not None:
        axes = [axes] if isinstance(axes, Axes) else list(axes)
    count = min(len(rows), MOST) if axes is None else len(axes)
    if count > len(rows):
        raise InputError(f"axes: there are {len(rows)} constraints to plot, got {count} axes")
    # As for `tuned.criteria`: new paths, with half the step.
    fresh = tuned.on_new_samples(paths=paths, key=key)
    samples = fresh.samples(tuned.u)
    panels = panels_of(axes, count, height=2.7)
    for number, (panel, row) in enumerate(zip(panels, rows, strict=False)):
        of_constraint, prompt = divmod(number, tuned.rows_per_constraint)
        constraint = tuned.constraints[of_constraint]
        statistic = problem.statistics.index(constraint.criterion.statistic)  # pyright: ignore[reportArgumentType]
        mine = samples if problem.over == "mean" else samples[prompt : prompt + 1]
        values = np.concatenate([sample.values[statistic] for sample in mine])
        exploded = np.concatenate([sample.exploded for sample in mine])
        _panel(panel, constraint, f"{row['value']:.4g} ± {row['error']:.2g}", float(row["value"]), values, exploded)
        panel.set_title(str(row["name"]), loc="left", fontsize="medium", pad=20)
    return panels


def _panel(
    axes: Axes,
    constraint: Constraint,
    found: str,
    value: float,
    values: Float[np.ndarray, " networks"],
    exploded: Bool[np.ndarray, " networks"],
) -> None:
    criterion, bound = constraint.criterion, constraint.bound
    parts, bounds, marks = {"": values}, {f"bound {bound:g}": bound}, {}
    match criterion:
        case Probability():
            inside = (criterion.sign * (values - criterion.value) > 0) & ~exploded
            parts = {f"P = {found}, bound {bound:g}": values[inside], "others": values[~inside]}
            bounds = {"": criterion.value}
        case Spread():
            middle = values.mean()
            marks = {f"mean ± sd, sd {found}": middle - value, "": middle + value}
            bounds = {f"mean ± bound {bound:g}": middle - bound, "": middle + bound}
        case Quantile():
            marks = {f"{100 * criterion.level:g}% quantile {found}": value}
        case Expectation():
            marks = {f"mean {found}": value}
    factor = isinstance(criterion.statistic, NormFactor | GradientFactor)
    edges, scale = _edges(values, [*bounds.values(), *marks.values()], factor=factor)
    # Red and hatched are networks that should be few.
    looks = [(SDE, ""), (WRONG, "////")]
    colours, hatches = zip(*(looks[:1] if len(parts) == 1 else looks[:: constraint.sign]), strict=True)
    shares = [np.full(len(own), 1 / len(values)) for own in parts.values()]
    labels = [label or "_" for label in parts]
    bars: dict[str, Any] = {"color": colours, "hatch": hatches, "edgecolor": "white", "linewidth": 0, "alpha": 0.5}
    axes.hist(list(parts.values()), edges, weights=shares, stacked=True, label=labels, **bars)
    for places, colour, style in ((marks, SDE, "-"), (bounds, "black", "--")):
        for label, x in places.items():
            axes.axvline(x, color=colour, ls=style, label=label or None)
    axes.set(xscale=scale, xlim=(edges[0], edges[-1]), xlabel=str(criterion.statistic), ylabel="share of networks")
    finish(axes)
    above: dict[str, Any] = {"loc": "lower left", "bbox_to_anchor": (0, 1), "borderpad": 0, "borderaxespad": 0.3}
    axes.legend(frameon=False, fontsize="small", ncols=3, **above)


def _edges(values: Float[np.ndarray, " networks"], marks: Sequence[float], *, factor: bool) -> tuple[list[float], str]:
    """Edges of bins between the outer values, or the marks if these are further out; and the axis's scale."""
    low, high = np.quantile(values, [OUTER, 1 - OUTER])
    low, high = min(low, *marks), max(high, *marks)
    if factor and low > 0 and high / low > WIDE:
        return np.geomspace(low / 1.1, high * 1.1, BINS + 1).tolist(), "log"
    margin = 0.04 * (high - low) or max(abs(low), 1.0) / 20
    return np.linspace(low - margin, high + margin, BINS + 1).tolist(), "linear"
