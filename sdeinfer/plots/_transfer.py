"""Criteria of a tuned layer over width and depth, and rules for γ."""

from collections.abc import Iterable

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

from sdeinfer._files import InputError
from sdeinfer.plots._correlations import NETWORKS
from sdeinfer.tuning import RULES, Transfer

STYLES = ("-", "--", "-.", ":")


def plot_transfer(found: Transfer, *, axes: Iterable[Axes] | None = None) -> list[Axes]:
    """Plot each criterion over the depth, a colour for each width: what the SDE predicts, and networks.

    Lines are the SDE, circles exact chains, and crosses networks with weights, with error bars of one standard error;
    the dashed line is the bound. If γ was tuned for every size, a last panel has γ over the depth, with the rules.

    Arguments:
        found: the result of `transfer`.
        axes: where to plot, one for each criterion and one for the rules; None for a new figure.

    Raises:
        InputError: for another number of axes.
    """
    table = found.criteria.reset_index()
    columns = {str(name): table[name].to_numpy() for name in table}
    names = list(dict.fromkeys(columns["criterion"]))
    count = len(names) + (found.rules is not None)
    if axes is None:
        figure = Figure(figsize=(4.8, 2.8 * count), layout="constrained")
        panels: list[Axes] = list(figure.subplots(count, 1, squeeze=False)[:, 0])
    else:
        panels = list(axes)
    if len(panels) != count:
        raise InputError(f"axes: {count} are needed, got {len(panels)}")
    for name, panel in zip(names, panels, strict=False):
        mine = columns["criterion"] == name
        for number, width in enumerate(np.unique(columns["width"])):
            own = {key: values[mine & (columns["width"] == width)] for key, values in columns.items()}
            colour = f"C{number}"
            panel.plot(own["depth"], own["promised"], color=colour, label=f"n = {width}, SDE")
            for source, mark, shift in (("chain", "o", 0.97), ("weights", "x", 1.03)):
                if np.isfinite(own[source]).any():
                    label = "networks" if source == "chain" else "networks with weights"
                    style = {"fmt": mark, "color": colour, "ms": 5, "label": label if number == 0 else None}
                    panel.errorbar(own["depth"] * shift, own[source], own[f"{source}_error"], **style)
        bound = columns["bound"][mine][0]
        if np.isfinite(bound):
            panel.axhline(bound, color="black", ls="--", lw=1, label="bound")
        panel.set_title(name, loc="left", fontsize="medium")
        panel.set(ylabel="value")
        _dress(panel, columns["depth"])
    if found.rules is not None:
        _plot_rules(panels[-1], {str(name): found.rules[name].to_numpy() for name in found.rules})
    return panels


def _plot_rules(panel: Axes, columns: dict[str, np.ndarray]) -> None:
    for number, width in enumerate(np.unique(columns["width"])):
        mine = columns["width"] == width
        panel.plot(columns["depth"][mine], columns["tuned"][mine], "o", color=f"C{number}", label=f"tuned, n = {width}")
    depth, first = np.unique(columns["depth"], return_index=True)
    for style, name in zip(STYLES, RULES, strict=False):
        panel.plot(depth, columns[name][first], style, color=NETWORKS, lw=1, label=f"γ {_in_words(name)}")
    panel.set_yscale("log")
    panel.set_title("rules for γ", loc="left", fontsize="medium")
    panel.set(ylabel="γ")
    low, high = panel.get_ylim()
    ticks = [x for x in (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0) if low <= x <= high]
    panel.set_yticks(ticks, [f"{x:g}" for x in ticks])
    panel.yaxis.set_minor_formatter(NullFormatter())
    _dress(panel, depth)


def _in_words(rule: str) -> str:
    return rule if rule == "constant" else f"∝ {rule}"


def _dress(panel: Axes, depth: np.ndarray) -> None:
    panel.set(xlabel="depth d", xscale="log")
    panel.set_xticks(np.unique(depth), [f"{x:g}" for x in np.unique(depth)])
    panel.xaxis.set_minor_formatter(NullFormatter())
    panel.spines[["top", "right"]].set_visible(False)
    panel.legend(frameon=False, fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5))
