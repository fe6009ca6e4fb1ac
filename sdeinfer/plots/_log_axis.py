"""Ticks of log axes: a few powers of ten, and plain numbers near 1. Tests: `tests/plots/test_style.py`."""

import math
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import LogFormatterSciNotation, LogLocator

DECADES = 6
"""Axes of more decades have ticks at every second, third, fifth, tenth, … power of ten."""

PLAIN = (1e-3, 1e4)
"""Within these limits of an axis ticks are numbers, such as 0.5, in place of powers."""


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
