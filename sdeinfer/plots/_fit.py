"""A posterior and the mixing of its chains, by arviz-plots, and the innovations of the layers.

Tests: `tests/plots/test_over_depth.py`.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import arviz_plots
import numpy as np
import xarray as xr
from arviz_base.labels import MapLabeller
from arviz_plots.plot_collection import PlotCollection
from arviz_stats.sampling_diagnostics import ess
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from scipy.stats import norm

from sdeinfer._arguments import checked
from sdeinfer._files import InputError
from sdeinfer.diagnostics import innovation_tests, known_truth
from sdeinfer.diagnostics._summary import HDI, draws_of, identified_of, parameters_of
from sdeinfer.diagnostics._thresholds import LEVEL
from sdeinfer.parameters import SYMBOLS
from sdeinfer.plots._style import NEUTRAL, SDE, WRONG, finish, look, one_panel, panels_of


@checked
def plot_posterior(
    post: xr.DataTree | Mapping[str, xr.DataTree],
    *,
    parameters: Sequence[str] | None = None,
    axes: Axes | Iterable[Axes] | None = None,
) -> list[Axes]:
    """Plot marginal posteriors with their 94 % intervals, and the truth as a dashed line if it is known.

    The title has mean and standard deviation of a single posterior.

    Arguments:
        post: the result of `fit`, or several by their labels, which share panels.
        parameters: which ones, in this order; by default those that data of one width identify.
        axes: where to plot, one for each parameter; None for a new figure.

    Raises:
        InputError: for another number of axes, and for parameters that a posterior does not have.
    """
    posts: Mapping[str, xr.DataTree] = {"": post} if isinstance(post, xr.DataTree) else post
    if not posts:
        raise InputError("post: one posterior or more is needed, got none")
    first = next(iter(posts.values()))
    names = list(parameters or identified_of(first) or parameters_of(first))
    for label, tree in posts.items():
        latent = parameters_of(tree)
        if missing := [name for name in names if name not in latent]:
            raise InputError(f"parameters: {missing[0]} is not latent in the posterior{label and ' '}{label}")
    samples = [draws_of(tree)[names] for tree in posts.values()]
    known = [known_truth(tree) for tree in posts.values()]
    panels = panels_of(axes, len(names), columns=min(3, len(names)), height=2.0)
    for number, sample in enumerate(samples):
        colour = SDE if len(posts) == 1 else look(number)["color"]
        visuals: dict[str, Any] = {"dist": {"color": colour}, "credible_interval": {"color": colour}}
        visuals |= {"point_estimate": {"color": colour}, "point_estimate_text": False}
        _plot(arviz_plots.plot_dist, sample, panels, {}, ci_kind="hdi", ci_prob=HDI, visuals=visuals)
    for name, panel in zip(names, panels, strict=True):
        draws = [sample[name] for sample in samples]
        truths = {values[name] for values in known if name in values}
        for truth in truths:
            panel.axvline(truth, color=NEUTRAL, linestyle="--", lw=1.2, zorder=0)
        # The bulk of a posterior with a long tail stays legible.
        shown = [*np.ravel([values.quantile([0.005, 0.995]) for values in draws]), *truths]
        margin = 0.05 * (max(shown) - min(shown))
        panel.set_xlim(min(shown) - margin, max(shown) + margin)
        panel.set_title(_title(name, draws), fontsize="medium")
    if len(posts) > 1:
        handles = [Line2D([], [], color=look(number)["color"], label=label) for number, label in enumerate(posts)]
        panels[-1].legend(handles=handles, frameon=False, fontsize="small")
    return panels


def _title(name: str, draws: Sequence[xr.DataArray]) -> str:
    """The symbol of a parameter, with mean and sd of a single posterior, to two digits of the sd."""
    symbol = symbol_of(name)
    if len(draws) > 1:
        return symbol
    mean, sd = float(draws[0].mean()), float(draws[0].std())
    digits = max(0, 1 - math.floor(math.log10(sd))) if sd > 0 else 3
    return f"{symbol} = {mean:.{digits}f} ± {sd:.{digits}f}"


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
    labels: Any = MapLabeller(var_name_map={name: symbol_of(name) for name in names})
    tree = xr.DataTree.from_dict({"posterior": draws})
    return function(tree, var_names=names, plot_collection=collection, labeller=labels, **settings)


def symbol_of(name: str) -> str:
    """The symbol of a parameter; that of a part of a stack comes after the part's name."""
    part, dot, parameter = name.rpartition(".")
    return f"{part}{dot}{SYMBOLS[parameter]}" if parameter in SYMBOLS else name
