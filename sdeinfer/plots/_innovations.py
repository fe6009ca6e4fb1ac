"""One-step innovations of the layers in each direction."""

import xarray as xr
from matplotlib.figure import Figure
from scipy.stats import norm

from sdeinfer.diagnostics import LEVEL, innovation_tests, observed

GOOD, BAD = "#2e5eaa", "#d1495b"


def plot_innovations(post: xr.DataTree) -> Figure:
    """Plot the innovations in each direction, less their expectation, in standard errors.

    If the law holds, at least one direction falls outside the shaded band with probability `LEVEL`.
    """
    directions = innovation_tests(post, observed(post)).iloc[::-1]
    bound = float(norm.isf(LEVEL / len(directions) / 2))
    figure = Figure(figsize=(7, 0.6 + 0.35 * len(directions)), layout="constrained")
    axes = figure.subplots()
    axes.axvspan(-bound, bound, color=GOOD, alpha=0.12, lw=0)
    axes.axvline(0, color="#98a2b3", lw=1)
    colours = [GOOD if abs(z) <= bound else BAD for z in directions["z"]]
    axes.scatter(directions["z"], range(len(directions)), c=colours, zorder=3)
    axes.set_yticks(range(len(directions)), [str(name) for name in directions.index])
    axes.set_xlabel("innovations of the layers less their expectation, in standard errors")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(left=False)
    return figure
