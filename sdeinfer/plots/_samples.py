"""Samples of one statistic: its density, and a line with a band over a number."""

from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np
import pandas as pd
from jaxtyping import Float
from matplotlib.axes import Axes
from numpy.typing import ArrayLike
from scipy.stats import gaussian_kde

from sdeinfer._files import InputError
from sdeinfer.plots._style import NETWORKS, SDE, finish, look, one_panel


def plot_densities(
    networks: ArrayLike,
    sde: ArrayLike,
    *,
    support: tuple[float, float] = (-np.inf, np.inf),
    law: str = "SDE",
    axes: Axes | None = None,
) -> Axes:
    """Plot the density of one statistic over networks, as histogram and kernel density, and by the SDE.

    Samples that are not finite are left out; the legend counts those that remain. Networks have a histogram and a
    kernel density, the SDE a kernel density; fewer than three samples, or equal ones, have a histogram only.

    Arguments:
        networks: the statistic of networks, shape (networks,).
        sde: the statistic of paths of the SDE, shape (paths,).
        support: the values that the statistic can take, beyond which no density is drawn.
        law: name of the second sample in the legend, where it is not of the SDE.
        axes: where to plot, without a legend; None for a new figure with one.

    Raises:
        InputError: for other shapes, and where no sample is finite.
    """
    samples = _finite_samples("networks", networks), _finite_samples("sde", sde)
    counts = len(samples[0]), len(samples[1])
    return densities(samples, counts, support=support, law=law, axes=axes)


def densities(
    samples: tuple[np.ndarray, np.ndarray],
    counts: tuple[int, int],
    *,
    support: tuple[float, float],
    law: str,
    axes: Axes | None,
) -> Axes:
    """Plot densities of finite samples of networks and of a law, with these counts in the legend."""
    together = np.concatenate(samples)
    if not len(together):
        raise InputError("networks, sde: no sample is finite")
    panel = one_panel(axes)
    margin = 0.05 * (np.ptp(together) or 1.0)
    low, high = max(together.min() - margin, support[0]), min(together.max() + margin, support[1])
    grid, bins = np.linspace(low, high, 400), np.linspace(low, high, 25)
    looks = (("networks", NETWORKS, "-"), (law, SDE, "--"))
    for (name, colour, style), values, count in zip(looks, samples, counts, strict=True):
        label = f"{name} ({count})"
        smooth = len(values) >= 3 and np.ptp(values) > 0
        if len(values) and (colour == NETWORKS or not smooth):
            panel.hist(values, bins, density=True, color=colour, alpha=0.25, label=None if smooth else label)
        if smooth or not len(values):
            density = gaussian_kde(values)(grid) if smooth else np.full(len(grid), np.nan)
            panel.plot(grid, density, color=colour, linestyle=style, label=label)
    panel.set_ylabel("density")
    return finish(panel, legend=axes is None)


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
    """
    points = np.asarray(x, float)
    arrays = {label: np.asarray(array, float) for label, array in samples.items()}
    if points.ndim != 1 or not points.size:
        raise InputError(f"x: the shape (points,) is needed, got {points.shape}")
    for label, values in arrays.items():
        if values.ndim != 2 or values.shape[1] != len(points) or not len(values):
            raise InputError(f"samples: {label!r} needs the shape (samples, {len(points)}), got {values.shape}")
    if interval is not None and not 0 <= interval[0] < interval[1] <= 1:
        raise InputError(f"interval: levels that increase within [0, 1] are needed, got {interval}")
    if line not in ("median", "mean"):
        raise InputError(f"line: median or mean is needed, got {line!r}")
    panel = one_panel(axes)
    before = len(panel.get_legend_handles_labels()[0])
    for number, (label, values) in enumerate(arrays.items(), before):
        style = look(number)
        if interval is not None:
            low, high = _quantiles(values, interval)
            inside, edge = (style["color"], 0.2), (style["color"], 0.7)
            panel.fill_between(points, low, high, fc=inside, ec=edge, ls=style["linestyle"], lw=0.7)
        heights = _quantiles(values, [0.5])[0] if line == "median" else _open(pd.DataFrame(values).mean())
        # At most twelve markers.
        panel.plot(points, heights, **style, ms=4.5, markevery=-(-len(points) // 12), label=label)
    return finish(panel, legend=axes is None)


def _finite_samples(argument: str, values: ArrayLike) -> Float[np.ndarray, " samples"]:
    flat = np.asarray(values, float)
    if flat.ndim != 1:
        raise InputError(f"{argument}: the shape (samples,) is needed, got {flat.shape}")
    return flat[np.isfinite(flat)]


def _quantiles(
    values: Float[np.ndarray, "samples points"], levels: Sequence[float]
) -> Float[np.ndarray, "levels points"]:
    """Quantiles of samples that are not NaN; NaN where they are infinite."""
    table = pd.DataFrame(values)
    with np.errstate(invalid="ignore"):  # differences of infinite samples
        linear, below, above = (table.quantile(levels, interpolation=rule) for rule in ("linear", "lower", "higher"))
    # Without the interpolation from one sample to the next, which may be infinite.
    return _open(linear.mask(below == above, below))


def _open(values: pd.DataFrame | pd.Series) -> np.ndarray:
    return values.where(np.isfinite(values)).to_numpy()
