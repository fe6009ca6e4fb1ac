"""Colours, sizes, frames and legends that all figures share. Tests: `tests/plots/test_style.py`."""

from collections.abc import Iterable, Sequence
from typing import Any, cast

from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from sdeinfer._files import InputError
from sdeinfer.parameters import SYMBOLS
from sdeinfer.plots._log_axis import few_ticks

NETWORKS, SDE, NEUTRAL = "#d1495b", "#2e5eaa", "#777777"
WRONG = NETWORKS
"""Colour of failures, and of networks that should be rare."""

STYLES = ("-", "--", "-.", ":")

WIDTH = 5.2
"""Width of a figure in inches: text of 8 to 10 points stays legible where the figure is 400 pixels wide."""


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
