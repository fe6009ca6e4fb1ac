"""Criteria of a tuned layer over width and depth, and rules for γ."""

from collections.abc import Iterable
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.ticker import NullFormatter

from sdeinfer.plots._style import NEUTRAL, STYLES, finish, look, panels_of
from sdeinfer.tuning import RULES, Transfer

SOURCES = (("chain", "networks", True, 0.97), ("weights", "with weights", False, 1.03))
"""Columns of networks, their name, whether their marks are filled, and where these are, as a factor of the depth."""


def plot_transfer(found: Transfer, *, axes: Axes | Iterable[Axes] | None = None) -> list[Axes]:
    """Plot each criterion over the depth, a colour for each width: what the SDE predicts, and networks.

    Lines are the SDE, filled marks exact chains, and open ones networks with weights, with error bars of one standard
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
        plots.plot_transfer(found)
        ```
    """
    table = found.criteria.reset_index()
    columns = {str(name): table[name].to_numpy() for name in table}
    names = list(dict.fromkeys(columns["criterion"]))
    count = len(names) + (found.rules is not None)
    panels = panels_of(axes, count, height=2.7)
    looks = _looks(np.unique(columns["width"]))
    for name, panel in zip(names, panels, strict=False):
        mine = columns["criterion"] == name
        for width, style in looks.items():
            own = {key: values[mine & (columns["width"] == width)] for key, values in columns.items()}
            line = {"color": style["color"], "linestyle": style["linestyle"]}
            panel.plot(own["depth"], own["promised"], **line, label=f"n = {width:g}, SDE")
            for source, words, filled, shift in SOURCES:
                if np.isfinite(own[source]).any():
                    inside = style["color"] if filled else "white"
                    mark = {"fmt": style["marker"], "color": style["color"], "ms": 5, "mfc": inside}
                    label = f"n = {width:g}, {words}"
                    panel.errorbar(own["depth"] * shift, own[source], own[f"{source}_error"], **mark, label=label)
        bound = columns["bound"][mine][0]
        if np.isfinite(bound):
            panel.axhline(bound, color="black", ls=":", label="bound")
        panel.set_title(name, loc="left", fontsize="medium")
        panel.set(ylabel="value")
        _dress(panel, columns["depth"], legend=panel is panels[0])
    if found.rules is not None:
        _plot_rules(panels[-1], {str(name): found.rules[name].to_numpy() for name in found.rules}, looks)
    return panels


def _looks(widths: np.ndarray) -> dict[float, dict[str, Any]]:
    """A colour, a line style and a marker for each width; wider is darker."""
    shades = map(to_hex, colormaps["viridis_r"](np.linspace(0.3, 0.9, len(widths))))
    return {
        width: look(number) | {"color": shade}
        for number, (width, shade) in enumerate(zip(widths.tolist(), shades, strict=True))
    }


def _plot_rules(panel: Axes, columns: dict[str, np.ndarray], looks: dict[float, dict[str, Any]]) -> None:
    for width, style in looks.items():
        mine = columns["width"] == width
        mark = {"color": style["color"], "marker": style["marker"], "linestyle": ""}
        panel.plot(columns["depth"][mine], columns["tuned"][mine], **mark, label=f"tuned, n = {width:g}")
    depth, first = np.unique(columns["depth"], return_index=True)
    for style, name in zip(STYLES, RULES, strict=False):
        panel.plot(depth, columns[name][first], style, color=NEUTRAL, lw=1, label=f"γ {_in_words(name)}")
    panel.set_yscale("log")
    panel.set_title("rules for γ", loc="left", fontsize="medium")
    panel.set(ylabel="γ")
    low, high = panel.get_ylim()
    ticks = [x for x in (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0) if low <= x <= high]
    panel.set_yticks(ticks, [f"{x:g}" for x in ticks])
    panel.yaxis.set_minor_formatter(NullFormatter())
    _dress(panel, depth, legend=True)


def _in_words(rule: str) -> str:
    return rule if rule == "constant" else f"∝ {rule}"


def _dress(panel: Axes, depth: np.ndarray, *, legend: bool) -> None:
    panel.set(xlabel="depth d (layers)", xscale="log")
    panel.set_xticks(np.unique(depth), [f"{x:g}" for x in np.unique(depth)])
    panel.xaxis.set_minor_formatter(NullFormatter())
    finish(panel, legend=legend)
