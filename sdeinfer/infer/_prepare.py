"""Prepare data for a model: reduce transitions, find the mode of the posterior, adjust the likelihood about it."""

import dataclasses
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import xarray as xr
from jaxtyping import PyTree

from sdeinfer.infer._coordinates import layer_at
from sdeinfer.infer._exact import shift_to_exact_mode
from sdeinfer.infer._mode import curvature_of_priors, posterior_mode
from sdeinfer.infer._reduce import form_of, reduced
from sdeinfer.infer._sandwich import sandwich
from sdeinfer.infer._survey import kept_networks
from sdeinfer.likelihood import (
    AbstractModel,
    Assumptions,
    ChunkedPath,
    Estimates,
    EveryLayer,
    GroupedStatistics,
    Groups,
    Layout,
    Path,
    PathStatistics,
    grouped_statistics,
    observed_path,
    path_layout,
    path_of,
    path_statistics,
)
from sdeinfer.observation import in_chunks

SAMPLE = 16_384
"""Number of transitions used to find the scatter of the scores. Where there are several times as many, the mode under
the exact law is found for these first, and one pass over the data then finds it for all."""

WEAK = 4.0
"""Information on a coordinate, in the units of `Coordinates.unconstrained`, that is subtracted from that of a group's
estimate: about twice the information in the population's prior. Below it the likelihood is flat and asymmetric, and the
group's offset is not centred at its estimate."""


def prepare_for(model: AbstractModel, data: xr.Dataset, assumptions: Assumptions) -> PyTree:
    """Reduce the data for a model; with the law of finite width, adjust the likelihood about the posterior's mode.

    Each group of networks has its own mode and adjustment.

    Arguments:
        model: the model.
        data: the observed networks.
        assumptions: assumptions of the fit.
    """
    match model:
        case Groups(ungrouped=ungrouped):
            return _prepared_groups(ungrouped, data, assumptions)
        case EveryLayer():
            return adjusted_statistics(model, path_of(data), assumptions)
    return model.reduce(data, assumptions)


class Prepared(NamedTuple):
    """Prepared data of a fit.

    Attributes:
        joint: data of the sampler, which pools networks where it can.
        each: data of which every network has a density.
        kept: these networks, in memory.
    """

    joint: PyTree
    each: PyTree
    kept: xr.Dataset


def prepare_networks(model: AbstractModel, data: xr.Dataset, assumptions: Assumptions) -> Prepared:
    """Prepare data for a fit; of data in chunks, only some of the networks are kept."""
    if not in_chunks(data):
        each = prepare_for(model, data, assumptions)
        return Prepared(each, each, data)
    assert isinstance(model, EveryLayer)
    path, kept = path_of(data), kept_networks(data)
    layout = path_layout(path)
    joint = adjusted_statistics(model, path, assumptions, layout)
    each = path_statistics(observed_path(kept), layout, assumptions=assumptions)
    return Prepared(joint, dataclasses.replace(each, adjustment=joint.adjustment), kept)


def _prepared_groups(ungrouped: EveryLayer, data: xr.Dataset, assumptions: Assumptions) -> GroupedStatistics:
    """Reduce networks in groups, with the estimates of each group by the model of a single group."""
    layers = []

    def reduce_group(path: Path, layout: Layout) -> PathStatistics:
        statistics = adjusted_statistics(ungrouped, path, assumptions, layout)
        together = statistics.pooled()
        layers.append(layer_at(ungrouped, together, posterior_mode(ungrouped, together)))
        return statistics

    grouped = grouped_statistics(data, assumptions, reduce_group)
    centre, sd = (np.stack([getattr(layer, name) for layer in layers]) for name in ("u", "sd"))
    precision = np.maximum(1 / np.maximum(sd, 1e-12) ** 2 - WEAK, 0.0)
    estimates = Estimates(*(jnp.asarray(x, float) for x in (centre, precision)))
    return eqx.tree_at(lambda grouped: grouped.estimates, grouped, estimates, is_leaf=lambda leaf: leaf is None)


def adjusted_statistics(
    model: EveryLayer,
    path: Path | ChunkedPath,
    assumptions: Assumptions,
    layout: Layout | None = None,
    *,
    nodes: int | None = None,
    pooled: bool = False,
) -> PathStatistics:
    """Reduce a path for a model, and compute the likelihood's adjustment.

    There is none for the limit's law, and for a program without a single layer.

    Arguments:
        model: the model.
        path: the transitions.
        assumptions: assumptions of the fit.
        layout: as in `reduced`.
        nodes: as in `reduced`.
        pooled: as in `reduced`.
    """
    layout = path_layout(path, nodes=nodes) if layout is None else layout
    if assumptions.law == "limit":
        return path_statistics(path, layout, pooled=pooled, assumptions=assumptions)
    form = form_of(model, len(path.width), path.tokens, assumptions, path.pattern)
    statistics = reduced(model, path, assumptions, layout, pooled=pooled)
    if form.kind is None:
        return statistics
    together = statistics.pooled() if form.pooled else statistics
    mode = posterior_mode(model, together)
    layer = layer_at(model, together, mode)
    priors = layer.precision(curvature_of_priors(model, together, mode))
    sample = path.thinned(SAMPLE)
    times = len(path) / len(sample)
    adjustment = sandwich(sample, form.kind, layer.u, priors=priors, free=layer.sd > 0, times=times)
    if layer.u.ndim == 1:
        of_some = None
        if times > 4:
            own = path_statistics(sample, layout, pooled=True, assumptions=assumptions)
            of_some = shift_to_exact_mode(sample, own, form.kind, layer.u, layer.sd > 0, curvature=priors)
        shift = shift_to_exact_mode(path, statistics, form.kind, layer.u, layer.sd > 0, curvature=priors, start=of_some)
        adjustment = dataclasses.replace(adjustment, shift=jax.device_put(np.asarray(shift, adjustment.centre.dtype)))
    return dataclasses.replace(statistics, adjustment=adjustment)
