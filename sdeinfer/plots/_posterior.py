"""The posterior of the parameters and the mixing of its chains, by arviz-plots."""

from collections.abc import Hashable, Mapping, Sequence
from typing import cast

import arviz_plots
import xarray as xr
from arviz_base.labels import MapLabeller
from arviz_plots.plot_collection import PlotCollection
from matplotlib import pyplot
from matplotlib.figure import Figure

from sdeinfer.diagnostics import HDI, identified_of, known_truth, parameters_of
from sdeinfer.parameters import SYMBOLS


def labels_of(names: Sequence[str]) -> Mapping[Hashable, Hashable]:
    """Symbols of parameters by their names; those of a part of a stack after the part's name."""
    split = {name: name.rpartition(".") for name in names}
    return {name: f"{part}{dot}{SYMBOLS[own]}" for name, (part, dot, own) in split.items() if own in SYMBOLS}


def plot_posterior(post: xr.DataTree) -> Figure:
    """Plot marginal posteriors with their 94 % intervals, and the truth as a dashed line if it is known."""
    names = parameters_of(post)
    plot = arviz_plots.plot_dist(
        post,
        var_names=names,
        ci_kind="hdi",
        ci_prob=HDI,
        labeller=MapLabeller(var_name_map=labels_of(names)),
        backend="matplotlib",
        col_wrap=3,
        figure_kwargs={"figsize": (9, 2.6 * -(-len(names) // 3)), "layout": "constrained"},
    )
    truth = {name: value for name, value in known_truth(post).items() if name in names}
    if truth:
        arviz_plots.add_lines(plot, truth)
    return _closed(plot)


def plot_ranks(post: xr.DataTree) -> Figure:
    """Plot fractional ranks of each chain's draws among all draws: flat lines within the band if the chains mix."""
    names = identified_of(post)
    plot = arviz_plots.plot_rank(
        post,
        var_names=names,
        labeller=MapLabeller(var_name_map=labels_of(names)),
        backend="matplotlib",
        figure_kwargs={"figsize": (3 * len(names), 2.6), "layout": "constrained"},
    )
    return _closed(plot)


def _closed(plot: PlotCollection) -> Figure:
    """The figure, removed from pyplot's list of open figures, which would keep it in memory."""
    figure = cast(Figure, plot.get_viz("figure"))
    pyplot.close(figure)
    return figure
