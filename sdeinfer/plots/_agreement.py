"""The distance between networks and the SDE against the width."""

from collections.abc import Iterable

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.ticker import NullLocator

from sdeinfer.plots._style import NETWORKS, NEUTRAL, SDE, finish, legend_below, panels_of

LABELS = {"correlations": "correlations ρ", "log_eigenvalues": "log-eigenvalues of V", "overall": "all quantities"}


def plot_agreement(
    found: xr.Dataset, quantity: str | None = None, *, axes: Axes | Iterable[Axes] | None = None
) -> list[Axes]:
    """Plot the distances of `agreement` against the width n: raw, their floor, without the floor, and the fitted rate.

    Arguments:
        found: the result of `agreement`.
        quantity: one of its quantities; None for a panel of correlations and one of log-eigenvalues.
        axes: where to plot, one for each quantity, without a legend; None for a new figure with one.

    Raises:
        InputError: for another number of axes.

    Example:
        ```python
        found = si.agreement(layer, V0, time=0.25, widths=[16, 32, 64], networks=2000, key=key)
        plots.plot_agreement(found)
        ```
    """
    groups = [name for name in ("correlations", "log_eigenvalues") if name in found["quantity"].values]
    shown = groups if quantity is None else [quantity]
    panels = panels_of(axes, len(shown), height=3.0)
    for panel, name in zip(panels, shown, strict=True):
        _panel(panel, found.sel(quantity=name), LABELS.get(name, name))
    if axes is None:
        legend_below(panels)
    return panels


def _panel(axes: Axes, found: xr.Dataset, title: str) -> None:
    width = found["width"].values
    axes.plot(width, found["floor"], "--", color=NEUTRAL, label="floor: Wasserstein-1 of equal laws")
    error = found["distance_error"]
    axes.errorbar(width, found["distance"], error, fmt="o", color=NETWORKS, ms=5, label="Wasserstein-1 W")
    squared, error = found["squared"].values, found["squared_error"].values
    resolved = squared > error
    D = np.sqrt(np.where(resolved, squared, np.nan))
    ends = np.sqrt(np.maximum([squared - error, squared + error], 0))
    axes.errorbar(width, D, abs(ends - D), fmt="s", mfc="none", color=SDE, ms=5, label="D, without the floor")
    # A distance that cannot be told from zero is shown as an upper bound, two errors above its estimate.
    upper = np.sqrt(np.maximum(squared + 2 * error, 0))
    label = "D is below" if any(~resolved) else None
    axes.plot(width[~resolved], upper[~resolved], "v", mfc="none", color=SDE, ms=6, label=label)
    rate = float(found["rate"])
    if np.isfinite(rate):
        axes.plot(width, float(found["constant"]) * width**-rate, color=SDE, lw=1, label="D ∝ n^(−r)")
        title = f"{title}: r = {rate:.2f} ± {float(found['rate_error']):.2f}"
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(width, [str(n) for n in width])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_title(title, fontsize="medium")
    axes.set(xlabel="width n", ylabel="distance to the SDE (sd)")
    finish(axes)
