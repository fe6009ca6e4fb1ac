"""Densities of one statistic over networks and by the SDE."""

import numpy as np
from jaxtyping import Float
from matplotlib.axes import Axes
from numpy.typing import ArrayLike
from scipy.stats import gaussian_kde

from sdeinfer._files import InputError
from sdeinfer.plots._style import NETWORKS, SDE, finish, one_panel

BINS = 24
POINTS = 400

FEWEST = 3
"""Least number of samples for a kernel density."""

MARGIN = 0.05
"""Margin on either side, as a fraction of the range of all samples."""


def plot_densities(
    networks: ArrayLike,
    sde: ArrayLike,
    *,
    support: tuple[float, float] = (-np.inf, np.inf),
    axes: Axes | None = None,
) -> Axes:
    """Plot the density of one statistic over networks, as histogram and kernel density, and by the SDE.

    Samples that are not finite are left out; the legend counts those that remain. Networks have a histogram and a
    kernel density, the SDE a kernel density; fewer than three samples, or equal ones, have a histogram only.

    Arguments:
        networks: the statistic of networks, shape (networks,).
        sde: the statistic of paths of the SDE, shape (paths,).
        support: the values that the statistic can take, beyond which no density is drawn.
        axes: where to plot, without a legend; None for a new figure with one.

    Raises:
        InputError: for other shapes, and where no sample is finite.

    Example:
        ```python
        axes = plots.plot_densities(rho_networks, rho_sde, support=(-1, 1))
        axes.set_xlabel("correlation between tokens ρ")
        ```
    """
    seen, predicted = _finite("networks", networks), _finite("sde", sde)
    together = np.concatenate([seen, predicted])
    if not len(together):
        raise InputError("networks, sde: no sample is finite")
    panel = one_panel(axes)
    margin = MARGIN * (np.ptp(together) or 1.0)
    low, high = max(together.min() - margin, support[0]), min(together.max() + margin, support[1])
    grid, bins = np.linspace(low, high, POINTS), np.linspace(low, high, BINS + 1)
    for name, values, colour, style in (("networks", seen, NETWORKS, "-"), ("SDE", predicted, SDE, "--")):
        label = f"{name} ({len(values)})"
        smooth = len(values) >= FEWEST and np.ptp(values) > 0
        if len(values) and (colour == NETWORKS or not smooth):
            panel.hist(values, bins, density=True, color=colour, alpha=0.25, label=None if smooth else label)
        if smooth or not len(values):
            density = gaussian_kde(values)(grid) if smooth else np.full(POINTS, np.nan)
            panel.plot(grid, density, color=colour, linestyle=style, label=label)
    panel.set_ylabel("density")
    return finish(panel, legend=axes is None)


def _finite(argument: str, values: ArrayLike) -> Float[np.ndarray, " samples"]:
    flat = np.asarray(values, float)
    if flat.ndim != 1:
        raise InputError(f"{argument}: the shape (samples,) is needed, got {flat.shape}")
    return flat[np.isfinite(flat)]
