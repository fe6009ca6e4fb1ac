"""Gradient norms over depth, the SDE's law and networks (Fig. 2)."""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from sdeinfer.criteria import GradientNorms
from sdeinfer.plots._correlations import NETWORKS, PROBABILITIES, SDE


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
    predicted = _quantiles(found, token)
    for place, name, alpha in ((0, "90%", 0.18), (1, "50%", 0.3)):
        band = predicted[place], predicted[-1 - place]
        own.fill_between(found.times, *band, color=SDE, alpha=alpha, lw=0, label=f"SDE, {name} of networks")
    own.plot(found.times, predicted[2], color=SDE, label="SDE, median")
    if networks is not None:
        observed = _quantiles(networks, token)
        own.plot(networks.times, observed[2], "o", color=NETWORKS, ms=5, label="networks, median")
        for place in (0, 1, 3, 4):
            name = None if place else "networks, 5, 25, 75 and 95%"
            own.plot(networks.times, observed[place], "_", color=NETWORKS, ms=9, mew=2, label=name)
    own.set(yscale="log", xlabel="depth-time t = ℓ/n", ylabel="squared gradient norm / n")
    own.spines[["top", "right"]].set_visible(False)
    if axes is None:
        own.legend(frameon=False, fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5))
    return own


def _quantiles(found: GradientNorms, token: int) -> np.ndarray:
    """Those that are drawn, of one token's norms; NaN instead of +∞, which opens a band."""
    norms = found.quantiles(np.array(PROBABILITIES))[..., token]
    return np.where(np.isfinite(norms), norms, np.nan)
