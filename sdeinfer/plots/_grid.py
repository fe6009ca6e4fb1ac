"""A number over a grid of two settings."""

import numpy as np
import xarray as xr
from matplotlib import colormaps, pyplot
from matplotlib.axes import Axes
from matplotlib.colors import Normalize
from numpy.typing import ArrayLike

from sdeinfer._files import InputError
from sdeinfer.plots._style import one_panel

COLOURS = "viridis_r"
"""Darker is larger, in colour and in grey."""

DARK = 0.5
"""Luminance of a cell below which its label is white."""


def plot_grid(
    values: xr.DataArray,
    *,
    labels: ArrayLike | None = None,
    limits: tuple[float, float] | None = None,
    axes: Axes | None = None,
) -> Axes:
    """Plot a number over a grid of two settings as colours, with a label in each cell.

    Cells are equally large: their centres are at 0, 1, … on both axes, where the ticks have the coordinates.

    Arguments:
        values: two dimensions, rows first, from below; the coordinates label the ticks, the names of the dimensions
            the axes, and `name` with `attrs["units"]` the colour bar; NaN have no colour.
        labels: texts of the cells, shape (rows, columns); None for the values with three digits.
        limits: values of the first and the last colour, which values beyond share; None for the finite values' range.
        axes: where to plot; None for a new figure.

    Raises:
        InputError: for other shapes, limits that do not increase, and without finite values.

    Example:
        ```python
        loss = xr.DataArray(losses, {"tau0": taus, "gamma": gammas}, name="loss", attrs={"units": "nats"})
        plots.plot_grid(loss, limits=(2.0, 3.1))
        ```
    """
    if values.ndim != 2:
        raise InputError(f"values: two dimensions are needed, got {values.dims}")
    numbers = values.to_numpy().astype(float)
    finite = numbers[np.isfinite(numbers)]
    if not len(finite):
        raise InputError("values: none is finite")
    low, high = (finite.min(), finite.max()) if limits is None else limits
    if limits is not None and not low < high:
        raise InputError(f"limits: two increasing numbers are needed, got {limits}")
    texts = np.array([[f"{x:.3g}" for x in row] for row in numbers]) if labels is None else np.asarray(labels, object)
    if texts.shape != numbers.shape:
        raise InputError(f"labels: the shape {numbers.shape} is needed, got {texts.shape}")
    panel = one_panel(axes)
    norm = Normalize(low, high, clip=True)
    image = panel.imshow(np.clip(numbers, low, high), origin="lower", aspect="auto", cmap=COLOURS, norm=norm)
    for (row, column), x in np.ndenumerate(numbers):
        light = np.isnan(x) or np.dot(colormaps[COLOURS](norm(x))[:3], (0.3, 0.59, 0.11)) > DARK
        colour = "black" if light else "white"
        panel.text(column, row, str(texts[row, column]), ha="center", va="center", fontsize="small", color=colour)
    rows, columns = (str(dim) for dim in values.dims)
    panel.set(xlabel=columns, ylabel=rows)
    panel.set_xticks(range(values.sizes[columns]), _ticks(values[columns]))
    panel.set_yticks(range(values.sizes[rows]), _ticks(values[rows]))
    beyond = {(False, False): "neither", (True, False): "min", (False, True): "max", (True, True): "both"}
    extend = beyond[bool((numbers < low).any()), bool((numbers > high).any())]
    pyplot.colorbar(image, ax=panel, label=_name(values), extend=extend)
    return panel


def _ticks(coordinate: xr.DataArray) -> list[str]:
    return [f"{x:g}" if isinstance(x, float | int) else str(x) for x in coordinate.values.tolist()]


def _name(values: xr.DataArray) -> str:
    """The name of the values, and their unit."""
    name = "" if values.name is None else str(values.name)
    return f"{name} ({values.attrs['units']})" if "units" in values.attrs else name
