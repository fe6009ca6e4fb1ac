"""Tokens on the circle and the sphere."""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Circle
from numpy.typing import ArrayLike

from sdeinfer._files import InputError
from sdeinfer.plots._style import NETWORKS, NEUTRAL, WIDTH, one_panel

BEHIND = 0.2
"""Opacity of tokens behind the sphere."""

MARGIN = 1.15
"""Half the width of the panel, in radii."""


def plot_tokens(tokens: ArrayLike, *, colours: ArrayLike | None = None, axes: Axes | None = None) -> Axes:
    """Plot tokens on the unit circle, or on the sphere as seen from the direction (1, 1, 1): one frame of a trajectory.

    Arguments:
        tokens: tokens, shape (n, 2) or (n, 3), scaled to norm 1.
        colours: a colour for each token; None for one colour.
        axes: where to plot; None for a new figure.

    Raises:
        InputError: for other shapes.

    Example:
        ```python
        for x, panel in zip(meanfield.solve(flow, start, times), panels):
            plots.plot_tokens(x, axes=panel)
        ```
    """
    x = np.asarray(tokens, float)
    if x.ndim != 2 or x.shape[1] not in (2, 3):
        raise InputError(f"tokens: shape (n, 2) or (n, 3) is needed, got {x.shape}")
    x = x / np.linalg.norm(x, axis=1, keepdims=True)
    if colours is not None and len(np.asarray(colours)) != len(x):
        raise InputError(f"colours: {len(x)} are needed, got {len(np.asarray(colours))}")
    panel = one_panel(axes, height=WIDTH)
    panel.add_patch(Circle((0, 0), 1, fill=False, color=NEUTRAL, linewidth=0.8))
    flat, front = (x, np.ones(len(x), bool)) if x.shape[1] == 2 else _projected(x)
    chosen = np.full(len(x), NETWORKS, object) if colours is None else np.asarray(colours, object)
    for side, opacity in ((~front, BEHIND), (front, 0.7)):
        panel.scatter(*flat[side].T, c=list(chosen[side]), s=14, alpha=opacity, linewidths=0)
    panel.set(xlim=(-MARGIN, MARGIN), ylim=(-MARGIN, MARGIN), aspect="equal")
    panel.set_axis_off()
    return panel


def _projected(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Points of the sphere on the plane across (1, 1, 1), and whether they are before it."""
    view = np.ones(3) / 3**0.5
    right = np.array([-1.0, 1.0, 0.0]) / 2**0.5
    return x @ np.stack([right, np.cross(view, right)], axis=1), x @ view >= 0
