"""Five quantiles of a law over depth: bands by the SDE, and marks of networks."""

import numpy as np
from jaxtyping import Float
from matplotlib.axes import Axes

from sdeinfer.plots._style import NETWORKS, SDE, finish, legend_below, one_panel

PROBABILITIES = (0.05, 0.25, 0.5, 0.75, 0.95)

type Quantiles = tuple[Float[np.ndarray, " _"], Float[np.ndarray, "5 _"]]
"""Places, and the quantiles at `PROBABILITIES` there."""


def plot_quantiles(
    sde: Quantiles, networks: Quantiles | None, *, population: str, axes: Axes | None, **labels: str
) -> Axes:
    """Plot the SDE's median and bands of 50 % and 90 % of a population, and networks' median and four other quantiles.

    A band is open where an end is NaN. `labels` are properties of the axes.
    """
    panel = one_panel(axes, height=3.8)
    x, quantiles = sde
    for low, high, share, alpha in ((0, -1, "90%", 0.18), (1, -2, "50%", 0.3)):
        label = f"SDE, {share} of {population}"
        panel.fill_between(x, quantiles[low], quantiles[high], color=SDE, alpha=alpha, lw=0, label=label)
    panel.plot(x, quantiles[2], color=SDE, label="SDE, median")
    if networks is not None:
        x, quantiles = networks
        panel.plot(x, quantiles[2], "o", color=NETWORKS, ms=5, label="networks, median")
        for place in (0, 1, 3, 4):
            label = "_" if place else "networks, 5, 25, 75 and 95%"
            panel.plot(x, quantiles[place], "_", color=NETWORKS, ms=9, mew=2, label=label)
    panel.set(**labels)
    finish(panel)
    if axes is None:
        legend_below([panel])
    return panel
