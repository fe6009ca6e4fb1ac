"""The statistics of a law of finite width, expanded about the mode of the posterior.

A likelihood whose variances are expanded about the mode has there the value and the gradient of one that is not. The
mode is found by turns with the expansion, from a sample of the transitions; then all are reduced about it.
"""

import dataclasses
from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import xarray as xr
from jaxtyping import Array, Float, PyTree

from sdeinfer.infer._densities import constrained_sites
from sdeinfer.infer._innovations import law_at
from sdeinfer.infer._mode import Mode, as_adjusted, posterior_mode
from sdeinfer.infer._sandwich import sandwich
from sdeinfer.likelihood import (
    Estimates,
    GroupedStatistics,
    Layout,
    Moments,
    Path,
    PathStatistics,
    Program,
    grouped_statistics,
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

WEAK = 4.0
"""Information of a group's data on a coordinate below which the group is not centred by it: that of the prior of the
population and about as much again. Likelihoods that are so flat are not symmetric either."""


def prepare(model: Program, data: xr.Dataset) -> PyTree:
    """All that a program needs of the data: about the mode of the posterior, where its law is that of a finite width.

    Of networks in groups, each group's are expanded about the mode of that group alone, and have its adjustment.

    Arguments:
        model: the program, with its options given.
        data: the observed networks.
    """
    if model.alike is not None:
        return _prepared_groups(model.alike, data)
    if _of_finite_width(model) and model.path is not None:
        return expanded_statistics(model, model.path(data))
    return model.prepare(data)


def _prepared_groups(alike: Program, data: xr.Dataset) -> GroupedStatistics:
    """What is needed of networks in groups, by the program of networks that are all alike."""
    modes = []

    def reduced(path: Path, layout: Layout) -> PathStatistics:
        reduce = partial(expanded_statistics, alike) if _of_finite_width(alike) else path_statistics
        statistics = reduce(path, layout)
        modes.append(posterior_mode(alike, statistics.pooled()))
        return statistics

    grouped = grouped_statistics(data, reduced)
    centre, sd = (np.stack([getattr(mode, name) for mode in modes]) for name in ("x", "sd"))
    estimates = Estimates(*(jnp.asarray(x, float) for x in (centre, np.maximum(1 / sd**2 - WEAK, 0.0))))
    return eqx.tree_at(lambda grouped: grouped.estimates, grouped, estimates, is_leaf=lambda leaf: leaf is None)


def _of_finite_width(model: Program) -> bool:
    return dict(model.options).get("law") == "finite-width"


def expanded_statistics(
    model: Program, path: Path, layout: Layout | None = None, *, nodes: int | None = None, pooled: bool = False
) -> PathStatistics:
    """Reduce a path under a program whose law is that of a finite width, with the likelihood's adjustment.

    Arguments:
        model: the program, with its options given.
        path: the transitions.
        layout: where to take the statistics, about any reference; as the data ask for where None.
        nodes: how many nodes they have then; as many as the data ask for where None.
        pooled: take all networks of one width together.
    """
    architecture = dict(model.options)["architecture"]
    layout = path_layout(path, nodes=nodes) if layout is None else layout
    sample, mode = path.thinned(SAMPLE), None
    for _ in range(ROUNDS):
        statistics = path_statistics(sample, layout, pooled=True)
        mode = posterior_mode(model, statistics, start=mode)
        u = _parameters(model, statistics, mode)
        reference = law_at(architecture, u, widths=np.unique(path.width), centre=layout.centre).moments
        change = _largest_change(sample, layout, reference)
        layout = layout._replace(reference=reference)
        if change < CLOSE:
            break
    statistics = path_statistics(path, layout, pooled=pooled)
    together = statistics.pooled()
    mode = posterior_mode(model, together, start=mode)
    u = _parameters(model, together, mode)
    adjustment = sandwich(sample, architecture, u, together, times=len(path) / len(sample))
    return dataclasses.replace(statistics, adjustment=adjustment)


def _parameters(model: Program, statistics: PathStatistics, mode: Mode) -> Float[Array | np.ndarray, " parameters"]:
    """The mode in the coordinates of `likelihood.unconstrained`."""
    z = dict(zip(mode.sites, np.asarray(mode.x, jnp.result_type(float))[:, None, None], strict=True))
    found = constrained_sites(model, jax.device_put(as_adjusted(model, statistics)), z)
    return unconstrained({name: found[name][0, 0] for name in dict(model.options)["architecture"].parameters})


def _largest_change(path: Path, layout: Layout, reference: Moments) -> float:
    """Of ρ, by another reference than that of the layout."""
    change = 0.0
    width = path.which(np.unique(path.width))
    for block, terms in terms_by_block(path):
        before, after = (
            variance_ratio(moments.at(width[block]), terms, layout.centre) for moments in (layout.reference, reference)
        )
        change = max(change, float(np.abs(after / before - 1).max()))
    return change
