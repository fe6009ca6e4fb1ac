"""The figure of an audit."""

from collections.abc import Iterable

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from sdeinfer.auditing._over_depth import STATISTICS, over_depth
from sdeinfer.auditing._result import Audit
from sdeinfer.plots import NEUTRAL, finish, legend_below, look, panels_of, plot_bands

PANEL = 2.1
"""Height of a panel in inches."""


def plot_audit(audit: Audit, *, axes: Axes | Iterable[Axes] | None = None) -> list[Axes]:
    """Plot the strength of each branch over the declared one, and what follows for the stream over depth.

    The first panel has the ratios with their 95 % intervals. The others, if the stream was observed, have its mean
    square, mean correlation and effective rank, with bands of 80 % of networks of the declared and found strengths.

    Arguments:
        audit: the audit.
        axes: four axes, or one without the stream; None for a new figure.
    """
    panels = panels_of(axes, 1 if audit.stream is None else 1 + len(STATISTICS), height=PANEL)
    _plot_ratios(audit, panels[0])
    if audit.stream is not None:
        statistics = over_depth(audit)
        layers = np.arange(audit.stream.shape[1])
        bands = [name for name in ("found", "declared") if name in statistics]
        for panel, name in zip(panels[1:], STATISTICS, strict=True):
            plot_bands(layers, {label: statistics[label][name].values for label in bands}, axes=panel)
            for values in statistics["observed"][name].values:
                panel.plot(layers, values, "k.", ms=5, label="observed")
            panel.set(ylabel=name)
            panel.xaxis.set_major_locator(MaxNLocator(integer=True))
        panels[1].set_yscale("log")
        panels[-1].set_xlabel("layers")
    if axes is None:
        legend_below(panels)
    return panels


def _plot_ratios(audit: Audit, panel: Axes) -> None:
    """Ratios of strengths over layers, a colour for each block."""
    for number, (name, own) in enumerate(audit.branches.groupby("block", sort=False), 2):
        style = look(number)
        errors = np.abs(own[["low", "high"]].to_numpy().T - own["ratio"].to_numpy())
        place = own["layer"].to_numpy() + 0.12 * (number - 2.5)
        panel.errorbar(place, own["ratio"], errors, fmt=style["marker"], color=style["color"], ms=4, lw=1, label=name)
    panel.axhline(1.0, color=NEUTRAL, lw=0.8)
    limits = audit.branches[["low", "high"]].to_numpy()
    if limits.max() > 1.5 or limits.min() < 1 / 1.5:
        panel.set_yscale("log")
        panel.yaxis.set_major_formatter("{x:g}")
        panel.yaxis.set_minor_formatter("{x:g}")
    panel.set(ylabel="strength over declared", xlabel="layer" if audit.stream is None else "")
    panel.xaxis.set_major_locator(MaxNLocator(integer=True))
    finish(panel)
