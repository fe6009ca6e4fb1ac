"""Colours, sizes, frames, legends and ticks of log axes that all figures share. Tests: `tests/plots/test_style.py`."""

import math
from collections.abc import Iterable, Sequence
from typing import Any, cast

import numpy as np
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import LogFormatterSciNotation, LogLocator

from sdeinfer._files import InputError
from sdeinfer.parameters import SYMBOLS

NETWORKS, SDE, NEUTRAL = "#d1495b", "#2e5eaa", "#777777"
WRONG = NETWORKS
"""Colour of failures, and of networks that should be rare."""

STYLES = ("-", "--", "-.", ":")

WIDTH = 5.2
"""Width of a figure in inches: text of 8 to 10 points stays legible where the figure is 400 pixels wide."""

DECADES = 6
"""Axes of more decades have ticks at every second, third, fifth, tenth, … power of ten."""

PLAIN = (1e-3, 1e4)
"""Within these limits of an axis ticks are numbers, such as 0.5, in place of powers."""


def one_panel(axes: Axes | None, *, height: float = 3.2) -> Axes:
    """The given axes, or those of a new figure."""
    return panels_of(axes, 1, height=height)[0]


def panels_of(axes: Axes | Iterable[Axes] | None, count: int, *, columns: int = 1, height: float = 3.2) -> list[Axes]:
    """The given axes, or `count` panels of a new figure, each `height` inches high; pyplot opens it for notebooks."""
    if axes is not None:
        given = [axes] if isinstance(axes, Axes) else list(axes)
        if len(given) != count:
            raise InputError(f"axes: {count} are needed, got {len(given)}")
        return given
    columns = min(columns, count)
    rows = -(-count // columns)
    layout = ConstrainedLayoutEngine(h_pad=0.08)
    figure, grid = pyplot.subplots(rows, columns, figsize=(WIDTH, height * rows), squeeze=False, layout=layout)
    for empty in grid.ravel()[count:]:
        figure.delaxes(empty)
    return grid.ravel()[:count].tolist()


def look(number: int) -> dict[str, Any]:
    """Colour, line style and marker of a label, by its number; ten labels differ in colour and in marker."""
    looks = {
        "color": (
            *(NETWORKS, SDE, "#e3a22f", "#2f7d4f", "#7a5195"),
            *("#4fb0de", "#8a5a2b", "#e88bb5", "#222222", "#97a01f"),
        ),
        "linestyle": STYLES,
        "marker": ("o", "s", "^", "D", "v", "P", "X", "<", "*", ">"),
    }
    return {name: values[number % len(values)] for name, values in looks.items()}


def finish(axes: Axes, *, legend: bool = False) -> Axes:
    """Leave out the upper and right sides of the frame, thin the ticks of log axes; add a legend where it fits best."""
    axes.spines[["top", "right"]].set_visible(False)
    few_ticks(axes)
    if legend:
        axes.legend(edgecolor="none", fontsize="small")
    return axes


def legend_below(panels: Sequence[Axes]) -> None:
    """Add one legend to a new figure, below its panels, in as many columns as its width has room for."""
    entries = {
        label: handle for axes in panels for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure = cast(Figure, panels[0].get_figure(root=True))
    # Inches of a handle and of a text of small size.
    column = (0.45 + 0.065 * max(map(len, entries), default=0)) * pyplot.rcParams["font.size"] / 10
    columns = min(4, len(entries), max(1, int(figure.get_figwidth() / column)))
    place: dict[str, Any] = {"loc": "outside lower center", "ncols": max(columns, 1)}
    figure.legend(list(entries.values()), list(entries), **place, frameon=False, fontsize="small")


def symbol_of(name: str) -> str:
    """The symbol of a parameter; that of a part of a stack comes after the part's name."""
    part, dot, parameter = name.rpartition(".")
    return f"{part}{dot}{SYMBOLS[parameter]}" if parameter in SYMBOLS else name


class FewDecades(LogLocator):
    """Ticks at six powers of ten or fewer, 10⁰ among them where it is on the axis."""

    def tick_values(self, vmin: float, vmax: float) -> Any:
        """The ticks between two limits, in either order."""
        low, high = sorted((vmin, vmax))
        if not 0 < low < high < math.inf:
            return super().tick_values(vmin, vmax)
        first, last = math.log10(low), math.log10(high)
        if last - first <= DECADES:
            return super().tick_values(vmin, vmax)
        step = next(step for step in (2, 3, 5, 10, 20, 30, 50, 100, 200) if (last - first) / step < DECADES)
        return 10.0 ** (step * np.arange(math.ceil(first / step), math.floor(last / step) + 1))


class PlainNearOne(LogFormatterSciNotation):
    """Numbers such as 0.5 and 20 on an axis within `PLAIN`, and powers of ten on others."""

    def __call__(self, x: float, pos: int | None = None) -> str:
        """The label of a tick, empty for most of the minor ones."""
        text = super().__call__(x, pos)
        low, high = sorted(self.axis.get_view_interval())  # pyright: ignore[reportOptionalMemberAccess]
        return f"{x:g}" if text and PLAIN[0] <= low and high <= PLAIN[1] else text


def few_ticks(axes: Axes) -> None:
    """Set the ticks of axes with a log scale, unless they were chosen."""
    for axis in (axes.xaxis, axes.yaxis):
        if axis.get_scale() == "log" and type(axis.get_major_locator()) is LogLocator:
            axis.set_major_locator(FewDecades())
            axis.set_major_formatter(PlainNearOne())
            axis.set_minor_formatter(PlainNearOne())
