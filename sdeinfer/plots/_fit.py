"""Marginal posteriors, the mixing of chains, and the innovations of layers. Tests: `tests/plots/test_over_depth.py`."""

import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import xarray as xr
from arviz_stats.base.array import array_stats
from arviz_stats.sampling_diagnostics import ess
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator
from scipy.stats import norm

from sdeinfer._arguments import checked
from sdeinfer._files import InputError
from sdeinfer.diagnostics import innovation_tests, known_truth
from sdeinfer.diagnostics._summary import HDI, draws_of, identified_of, parameters_of
from sdeinfer.diagnostics._thresholds import LEVEL
from sdeinfer.plots._style import NEUTRAL, SDE, WRONG, finish, legend_below, look, one_panel, panels_of, symbol_of

TITLE_CHARACTERS = 22
"""Characters of a title of one line, of which a third of a figure has room."""

INTERVAL_DISTANCE = 0.09
"""Distance of the intervals of two posteriors, in heights of the density."""


@checked
def plot_posterior(
    post: xr.DataTree | Mapping[str, xr.DataTree],
    *,
    parameters: Sequence[str] | None = None,
    axes: Axes | Iterable[Axes] | None = None,
) -> list[Axes]:
    """Plot marginal posteriors with their 94 % intervals, and the truth as a dashed line if it is known.

    The title has mean and standard deviation of a single posterior. Panels hold 99 % of the draws, and the truth.

    Arguments:
        post: the result of `fit`, or several by their labels, which share panels.
        parameters: which ones, in this order; by default those that data of one width identify.
        axes: where to plot, one for each parameter, of which the last gets the legend; None for a new figure.

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
    for name, panel in zip(names, panels, strict=True):
        draws = {label: sample[name].values.ravel() for label, sample in zip(posts, samples, strict=True)}
        _panel(panel, draws, {values[name] for values in known if name in values})
    titles = [_title(name, [sample[name].values for sample in samples]) for name in names]
    narrow = max(map(len, titles)) > TITLE_CHARACTERS
    for title, panel in zip(titles, panels, strict=True):
        panel.set_title(title.replace(" = ", "\n") if narrow else title, fontsize="medium")
    if len(posts) > 1 and axes is None:
        legend_below(panels)
    elif len(posts) > 1:
        panels[-1].legend(frameon=False, fontsize="small")
    return panels


def _panel(panel: Axes, draws: Mapping[str, np.ndarray], truths: set[float]) -> None:
    """Plot the densities of the draws of one parameter, and below them their intervals and means."""
    # The bulk of a posterior with a long tail stays legible.
    shown = [*np.ravel([np.quantile(values, [0.005, 0.995]) for values in draws.values()]), *truths]
    margin = 0.05 * (max(shown) - min(shown))
    low, high = min(shown) - margin, max(shown) + margin
    colours = [SDE] if len(draws) == 1 else [look(number)["color"] for number in range(len(draws))]
    peak = 0.0
    for (label, values), colour in zip(draws.items(), colours, strict=True):
        inside = values[(low <= values) & (values <= high)]
        if np.ptp(inside) > 0:
            x, density, _ = array_stats.kde(inside)
            panel.plot(x, density, color=colour, label=label or None)
            peak = max(peak, density.max())
    peak = peak or 1.0
    for number, (values, colour) in enumerate(zip(draws.values(), colours, strict=True)):
        below = -INTERVAL_DISTANCE * number * peak
        panel.plot(array_stats.hdi(values, prob=HDI), [below, below], color=colour)
        panel.plot(values.mean(), below, "o", color=colour)
    for truth in truths:
        panel.axvline(truth, color=NEUTRAL, linestyle="--", lw=1.2, zorder=0)
    panel.set(xlim=(low, high), ylim=(-(0.05 + INTERVAL_DISTANCE * (len(draws) - 1)) * peak, 1.05 * peak), yticks=[])
    panel.xaxis.set_major_locator(MaxNLocator(3, steps=[1, 2, 5, 10]))
    panel.tick_params(axis="x", labelsize="small")
    panel.spines["left"].set_visible(False)
    finish(panel)


def _title(name: str, draws: Sequence[np.ndarray]) -> str:
    """The symbol of a parameter, with mean and sd of a single posterior, to two digits of the sd."""
    symbol = symbol_of(name)
    if len(draws) > 1:
        return symbol
    mean, sd = draws[0].mean(), draws[0].std()
    digits = max(0, 1 - math.floor(math.log10(sd))) if sd > 0 else 3
    numbers = f"{mean:.{digits}f} ± {sd:.{digits}f}"
    if len(numbers) > TITLE_CHARACTERS:
        numbers = f"{mean:.3g} ± {sd:.2g}"
    return f"{symbol} = {numbers.replace('-', '−')}"


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
