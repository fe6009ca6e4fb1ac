"""The figure of an audit. Tests: `tests/plots/test_samples.py`."""

from collections.abc import Iterable

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from sdeinfer.auditing import Audit
from sdeinfer.plots._style import NEUTRAL, finish, legend_below, look, panels_of


def plot_audit(audit: Audit, *, axes: Axes | Iterable[Axes] | None = None) -> list[Axes]:
    """Plot σ of each matrix of the layers, over the declared one if there is a recipe, with its 95 % interval.

    Arguments:
        audit: the audit.
        axes: one axis; None for a new figure.
    """
    panels = panels_of(axes, 1)
    (panel,) = panels
    rows = [row for row in audit.rows if row.matrix.layer is not None and row.matrix.linear and row.law.sd > 0]
    roles = list(dict.fromkeys(row.matrix.role for row in rows))
    declared = audit.recipe is not None
    for number, role in enumerate(roles):
        role_rows = [row for row in rows if row.matrix.role == role and (row.declared or not declared)]
        style = look(number + 2)
        value = np.array([row.ratio if declared else row.law.sd * abs(row.factor) for row in role_rows])
        place = np.array([row.matrix.layer for row in role_rows]) + 0.6 * ((number + 0.5) / max(len(roles), 1) - 0.5)
        errors = 1.96 * value * np.array([row.law.error for row in role_rows])
        panel.errorbar(place, value, errors, fmt=style["marker"], color=style["color"], ms=5, lw=1, label=role)
    if declared:
        panel.axhline(1.0, color=NEUTRAL, lw=0.8)
    low, high = panel.get_ylim()
    if low > 0 and high / low > 2:
        panel.set_yscale("log")
        panel.yaxis.set_major_formatter("{x:g}")
        if high / low < 20:
            panel.yaxis.set_minor_formatter("{x:g}")
    panel.set(ylabel="σ over declared" if declared else "σ", xlabel="layer")
    panel.xaxis.set_major_locator(MaxNLocator(integer=True))
    finish(panel)
    if axes is None:
        legend_below(panels)
    return panels
