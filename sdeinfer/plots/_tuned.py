"""The statistics of a tuned layer over networks, with its bounds, and its criteria over width and depth."""

import math
import re
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Bool, Float, PRNGKeyArray
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.ticker import NullLocator

from sdeinfer._files import InputError
from sdeinfer.criteria import Constraint, Expectation, GradientFactor, NormFactor, Probability, Quantile, Spread
from sdeinfer.plots._style import SDE, WRONG, finish, legend_below, look, panels_of
from sdeinfer.tuning import Tuned


def plot_tuned(
    tuned: Tuned, *, paths: int = 512, key: PRNGKeyArray, axes: Axes | Iterable[Axes] | None = None
) -> list[Axes]:
    """Plot the distribution over networks of the statistic of each constraint, with its bound, a panel for each.

    With several prompts there is a panel for each constraint and prompt. The distribution is that of new paths at the
    tuned parameters; values in the legends are those of `tuned.criteria`, which come from more paths.

    Arguments:
        tuned: the result of `tune`.
        paths: number of paths of each prompt.
        key: PRNG key.
        axes: where to plot, in the order of the rows of `tuned.criteria`; None for a new figure with the first four.

    Raises:
        InputError: if there are more axes than constraints, or no constraints.

    Example:
        ```python
        tuned = si.tune(
            "transformer", V0, width=256, depth=64, maximise="gamma", subject_to=[goal], fixed={"tau0": 1.0}, key=key
        )
        si.plots.plot_tuned(tuned, key=key)
        ```
    """
    rows = tuned.constraint_rows()
    if not rows:
        raise InputError("tuned: nothing to plot: it was tuned without constraints")
    if axes is not None:
        axes = [axes] if isinstance(axes, Axes) else list(axes)
    count = min(len(rows), 4) if axes is None else len(axes)
    if count > len(rows):
        raise InputError(f"axes: there are {len(rows)} constraints to plot, got {count} axes")
    samples = tuned.sample(paths=paths, key=key)
    panels = panels_of(axes, count, height=2.7)
    for number, (panel, row) in enumerate(zip(panels, rows, strict=False)):
        of_constraint, prompt = divmod(number, len(tuned.V0))
        constraint, table = tuned.constraints[of_constraint], samples.loc[prompt]
        values = table[str(constraint.criterion.statistic)].to_numpy(float)
        estimate, exploded = f"{row['value']:.4g} ± {row['error']:.2g}", table["exploded"].to_numpy(bool)
        _panel(panel, constraint, estimate, float(row["value"]), values, exploded)
        panel.set_title(str(row["name"]), loc="left", fontsize="medium", pad=20)
    return panels


def _panel(
    axes: Axes,
    constraint: Constraint,
    estimate: str,
    value: float,
    values: Float[np.ndarray, " networks"],
    exploded: Bool[np.ndarray, " networks"],
) -> None:
    criterion, bound = constraint.criterion, constraint.bound
    parts, bounds, marks = {"": values}, {f"bound {bound:g}": bound}, {}
    match criterion:
        case Probability():
            inside = (criterion.sign * (values - criterion.value) > 0) & ~exploded
            parts = {f"P = {estimate}, bound {bound:g}": values[inside], "others": values[~inside]}
            bounds = {"": criterion.value}
        case Spread():
            middle = values.mean()
            marks = {f"mean ± sd, sd {estimate}": middle - value, "": middle + value}
            bounds = {f"mean ± bound {bound:g}": middle - bound, "": middle + bound}
        case Quantile():
            marks = {f"{100 * criterion.level:g}% quantile {estimate}": value}
        case Expectation():
            marks = {f"mean {estimate}": value}
    factor = isinstance(criterion.statistic, NormFactor | GradientFactor)
    first, *others = bounds.values()
    edges, scale = _edges(values, [*others, *marks.values()], bound=first, factor=factor)
    # Red and hatched are networks that should be few.
    looks = [(SDE, ""), (WRONG, "////")]
    colours, hatches = zip(*(looks[:1] if len(parts) == 1 else looks[:: constraint.sign]), strict=True)
    shares = [np.full(len(part), 1 / len(values)) for part in parts.values()]
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


