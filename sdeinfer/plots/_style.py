"""Colours, sizes and frames that all figures share."""

from collections.abc import Iterable
from typing import Any

from matplotlib import pyplot
from matplotlib.axes import Axes

from sdeinfer._files import InputError

NETWORKS, SDE, NEUTRAL = "#d1495b", "#2e5eaa", "#777777"

COLOURS = (NETWORKS, SDE, "#e3a22f", "#2f7d4f", "#7a5195")
"""One for each label, in its order."""

STYLES = ("-", "--", "-.", ":")
MARKERS = ("o", "s", "^", "D", "v")

WIDTH = 5.2
"""Width of a figure in inches: text of 9 to 10 points stays legible where the figure is 400 pixels wide."""

HEIGHT = 3.2
"""Height of a panel in inches."""


def one_panel(axes: Axes | None, *, height: float = HEIGHT) -> Axes:
    """The given axes, or those of a new figure."""
    return axes if axes is not None else new_panels(1, 1, height=height)[0]


def panels_of(
    axes: Axes | Iterable[Axes] | None, count: int, *, columns: int = 1, height: float = HEIGHT
) -> list[Axes]:
    """The given axes, or those of a new figure with a panel for each.

    Raises:
        InputError: for another number of axes than `count`.
    """
    if axes is None:
        return new_panels(count, columns, height=height)
    panels = [axes] if isinstance(axes, Axes) else list(axes)
    if len(panels) != count:
        raise InputError(f"axes: {count} are needed, got {len(panels)}")
    return panels


def new_panels(count: int, columns: int, *, height: float = HEIGHT) -> list[Axes]:
    """Panels of a new figure of pyplot, which a notebook shows at the end of its cell."""
    columns = min(columns, count)
    rows = -(-count // columns)
    figure, grid = pyplot.subplots(rows, columns, figsize=(WIDTH, height * rows), squeeze=False, layout="constrained")
    panels = list(grid.ravel())
    for axes in panels[count:]:
        figure.delaxes(axes)
    return panels[:count]


def look(number: int) -> dict[str, Any]:
    """Colour, line style and marker of a label, by its number: in print without colours labels still differ."""
    return {
        name: values[number % len(values)]
        for name, values in (("color", COLOURS), ("linestyle", STYLES), ("marker", MARKERS))
    }


def finish(axes: Axes, *, legend: bool) -> None:
    """Leave out the frame's upper and right side; add a legend."""
    axes.spines[["top", "right"]].set_visible(False)
    if legend:
        axes.legend(frameon=False, fontsize="small")
