"""Gradient norms over depth, the SDE's law and networks (Fig. 2)."""

import numpy as np
from matplotlib.axes import Axes

from sdeinfer.criteria import GradientNorms
from sdeinfer.plots._quantiles import PROBABILITIES, Quantiles, plot_quantiles


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

    Example:
        ```python
        found = si.criteria.gradient_norms(layer, V0, [0.0, 0.1, 0.2], time=0.25, paths=1024, key=key)
        plots.plot_gradient_norms(found)
        ```
    """
    of_networks = None if networks is None else _quantiles(networks, token)
    labels = {"yscale": "log", "xlabel": "depth-time t = ℓ/n", "ylabel": "squared gradient norm / n"}
    return plot_quantiles(_quantiles(found, token), of_networks, population="networks", axes=axes, **labels)


def _quantiles(found: GradientNorms, token: int) -> Quantiles:
    """Those that are drawn, of one token's norms; NaN instead of +∞, which opens a band."""
    norms = found.quantiles(np.array(PROBABILITIES))[..., token]
    return found.times, np.where(np.isfinite(norms), norms, np.nan)