def _edges(
    values: Float[np.ndarray, " networks"], marks: Sequence[float], *, bound: float, factor: bool
) -> tuple[list[float], str]:
    """Edges of bins between all values but one in a hundred, or the marks if further out; and the axis's scale.

    One edge is at the bound, so that no bar has networks of both of its sides.
    """
    low, high = np.quantile(values, [0.005, 0.995])
    low, high = min(low, bound, *marks), max(high, bound, *marks)
    if factor and low > 0 and high / low > 20:
        return np.exp(_grid(np.log(low / 1.1), np.log(high * 1.1), np.log(bound))).tolist(), "log"
    margin = 0.04 * (high - low) or max(abs(low), 1.0) / 20
    return _grid(low - margin, high + margin, bound).tolist(), "linear"


def _grid(low: float, high: float, edge: float) -> np.ndarray:
    """Edges of thirty bins between two numbers, or one bin more, with an edge at a number between them."""
    step = (high - low) / 30
    first, last = math.floor((low - edge) / step), math.ceil((high - edge) / step)
    return edge + step * np.arange(first, last + 1)


def plot_transfer(criteria: pd.DataFrame, *, axes: Axes | Iterable[Axes] | None = None) -> list[Axes]:
    """Plot each criterion over the depth, a colour for each width: what is promised, and networks.

    Lines are promises, filled marks exact chains, and open ones networks with weights, with error bars of one standard
    error; the dotted line is the bound. Marks of one depth stand side by side.

    Arguments:
        criteria: the table `criteria` of the result of `transfer`.
        axes: where to plot, one for each criterion, of which the first gets the legend; None for a new figure.

    Raises:
        InputError: for another number of axes.

    Example:
        ```python
        found = si.transfer(tuned, widths=[128, 256], depths=[16, 64], networks=128, key=key)
        si.plots.plot_transfer(found.criteria)
        ```
    """
    table = criteria.reset_index()
    groups = dict(list(table.groupby("criterion", sort=False)))
    panels = panels_of(axes, len(groups), height=2.7)
    looks, depths = _looks(np.unique(table["width"])), np.unique(table["depth"])
    for (name, group), panel in zip(groups.items(), panels, strict=True):
        bound = group["bound"].iloc[0]
        for number, (width, style) in enumerate(looks.items()):
            rows = group[group["width"] == width]
            line = {"color": style["color"], "linestyle": style["linestyle"]}
            panel.plot(rows["depth"], rows["promised"], **line, label=f"n = {width:g}, promised")
            for place, (source, words) in enumerate((("chain", "networks"), ("weights", "with weights"))):
                if np.isfinite(rows[source]).any():
                    inside = style["color"] if source == "chain" else "white"
                    mark = {"fmt": style["marker"], "color": style["color"], "ms": 4, "mfc": inside}
                    shift = 1.05 ** (2 * number + place - len(looks) + 0.5)
                    label = f"n = {width:g}, {words}"
                    panel.errorbar(rows["depth"] * shift, rows[source], rows[f"{source}_error"], **mark, label=label)
        if np.isfinite(bound):
            panel.axhline(bound, color="black", ls=":", label="bound")
        quantity = re.sub(r" [≤≥] \S+$", "", str(name))
        panel.set_title(str(name), loc="left", fontsize="medium")
        panel.set(xlabel="depth d (layers)", ylabel=textwrap.fill(quantity, 24), xscale="log")
        panel.set_xticks(depths, [f"{x:g}" for x in depths])
        panel.xaxis.set_minor_locator(NullLocator())
        finish(panel, legend=axes is not None and panel is panels[0])
    if axes is None:
        legend_below(panels)
    return panels


def _looks(widths: np.ndarray) -> dict[float, dict[str, Any]]:
    """A colour, a line style and a marker for each width; wider is darker."""
    shades = map(to_hex, colormaps["viridis_r"](np.linspace(0.3, 0.9, len(widths))))
    numbered = enumerate(zip(widths, shades, strict=True))
    return {float(width): look(number) | {"color": shade} for number, (width, shade) in numbered}
