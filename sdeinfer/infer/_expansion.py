"""The statistics of a law of finite width, expanded about the mode of the posterior.

A likelihood whose variances are expanded about the mode has there the value and the gradient of one that is not. The
mode is found by turns with the expansion, from a sample of the transitions; then all are reduced about it.
"""

import equinox as eqx
import jax.numpy as jnp
import numpy as np
import xarray as xr
from jaxtyping import Array, Float, PyTree
from numpyro.infer.util import constrain_fn

from sdeinfer.infer._mode import Mode, posterior_mode
from sdeinfer.infer._sandwich import at_widths, moments_at, sandwich
from sdeinfer.layers import Architecture
from sdeinfer.likelihood import (
    Moments,
    Path,
    PathStatistics,
    Program,
    path_layout,
    path_statistics,
    terms_by_block,
    unconstrained,
    variance_ratio,
)

SAMPLE = 16_384
"""How many transitions say where to expand and how the scores scatter; all, where there are fewer."""

ROUNDS = 6
CLOSE = 0.02
"""Two references whose ρ differ by no more are the same: what the expansion leaves out goes with the square."""


def prepare(model: Program, data: xr.Dataset) -> PyTree:
    """All that a program needs of the data: about the mode of the posterior, where its law is that of a finite width.

    Arguments:
        model: the program, with its options given.
        data: the observed networks.
    """
    if dict(model.options).get("law") == "finite-width" and model.path is not None:
        return expanded_statistics(model, model.path(data))
    return model.prepare(data)


def expanded_statistics(
    model: Program, path: Path, *, nodes: int | None = None, pooled: bool = False
) -> PathStatistics:
    """Reduce a path under a program whose law is that of a finite width, with the likelihood's adjustment.

    Arguments:
        model: the program, with its options given.
        path: the transitions.
        nodes: how many nodes the statistics have; as many as the data ask for where None.
        pooled: take all networks of one width together.
    """
    architecture = dict(model.options)["architecture"]
    layout, sample, mode = path_layout(path, nodes=nodes), path.thinned(SAMPLE), None
    for _ in range(ROUNDS):
        statistics = path_statistics(sample, layout, pooled=True)
        mode = posterior_mode(model, statistics, start=None if mode is None else mode.x)
        reference, _ = moments_at(architecture, _parameters(model, architecture, statistics, mode), statistics)
        change = _largest_change(sample, layout.reference, reference)
        layout = layout._replace(reference=reference)
        if change < CLOSE:
            break
    statistics = path_statistics(path, layout, pooled=pooled)
    together = statistics.pooled()
    mode = posterior_mode(model, together, start=None if mode is None else mode.x)
    u = _parameters(model, architecture, together, mode)
    adjustment = sandwich(sample, architecture, u, together, times=len(path) / len(sample))
    return eqx.tree_at(lambda s: s.adjustment, statistics, adjustment, is_leaf=lambda leaf: leaf is None)


def _parameters(
    model: Program, architecture: Architecture, statistics: PathStatistics, mode: Mode
) -> Float[Array, " parameters"]:
    """The mode in the coordinates of `likelihood.unconstrained`."""
    at = dict(zip(mode.sites, jnp.asarray(mode.x), strict=True))
    sites = constrain_fn(model, (statistics,), {}, at, return_deterministic=True)
    return unconstrained({name: sites[name] for name in architecture.parameters})


def _largest_change(path: Path, before: Moments, after: Moments) -> float:
    change = 0.0
    width = path.which_width
    for block, terms in terms_by_block(path):
        ratios = [variance_ratio(at_widths(moments, width[block]), terms) for moments in (before, after)]
        change = max(change, float(np.abs(ratios[1] / ratios[0] - 1).max()))
    return change
