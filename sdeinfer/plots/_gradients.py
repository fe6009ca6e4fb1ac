"""Gradient norms over depth, the SDE's law and networks (Fig. 2)."""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from sdeinfer.criteria import GradientNorms

NETWORKS, SDE = "#d1495b", "#2e5eaa"


def plot_gradient_norms(
    found: GradientNorms, networks: GradientNorms | None = None, *, token: int = 0, axes: Axes | None = None
) -> Axes:
    """Plot median and bands of squared gradient norms over depth-time t = ℓ/n, of the SDE and of networks.

    A band is left open where its upper end is +∞, since too many paths explode.

    Arguments:
        found: the result of `gradient_norms`.
        networks: norms of networks in the same units, as `GradientNorms(layers / width, norms)` with the norms of
            `sample_gradients`. The law of the SDE is that for one gradient of the outputs: `cotangents=1`.
        token: number of the token, from 0; 0 for gradients of weights.
        axes: where to plot, without a legend; None for a new figure with one.
    """
    own = Figure(figsize=(7, 4), layout="constrained").subplots() if axes is None else axes
    for low, high, alpha in ((0.05, 0.95, 0.18), (0.25, 0.75, 0.3)):
        band = found.quantiles([low, high])[..., token]
        band = np.where(np.isfinite(band), band, np.nan)
        own.fill_between(found.times, *band, color=SDE, alpha=alpha, lw=0, label=f"SDE, {high - low:.0%} of networks")
    own.plot(found.times, found.quantiles(0.5)[..., token], color=SDE, label="SDE, median")
    if networks is not None:
        low, middle, high = (networks.quantiles(levels)[..., token] for levels in ((0.05, 0.25), 0.5, (0.75, 0.95)))
        own.plot(networks.times, middle, "o", color=NETWORKS, ms=5, label="networks, median")
        for number, ends in enumerate((*low, *high)):
            name = None if number else "networks, 5, 25, 75 and 95%"
            own.plot(networks.times, ends, "_", color=NETWORKS, ms=9, mew=2, label=name)
    own.set(yscale="log", xlabel="depth-time t = ℓ/n", ylabel="squared gradient norm / n")
    own.spines[["top", "right"]].set_visible(False)
    if axes is None:
        own.legend(frameon=False, fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5))
    return own
