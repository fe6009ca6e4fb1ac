"""The figure of an audit."""

from collections.abc import Iterable

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from sdeinfer.auditing import Audit
from sdeinfer.plots._style import NEUTRAL, finish, legend_below, look, panels_of


def plot_audit(audit: Audit, *, axes: Axes | Iterable[Axes] | None = None) -> list[Axes]:
    """Plot the strength of each branch over the declared one, with its 95 % interval; a colour for each block.

    Arguments:
        audit: the audit.
        axes: one axis; None for a new figure.
    """
    panels = panels_of(axes, 1)
    (panel,) = panels
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
    panel.set(ylabel="strength over declared", xlabel="layer")
    panel.xaxis.set_major_locator(MaxNLocator(integer=True))
    finish(panel)
    if axes is None:
        legend_below(panels)
    return panels
