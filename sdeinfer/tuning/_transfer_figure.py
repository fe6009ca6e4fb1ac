"""Criteria of a tuned layer over width and depth, and rules for γ."""

from collections.abc import Iterable
from typing import Any

import numpy as np
import pandas as pd
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.ticker import NullFormatter

from sdeinfer.plots import NEUTRAL, STYLES, finish, look, panels_of
from sdeinfer.tuning._transfer import RULES, Transfer

SOURCES = (("chain", "networks", True, 0.97), ("weights", "with weights", False, 1.03))
"""Columns of networks, their name, whether their marks are filled, and where these are, as a factor of the depth."""


def plot_transfer(found: Transfer, *, axes: Axes | Iterable[Axes] | None = None) -> list[Axes]:
    """Plot each criterion over the depth, a colour for each width: what is promised, and networks.

    Lines are promises, filled marks exact chains, and open ones networks with weights, with error bars of one standard
    error; the dotted line is the bound. If γ was tuned for every size, a last panel has γ over the depth, with the
    rules. The first panel and that of the rules have a legend.

    Arguments:
        found: the result of `transfer`.
        axes: where to plot, one for each criterion and one for the rules; None for a new figure.

    Raises:
        InputError: for another number of axes.

    Example:
        ```python
        found = si.transfer(tuned, widths=[128, 256], depths=[16, 64], networks=128, key=key)
        found.plot()
        ```
    """
    table = found.criteria.reset_index()
    criteria = dict(list(table.groupby("criterion", sort=False)))
    panels = panels_of(axes, len(criteria) + (found.rules is not None), height=2.7)
    looks = _looks(np.unique(table["width"]))
    for (name, mine), panel in zip(criteria.items(), panels, strict=False):
        for width, style in looks.items():
            own = mine[mine["width"] == width]
            line = {"color": style["color"], "linestyle": style["linestyle"]}
            panel.plot(own["depth"], own["promised"], **line, label=f"n = {width:g}, promised")
            for source, words, filled, shift in SOURCES:
                if np.isfinite(own[source]).any():
                    inside = style["color"] if filled else "white"
                    mark = {"fmt": style["marker"], "color": style["color"], "ms": 5, "mfc": inside}
                    label = f"n = {width:g}, {words}"
                    panel.errorbar(own["depth"] * shift, own[source], own[f"{source}_error"], **mark, label=label)
        bound = mine["bound"].iloc[0]
        if np.isfinite(bound):
            panel.axhline(bound, color="black", ls=":", label="bound")
        _dress(panel, str(name), "value", np.unique(table["depth"]), legend=panel is panels[0])
    if found.rules is not None:
        _plot_rules(panels[-1], found.rules, looks)
    return panels


def _looks(widths: np.ndarray) -> dict[float, dict[str, Any]]:
    """A colour, a line style and a marker for each width; wider is darker."""
    shades = map(to_hex, colormaps["viridis_r"](np.linspace(0.3, 0.9, len(widths))))
    each = enumerate(zip(widths, shades, strict=True))
    return {float(width): look(number) | {"color": shade} for number, (width, shade) in each}


def _plot_rules(panel: Axes, rules: pd.DataFrame, looks: dict[float, dict[str, Any]]) -> None:
    for width, style in looks.items():
        own = rules[rules["width"] == width]
        mark: dict[str, Any] = style | {"linestyle": ""}
        panel.plot(own["depth"], own["tuned"], **mark, label=f"tuned, n = {width:g}")
    first = rules.drop_duplicates("depth").sort_values("depth")
    for style, name in zip(STYLES, RULES, strict=False):
        words = name if name == "constant" else f"∝ {name}"
        panel.plot(first["depth"], first[name], style, color=NEUTRAL, lw=1, label=f"γ {words}")
    panel.set_yscale("log")
    low, high = panel.get_ylim()
    ticks = [x for x in (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0) if low <= x <= high]
    panel.set_yticks(ticks, [f"{x:g}" for x in ticks])
    panel.yaxis.set_minor_formatter(NullFormatter())
    _dress(panel, "rules for γ", "γ", np.unique(rules["depth"]), legend=True)


def _dress(panel: Axes, title: str, value: str, depths: np.ndarray, *, legend: bool) -> None:
    panel.set_title(title, loc="left", fontsize="medium")
    panel.set(xlabel="depth d (layers)", ylabel=value, xscale="log")
    panel.set_xticks(depths, [f"{x:g}" for x in depths])
    panel.xaxis.set_minor_formatter(NullFormatter())
    finish(panel, legend=legend)
