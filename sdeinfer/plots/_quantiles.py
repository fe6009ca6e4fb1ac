"""Five quantiles of a law: bands by the SDE, and marks of networks."""

import numpy as np
from jaxtyping import Float
from matplotlib.axes import Axes

from sdeinfer.plots._style import NETWORKS, SDE

PROBABILITIES = (0.05, 0.25, 0.5, 0.75, 0.95)


def draw_sde(
    axes: Axes, x: Float[np.ndarray, " points"], quantiles: Float[np.ndarray, "5 points"], *, population: str
) -> None:
    """Draw the median and the bands of 50 % and 90 % of a population; a band is open where an end is NaN."""
    for low, high, share, alpha in ((0, -1, "90%", 0.18), (1, -2, "50%", 0.3)):
        label = f"SDE, {share} of {population}"
        axes.fill_between(x, quantiles[low], quantiles[high], color=SDE, alpha=alpha, lw=0, label=label)
    axes.plot(x, quantiles[2], color=SDE, label="SDE, median")


def draw_networks(axes: Axes, x: Float[np.ndarray, " points"], quantiles: Float[np.ndarray, "5 points"]) -> None:
    """Draw the median as a circle, and the four other quantiles as dashes."""
    axes.plot(x, quantiles[2], "o", color=NETWORKS, ms=5, label="networks, median")
    for number, place in enumerate((0, 1, 3, 4)):
        label = "_" if number else "networks, 5, 25, 75 and 95%"
        axes.plot(x, quantiles[place], "_", color=NETWORKS, ms=9, mew=2, label=label)
