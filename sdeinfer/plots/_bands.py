"""A line and a band of samples over a number, for each of several labels."""

from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np
import pandas as pd
from jaxtyping import Float
from matplotlib.axes import Axes
from numpy.typing import ArrayLike

from sdeinfer._files import InputError
from sdeinfer.plots._style import finish, look, one_panel

MARKERS = 12
"""Number of markers on a line of many points."""


def plot_bands(
    x: ArrayLike,
    samples: Mapping[str, ArrayLike],
    *,
    interval: tuple[float, float] | None = (0.1, 0.9),
    line: Literal["median", "mean"] = "median",
    axes: Axes | None = None,
) -> Axes:
    """Plot the median or mean of samples over x, with a band between two of their quantiles, for each label.

    Labels differ in colour, line style and marker. The first is red, as networks are in all figures, and the second
    blue, as the SDE is; another call on the same axes continues the order. Samples that are NaN are left out. A sample
    that diverges is ±∞: the line and the band are open where they would be infinite.

    Arguments:
        x: shape (points,).
        samples: an array of shape (samples, points) for each label.
        interval: levels of the band's quantiles; None for no band.
        line: what the line shows.
        axes: where to plot, without a legend; None for a new figure with one.

    Raises:
        InputError: for other shapes, and for levels that do not increase within [0, 1].

    Example:
        ```python
        axes = plots.plot_bands(gammas, {"networks": seen, "SDE": predicted})
        axes.set(xlabel="γ", ylabel="stopping time")
        ```
    """
    points = np.asarray(x, float)
    arrays = {label: np.asarray(own, float) for label, own in samples.items()}
    _check(points, arrays, interval, line)
    panel = one_panel(axes)
    before = len(panel.get_legend_handles_labels()[0])
    for number, (label, values) in enumerate(arrays.items(), before):
        style = look(number)
        if interval is not None:
            low, high = _quantiles(values, interval)
            inside, edge = (style["color"], 0.2), (style["color"], 0.7)
            panel.fill_between(points, low, high, fc=inside, ec=edge, ls=style["linestyle"], lw=0.7)
        heights = _quantiles(values, [0.5])[0] if line == "median" else _finite(pd.DataFrame(values).mean())
        panel.plot(points, heights, **style, ms=4.5, markevery=-(-len(points) // MARKERS), label=label)
    return finish(panel, legend=axes is None)


def _check(
    points: np.ndarray, arrays: Mapping[str, np.ndarray], interval: tuple[float, float] | None, line: str
) -> None:
    if points.ndim != 1 or not points.size:
        raise InputError(f"x: the shape (points,) is needed, got {points.shape}")
    for label, values in arrays.items():
        if values.ndim != 2 or values.shape[1] != len(points) or not len(values):
            raise InputError(f"samples: {label!r} needs the shape (samples, {len(points)}), got {values.shape}")
    if interval is not None and not 0 <= interval[0] < interval[1] <= 1:
        raise InputError(f"interval: levels that increase within [0, 1] are needed, got {interval}")
    if line not in ("median", "mean"):
        raise InputError(f"line: median or mean is needed, got {line!r}")


def _quantiles(
    values: Float[np.ndarray, "samples points"], levels: Sequence[float]
) -> Float[np.ndarray, "levels points"]:
    """Quantiles of samples that are not NaN; NaN where they are infinite, which leaves a line or a band open."""
    table = pd.DataFrame(values)
    with np.errstate(invalid="ignore"):  # differences of infinite samples
        found, below, above = (table.quantile(levels, interpolation=each) for each in ("linear", "lower", "higher"))
    # Without the interpolation from one sample to the next, which may be infinite.
    return _finite(found.mask(below == above, below))


def _finite(found: pd.DataFrame | pd.Series) -> np.ndarray:
    return found.where(np.isfinite(found)).to_numpy()
