"""Mixing of the chains of a fit, and the innovations of the layers. Tests: `tests/plots/test_over_depth.py`."""

import math
from collections.abc import Iterable

import numpy as np
import xarray as xr
from arviz_stats.base.array import array_stats
from arviz_stats.sampling_diagnostics import ess
from matplotlib.axes import Axes
from scipy.stats import norm

from sdeinfer._arguments import checked
from sdeinfer._files import InputError
from sdeinfer.diagnostics import innovation_tests
from sdeinfer.diagnostics._summary import draws_of, identified_of
from sdeinfer.diagnostics._thresholds import LEVEL
from sdeinfer.plots._style import NEUTRAL, SDE, WRONG, finish, legend_below, look, one_panel, panels_of, symbol_of


@checked
def plot_ranks(post: xr.DataTree, *, axes: Axes | Iterable[Axes] | None = None) -> list[Axes]:
    """Plot ranks of each chain's draws among all draws, less even ranks: curves stay near zero if the chains mix.

    A curve is the empirical distribution function of the fractional ranks of a chain, less that of even ranks. The
    title has the p-value of ArviZ's test of even ranks. This takes draws for independent, so they are thinned until
    those of a chain nearly are. Where p is below `LEVEL`, the ranks that the test finds uneven are black.

    Arguments:
        post: the result of `fit`.
        axes: where to plot, one for each identified parameter, without a legend; None for a new figure with one.

    Raises:
        InputError: for another number of axes, and for a single chain.
    """
    names, chains = identified_of(post), draws_of(post)
    if chains.sizes["chain"] < 2:
        raise InputError("post: ranks compare two chains or more, got 1")
    panels = panels_of(axes, len(names), columns=3, height=2.2)
    for number, (name, panel) in enumerate(zip(names, panels, strict=True)):
        # The mean over chains of each chain's own ESS: chains that disagree keep their draws.
        independent = float(ess(chains[name], sample_dims="draw", method="tail").mean())
        thinned = chains[name].isel(draw=slice(None, None, math.ceil(chains.sizes["draw"] / independent)))
        p = _plot_ranks(panel, thinned.transpose("chain", "draw"))
        value = f"p = {p:.2f}" if p > LEVEL else f"p < {LEVEL:g}"
        panel.set_title(f"{symbol_of(name)}, {value}", fontsize="medium")
        panel.set(xlabel="fractional rank", xticks=[0, 0.5, 1], ylabel="" if number % 3 else "ECDF difference")
        finish(panel)
    highest = max(abs(bound) for panel in panels for bound in panel.get_ylim())
    for number, panel in enumerate(panels):
        panel.set_ylim(-highest, highest)
        panel.tick_params(labelleft=axes is not None or number % 3 == 0)
    if axes is None:
        legend_below(panels)
    return panels


def _plot_ranks(panel: Axes, draws: xr.DataArray) -> float:
    """Plot the curve of each chain, shape (chain, draw), and what is uneven of it; p-value of even ranks."""
    ranks = np.asarray(array_stats.compute_ranks(draws.values.ravel(), relative=True)).reshape(draws.shape)
    p, between, within = array_stats.mchain_uniformity_test(ranks)
    x = np.linspace(0, 1, ranks.shape[1])
    for number, (chain, values) in enumerate(zip(draws["chain"].values.tolist(), ranks, strict=True)):
        curve = np.searchsorted(np.sort(values), x, side="right") / len(x) - x
        panel.plot(x, curve, color=look(number)["color"], lw=1.2, label=f"chain {chain}")
        uneven = (between[:, number] > 0) & (within > 0) & (p < LEVEL)
        panel.plot(x[uneven], curve[uneven], ".", color="black", ms=2.5, label="uneven" if uneven.any() else None)
    panel.axhline(0, color=NEUTRAL, lw=0.8, zorder=0)
    return float(p)


@checked
def plot_innovations(post: xr.DataTree, *, axes: Axes | None = None) -> Axes:
    """Plot the innovations in each direction, less their expectation, in standard errors.

    If the law holds, all directions are inside of the shaded band with probability 1 − `LEVEL`; those outside are
    crosses.

    Arguments:
        post: the result of `fit` for networks of which every layer was observed.
        axes: where to plot, without a legend; None for a new figure with one.
    """
    directions = innovation_tests(post).iloc[::-1]
    bound = float(norm.isf(LEVEL / len(directions) / 2))
    panel = one_panel(axes, height=0.7 + 0.3 * len(directions))
    panel.axvspan(-bound, bound, color=SDE, alpha=0.18, lw=0, label=f"{1 - LEVEL:.0%} for all together")
    panel.axvline(0, color=NEUTRAL, lw=1)
    for place, z in enumerate(directions["z"]):
        colour, marker, label = (SDE, "o", None) if abs(z) <= bound else (WRONG, "X", "outside")
        panel.plot(z, place, marker, color=colour, label=label)
    panel.set_yticks(range(len(directions)), [str(name) for name in directions.index])
    panel.set_xlabel("innovation − expectation (standard errors)")
    panel.spines["left"].set_visible(False)
    panel.tick_params(left=False)
    finish(panel)
    if axes is None:
        legend_below([panel])
    return panel
