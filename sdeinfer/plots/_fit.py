"""A posterior and the mixing of its chains, by arviz-plots, and the innovations of the layers.

Tests: `tests/plots/test_over_depth.py`.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import arviz_plots
import numpy as np
import xarray as xr
from arviz_base.labels import MapLabeller
from arviz_plots.plot_collection import PlotCollection
from arviz_stats.sampling_diagnostics import ess
from matplotlib.axes import Axes
from scipy.stats import norm

from sdeinfer._arguments import checked
from sdeinfer._files import InputError
from sdeinfer.diagnostics import innovation_tests, known_truth
from sdeinfer.diagnostics._summary import HDI, draws_of, identified_of, parameters_of
from sdeinfer.diagnostics._thresholds import LEVEL
from sdeinfer.parameters import SYMBOLS
from sdeinfer.plots._style import NEUTRAL, SDE, WRONG, finish, one_panel, panels_of


@checked
def plot_posterior(post: xr.DataTree, *, axes: Axes | Iterable[Axes] | None = None) -> list[Axes]:
    """Plot marginal posteriors with their 94 % intervals, and the truth as a dashed line if it is known.

    Arguments:
        post: the result of `fit`.
        axes: where to plot, one for each parameter; None for a new figure.

    Raises:
        InputError: for another number of axes.
    """
    names = parameters_of(post)
    panels = panels_of(axes, len(names), columns=2, height=2.0)
    draws = draws_of(post)[names]
    # Keeps a number legible on the dashed line of the truth.
    behind = {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1}
    visuals = {"dist": {"color": SDE}, "point_estimate_text": {"bbox": behind}}
    plot = _plot(arviz_plots.plot_dist, draws, panels, {}, ci_kind="hdi", ci_prob=HDI, visuals=visuals)
    truth = {name: value for name, value in known_truth(post).items() if name in names}
    if truth:
        arviz_plots.add_lines(plot, truth)
    for name, panel in zip(names, panels, strict=True):
        # The bulk of a posterior with a long tail stays legible.
        low, high = draws[name].quantile([0.005, 0.995]).values
        margin = 0.05 * (high - low)
        true = truth.get(name, low)
        panel.set_xlim(min(low, true) - margin, max(high, true) + margin)
    return panels


@checked
def plot_ranks(post: xr.DataTree, *, axes: Axes | Iterable[Axes] | None = None) -> list[Axes]:
    """Plot fractional ranks of each chain's draws among all draws: flat lines if the chains mix.

    ArviZ's test of even ranks takes draws for independent, so they are thinned until those of a chain nearly are.

    Arguments:
        post: the result of `fit`.
        axes: where to plot, one for each identified parameter; None for a new figure.

    Raises:
        InputError: for another number of axes, and for a single chain.
    """
    names, chains = identified_of(post), draws_of(post)
    if chains.sizes["chain"] < 2:
        raise InputError("post: ranks compare two chains or more, got 1")
    panels = panels_of(axes, len(names), columns=2, height=2.0)
    # arviz-plots counts chains from 0, whatever their labels.
    draws = chains[names].assign_coords(chain=np.arange(chains.sizes["chain"]))
    for name, panel in zip(names, panels, strict=True):
        # The mean over chains of each chain's own ESS: chains that disagree keep their draws.
        independent = float(ess(draws[name], sample_dims="draw", method="tail").mean())
        thinned = draws[[name]].isel(draw=slice(None, None, math.ceil(draws.sizes["draw"] / independent)))
        _plot(arviz_plots.plot_rank, thinned, [panel], {"color": ["chain"], "overlay": ["chain"]})
    return panels


@checked
def plot_innovations(post: xr.DataTree, *, axes: Axes | None = None) -> Axes:
    """Plot the innovations in each direction, less their expectation, in standard errors.

    If the law holds, at least one direction falls outside the shaded band with probability `LEVEL`; those that do are
    crosses.

    Arguments:
        post: the result of `fit` for networks of which every layer was observed.
        axes: where to plot; None for a new figure.
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


def _plot(
    function: Callable[..., PlotCollection],
    draws: xr.Dataset,
    panels: Sequence[Axes],
    aesthetics: dict[str, list[str]],
    **settings: Any,
) -> PlotCollection:
    """Plot by arviz-plots on given panels, one for each variable, with its symbol."""
    places = {"plot": panels, "row_index": range(len(panels)), "col_index": [0] * len(panels)}
    groups = {
        group: xr.Dataset({name: ((), value) for name, value in zip(draws, values, strict=True)})
        for group, values in places.items()
    }
    collection = PlotCollection(draws, xr.DataTree.from_dict(groups), aes=aesthetics, backend="matplotlib")
    names = [str(name) for name in draws]
    # The symbol of a part of a stack comes after the part's name.
    parts = {name: name.rpartition(".") for name in names}
    symbols = {
        name: f"{part}{dot}{SYMBOLS[parameter]}"
        for name, (part, dot, parameter) in parts.items()
        if parameter in SYMBOLS
    }
    labels: Any = MapLabeller(var_name_map={**symbols})
    tree = xr.DataTree.from_dict({"posterior": draws})
    return function(tree, var_names=names, plot_collection=collection, labeller=labels, **settings)
