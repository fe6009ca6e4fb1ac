"""The distance between networks and the SDE against the width."""

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure

NETWORKS, SDE, FLOOR = "#d1495b", "#2e5eaa", "#777777"
LABELS = {"correlations": "correlations ρ", "log_eigenvalues": "log-eigenvalues of V", "overall": "all quantities"}


def plot_agreement(found: xr.Dataset, quantity: str | None = None) -> Figure:
    """Plot the distances of `agreement` against the width n: raw, their floor, without the floor, and the fitted rate.

    Arguments:
        found: the result of `agreement`.
        quantity: one of its quantities; None shows correlations and log-eigenvalues side by side.
    """
    groups = [name for name in ("correlations", "log_eigenvalues") if name in found["quantity"].values]
    shown = groups if quantity is None else [quantity]
    figure = Figure(figsize=(4.5 * len(shown), 4), layout="constrained")
    panels = figure.subplots(1, len(shown), sharey=True, squeeze=False)[0]
    for axes, name in zip(panels, shown, strict=True):
        _panel(axes, found.sel(quantity=name), LABELS.get(name, name))
    panels[0].set_ylabel("distance between networks and SDE (sd)")
    return figure


def _panel(axes: Axes, found: xr.Dataset, title: str) -> None:
    width = found["width"].values
    axes.plot(width, found["floor"], "--", color=FLOOR, label="floor: Wasserstein-1 of equal laws")
    error = found["distance_error"]
    axes.errorbar(width, found["distance"], error, fmt="o", color=NETWORKS, ms=5, label="Wasserstein-1 W")
    squared, error = found["squared"].values, found["squared_error"].values
    resolved = squared > error
    D = np.sqrt(np.where(resolved, squared, np.nan))
    ends = np.sqrt(np.maximum(np.stack([squared - error, squared + error]), 0))
    reach = np.abs(ends - D)
    axes.errorbar(width, D, reach, fmt="s", mfc="none", color=SDE, ms=5, label="D, without the floor")
    # A distance that cannot be told from zero is shown as an upper bound, two errors above its estimate.
    upper = np.sqrt(np.maximum(squared + 2 * error, 0))
    label = "D is below" if any(~resolved) else None
    axes.plot(width[~resolved], upper[~resolved], "v", mfc="none", color=SDE, ms=6, label=label)
    rate, spread = float(found["rate"]), float(found["rate_error"])
    if np.isfinite(rate):
        line = float(found["constant"]) * width**-rate
        axes.plot(width, line, color=SDE, lw=1, label=f"D ∝ n^(−r), r = {rate:.2f} ± {spread:.2f}")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(width, [str(n) for n in width])
    axes.minorticks_off()
    axes.set(xlabel="width n", title=title)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize="small")
