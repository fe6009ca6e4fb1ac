"""One-step innovations of the layers in each direction."""

import xarray as xr
from matplotlib.axes import Axes
from scipy.stats import norm

from sdeinfer.diagnostics import LEVEL, innovation_tests
from sdeinfer.plots._style import NEUTRAL, SDE, WRONG, finish, one_panel


def plot_innovations(post: xr.DataTree, *, axes: Axes | None = None) -> Axes:
    """Plot the innovations in each direction, less their expectation, in standard errors.

    If the law holds, at least one direction falls outside the shaded band with probability `LEVEL`; those that do are
    crosses.

    Arguments:
        post: the result of `fit` for networks of which every layer was observed.
        axes: where to plot; None for a new figure.

    Example:
        ```python
        axes = plots.plot_innovations(post)
        axes.figure.savefig("innovations.pdf")
        ```
    """
    directions = innovation_tests(post).iloc[::-1]
    bound = float(norm.isf(LEVEL / len(directions) / 2))
    panel = one_panel(axes, height=0.7 + 0.3 * len(directions))
    panel.axvspan(-bound, bound, color=SDE, alpha=0.12, lw=0)
    panel.axvline(0, color=NEUTRAL, lw=1)
    for place, z in enumerate(directions["z"]):
        colour, marker = (SDE, "o") if abs(z) <= bound else (WRONG, "X")
        panel.plot(z, place, marker, color=colour)
    panel.set_yticks(range(len(directions)), [str(name) for name in directions.index])
    panel.set_xlabel("innovation − expectation (standard errors)")
    panel.spines["left"].set_visible(False)
    panel.tick_params(left=False)
    return finish(panel)
