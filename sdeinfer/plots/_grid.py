"""A number over a grid of two settings, and tokens on the circle and the sphere.

Tests: `tests/plots/test_samples.py`.
"""

import numpy as np
import xarray as xr
from matplotlib import colormaps, pyplot
from matplotlib.axes import Axes
from matplotlib.colors import Normalize
from matplotlib.patches import Circle
from numpy.typing import ArrayLike

from sdeinfer._files import InputError
from sdeinfer.plots._style import NETWORKS, NEUTRAL, WIDTH, one_panel


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
    # Darker is larger, in colour and in grey.
    colours, norm = colormaps["viridis_r"], Normalize(low, high, clip=True)
    image = panel.imshow(np.clip(numbers, low, high), origin="lower", aspect="auto", cmap=colours, norm=norm)
    for (row, column), x in np.ndenumerate(numbers):
        light = np.isnan(x) or np.dot(colours(norm(x))[:3], (0.3, 0.59, 0.11)) > 0.5
        colour = "black" if light else "white"
        panel.text(column, row, str(texts[row, column]), ha="center", va="center", fontsize="small", color=colour)
    rows, columns = (str(dim) for dim in values.dims)
    panel.set(xlabel=columns, ylabel=rows)
    panel.set_xticks(range(values.sizes[columns]), _ticks(values[columns]))
    panel.set_yticks(range(values.sizes[rows]), _ticks(values[rows]))
    beyond = {(False, False): "neither", (True, False): "min", (False, True): "max", (True, True): "both"}
    extend = beyond[bool((numbers < low).any()), bool((numbers > high).any())]
    name = "" if values.name is None else str(values.name)
    unit = f" ({values.attrs['units']})" if "units" in values.attrs else ""
    pyplot.colorbar(image, ax=panel, label=name + unit, extend=extend)
    return panel


def plot_tokens(tokens: ArrayLike, *, colours: ArrayLike | None = None, axes: Axes | None = None) -> Axes:
    """Plot tokens on the unit circle, or on the sphere as seen from the direction (1, 1, 1): one frame of a trajectory.

    Arguments:
        tokens: tokens, shape (n, 2) or (n, 3), scaled to norm 1.
        colours: a colour for each token; None for one colour.
        axes: where to plot; None for a new figure.

    Raises:
        InputError: for other shapes.
    """
    x = np.asarray(tokens, float)
    if x.ndim != 2 or x.shape[1] not in (2, 3):
        raise InputError(f"tokens: shape (n, 2) or (n, 3) is needed, got {x.shape}")
    x = x / np.linalg.norm(x, axis=1, keepdims=True)
    if colours is not None and len(np.asarray(colours)) != len(x):
        raise InputError(f"colours: {len(x)} are needed, got {len(np.asarray(colours))}")
    panel = one_panel(axes, height=WIDTH)
    panel.add_patch(Circle((0, 0), 1, fill=False, color=NEUTRAL, linewidth=0.8))
    flat, front = x, np.ones(len(x), bool)
    if x.shape[1] == 3:
        view, right = np.ones(3) / 3**0.5, np.array([-1.0, 1.0, 0.0]) / 2**0.5
        flat, front = x @ np.stack([right, np.cross(view, right)], axis=1), x @ view >= 0
    chosen = np.full(len(x), NETWORKS, object) if colours is None else np.asarray(colours, object)
    for side, opacity in ((~front, 0.2), (front, 0.7)):
        panel.scatter(*flat[side].T, c=list(chosen[side]), s=14, alpha=opacity, linewidths=0)
    panel.set(xlim=(-1.15, 1.15), ylim=(-1.15, 1.15), aspect="equal")
    panel.set_axis_off()
    return panel


def _ticks(coordinate: xr.DataArray) -> list[str]:
    return [f"{x:g}" if isinstance(x, float | int) else str(x) for x in coordinate.values.tolist()]
