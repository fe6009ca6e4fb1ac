"""The figure of an audit. Tests: `tests/plots/test_audit.py`."""

from collections.abc import Iterable, Sequence
from typing import cast

import numpy as np
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from sdeinfer.auditing import Audit
from sdeinfer.auditing._tests import Row
from sdeinfer.plots._style import NEUTRAL, finish, legend_below, look, panels_of

MARKS = 50
"""Marks that stand side by side in one new panel; a figure of more has a panel for each role."""

SIZES = (2.0, 5.0)
"""Smallest and largest size of a mark, in points."""


def plot_audit(audit: Audit, *, axes: Axes | Iterable[Axes] | None = None) -> list[Axes]:
    """Plot σ of each matrix of the layers, over the declared one if there is a recipe, with its 95 % interval.

    The matrices of a layer stand side by side. A new figure has one panel and a legend; if there are too many matrices
    for that, it has a panel for each role.

    Arguments:
        audit: the audit.
        axes: one axis, which gets no legend; None for a new figure.
    """
    declared = audit.recipe is not None
    rows = [row for row in audit.rows if row.matrix.layer is not None and row.matrix.linear and row.law.sd > 0]
    roles = {role: [row for row in rows if row.matrix.role == role] for role in (row.matrix.role for row in rows)}
    layers = len({row.matrix.layer for row in rows})
    together = axes is not None or layers * len(roles) <= MARKS
    panels = panels_of(axes, 1) if together else panels_of(None, len(roles), columns=3, height=1.5)
    side_by_side = len(roles) if together else 1
    size = float(np.clip(0.7 * _width(panels[0]) / max(layers * side_by_side, 1), *SIZES))
    for number, (role, matrices) in enumerate(roles.items()):
        panel, style = panels[0 if together else number], look(number + 2)
        shift = 0.8 * ((number + 0.5) / side_by_side - 0.5) if together else 0.0
        layer, value, error = _points([row for row in matrices if row.declared or not declared], declared=declared)
        marks = {"fmt": style["marker"], "color": style["color"], "ms": size, "mew": 0}
        panel.errorbar(layer + shift, value, 1.96 * error, **marks, elinewidth=max(0.6, size / 5), label=role)
        if not together:
            panel.set_title(role, fontsize="small")
            panel.sharey(panels[0])
            panel.tick_params(which="both", labelleft=number % 3 == 0)
    quantity = "σ over declared" if declared else "σ"
    low, high = panels[0].get_ylim()
    for number, panel in enumerate(panels):
        if declared:
            panel.axhline(1.0, color=NEUTRAL, lw=0.8)
        if low > 0 and high / low > 2:
            panel.set_yscale("log")
        lowest, leftmost = number + 3 >= len(panels), number % 3 == 0
        panel.set(xlabel="layer" if lowest else "", ylabel=quantity if leftmost else "")
        panel.xaxis.set_major_locator(MaxNLocator(9 if together else 4, integer=True))
        finish(panel)
    if axes is None and together:
        legend_below(panels)
    return panels


def _points(rows: Sequence[Row], *, declared: bool) -> Float[np.ndarray, "3 matrices"]:
    """Layer, σ or its ratio to the declared one, and the standard deviation of this, of each matrix."""
    values = [row.ratio if declared else row.law.sd * abs(row.factor) for row in rows]
    points = [(row.matrix.layer, value, value * row.law.error) for row, value in zip(rows, values, strict=True)]
    return np.array(points, float).reshape(-1, 3).T


def _width(panel: Axes) -> float:
    """The width of a panel in points, before the layout."""
    figure = cast(Figure, panel.get_figure(root=True))
    return 72 * panel.get_window_extent().width / figure.dpi
