"""The statistics of a law of finite width, expanded about the mode of the posterior.

A likelihood with variances expanded about the mode has the value and the gradient of the exact one at the mode. The
expansion and the mode are iterated on a sample of the transitions; then all transitions are reduced about the mode.
"""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import xarray as xr
from jaxtyping import Float, PyTree

from sdeinfer._files import InputError
from sdeinfer.infer._coordinates import layer_at
from sdeinfer.infer._innovations import law_at
from sdeinfer.infer._mode import posterior_mode
from sdeinfer.infer._reduce import Form, form_of, layout_for, reduced
from sdeinfer.infer._sandwich import sandwich
from sdeinfer.likelihood import (
    AbstractModel,
    Assumptions,
    Estimates,
    EveryLayer,
    GroupedStatistics,
    Groups,
    Layout,
    Moments,
    Path,
    PathStatistics,
    grouped_statistics,
    observed_path,
    path_layout,
    path_statistics,
    terms_by_block,
    transitions_of,
    variance_ratio,
)

SAMPLE = 16_384
"""Number of transitions used to find the expansion point and the scatter of the scores; all if there are fewer."""

ROUNDS = 6
"""Largest number of iterations of expansion and mode."""

CLOSE = 0.02
"""Largest relative change of ρ between two references at convergence; the error of the expansion is quadratic in it."""

WEAK = 4.0
"""Information on a coordinate, in the units of `Coordinates.unconstrained`, that is subtracted from that of a group's
estimate: about twice the information in the population's prior. Below it the likelihood is flat and asymmetric, and the
group's offset is not centred at its estimate."""


def prepare_for(model: AbstractModel, data: xr.Dataset, assumptions: Assumptions, *, compressed: bool = True) -> PyTree:
    """Reduce the data for a model; with the law of finite width, expand about the mode of the posterior.

    Each group of networks is expanded about the mode of its own posterior, and has its own adjustment.

    Arguments:
        model: the model.
        data: the observed networks.
        assumptions: assumptions of the fit.
        compressed: reduce transitions to sufficient statistics.

    Raises:
        InputError: for a model with latent layers or groups, if not compressed.
    """
    if not compressed:
        if not isinstance(model, EveryLayer):
            raise InputError(f"compressed: {model.name} has no plain likelihood; models.full_path has")
        plain = transitions_of(data, assumptions)
        if assumptions.law == "limit":
            return plain
        return dataclasses.replace(plain, adjustment=prepare_for(model, data, assumptions).adjustment)
    match model:
        case Groups(ungrouped=ungrouped):
            return _prepared_groups(ungrouped, data, assumptions)
        case EveryLayer() if assumptions.law == "finite-width":
            return expanded_statistics(model, observed_path(data), assumptions)
    return model.reduce(data, assumptions)


def _prepared_groups(ungrouped: EveryLayer, data: xr.Dataset, assumptions: Assumptions) -> GroupedStatistics:
    """Reduce networks in groups, with the estimates of each group by the model of a single group."""
    layers = []

    def reduce_group(path: Path, layout: Layout) -> PathStatistics:
        if assumptions.law == "finite-width":
            statistics = expanded_statistics(ungrouped, path, assumptions, layout)
        else:
            statistics = path_statistics(path, layout, assumptions=assumptions)
        together = statistics.pooled()
        layers.append(layer_at(ungrouped, together, posterior_mode(ungrouped, together)))
        return statistics

    grouped = grouped_statistics(data, assumptions, reduce_group)
    centre, sd = (np.stack([getattr(layer, name) for layer in layers]) for name in ("u", "sd"))
    precision = np.maximum(1 / np.maximum(sd, 1e-12) ** 2 - WEAK, 0.0)
    estimates = Estimates(*(jnp.asarray(x, float) for x in (centre, precision)))
    return eqx.tree_at(lambda grouped: grouped.estimates, grouped, estimates, is_leaf=lambda leaf: leaf is None)


def expanded_statistics(
    model: EveryLayer,
    path: Path,
    assumptions: Assumptions,
    layout: Layout | None = None,
    *,
    nodes: int | None = None,
    pooled: bool = False,
) -> PathStatistics:
    """Reduce a path for a model with the law of finite width, and compute the likelihood's adjustment.

    Arguments:
        model: the model.
        path: the transitions.
        assumptions: assumptions of the fit.
        layout: nodes of the statistics, with any reference; `path_layout` if None.
        nodes: number of nodes for `path_layout`; chosen by the data if None.
        pooled: sum over the networks of one width.
    """
    layout = path_layout(path, nodes=nodes) if layout is None else layout
    form = form_of(model, len(path.width), path.tokens, assumptions)
    layout = layout_for(path, layout, form)
    sample, mode = path.thinned(SAMPLE), None
    for _ in range(ROUNDS):
        statistics = reduced(model, sample, assumptions, layout)
        mode = posterior_mode(model, statistics, start=mode)
        u = layer_at(model, statistics, mode).u
        reference = _moments(form, path, u, layout.centre)
        change = _largest_change(sample, layout, reference, form)
        layout = layout._replace(reference=reference)
        if change < CLOSE:
            break
    statistics = path_statistics(
        path, layout, pooled=pooled and form.pooled, by_network=form.by_network, assumptions=assumptions
    )
    together = statistics.pooled() if form.pooled else statistics
    mode = posterior_mode(model, together, start=mode)
    layer = layer_at(model, together, mode)
    times = len(path) / len(sample)
    adjustment = sandwich(sample, form.kind, layer.u, np.asarray(layout.centre), free=layer.sd > 0, times=times)
    return dataclasses.replace(statistics, adjustment=adjustment)


def _moments(form: Form, path: Path, u: Float[np.ndarray, "*networks coordinates"], centre: np.ndarray) -> Moments:
    """Moments at each width, or of each network at its own coordinates."""
    if not form.by_network:
        return law_at(form.kind, u, widths=np.unique(path.width), centre=centre).moments
    each = [
        law_at(form.kind, own, widths=width[None], centre=centre).moments
        for own, width in zip(u, path.width, strict=True)
    ]
    return jax.tree.map(lambda *x: np.concatenate(x), *each)


def _largest_change(path: Path, layout: Layout, reference: Moments, form: Form) -> float:
    """Largest relative change of ρ from the layout's reference to a new reference."""
    change = 0.0
    number = path.network if form.by_network else path.width_index(np.unique(path.width))
    for block, terms in terms_by_block(path):
        before, after = (
            variance_ratio(moments.at(number[block]), terms, layout.centre) for moments in (layout.reference, reference)
        )
        change = max(change, float(np.abs(after / before - 1).max()))
    return change
