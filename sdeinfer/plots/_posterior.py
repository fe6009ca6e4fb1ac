"""Marginal posteriors. Tests: `tests/plots/test_over_depth.py`."""

import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import xarray as xr
from arviz_stats.base.array import array_stats
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from sdeinfer._arguments import checked
from sdeinfer._files import InputError
from sdeinfer.diagnostics import known_truth
from sdeinfer.diagnostics._summary import HDI, draws_of, identified_of, parameters_of
from sdeinfer.plots._style import NEUTRAL, SDE, finish, legend_below, look, panels_of, symbol_of

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
