"""Gradient norms over depth, the SDE's law and networks (Fig. 2)."""

import numpy as np
from matplotlib.axes import Axes

from sdeinfer.criteria import GradientNorms
from sdeinfer.plots._quantiles import PROBABILITIES, draw_networks, draw_sde
from sdeinfer.plots._style import finish, legend_below, one_panel


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
    panel = one_panel(axes, height=3.8)
    draw_sde(panel, found.times, _quantiles(found, token), population="networks")
    if networks is not None:
        draw_networks(panel, networks.times, _quantiles(networks, token))
    panel.set(yscale="log", xlabel="depth-time t = ℓ/n", ylabel="squared gradient norm / n")
    finish(panel, legend=False)
    if axes is None:
        legend_below([panel])
    return panel


def _quantiles(found: GradientNorms, token: int) -> np.ndarray:
    """Those that are drawn, of one token's norms; NaN instead of +∞, which opens a band."""
    norms = found.quantiles(np.array(PROBABILITIES))[..., token]
    return np.where(np.isfinite(norms), norms, np.nan)
