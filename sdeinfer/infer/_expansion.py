"""The statistics of a law of finite width, expanded about the mode of the posterior.

A likelihood whose variances are expanded about the mode has there the value and the gradient of one that is not. The
mode is found by turns with the expansion, from a sample of the transitions; then all are reduced about it.
"""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import xarray as xr
from jaxtyping import Float, PyTree

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


def prepare_for(model: AbstractModel, data: xr.Dataset, assumptions: Assumptions) -> PyTree:
    """All that a model needs of the data: about the mode of the posterior, where its law is that of a finite width.

    Of networks in groups, each group's are expanded about the mode of that group alone, and have its adjustment.

    Arguments:
        model: the model.
        data: the observed networks.
        assumptions: of the fit.
    """
    match model:
        case Groups(ungrouped=ungrouped):
            return _prepared_groups(ungrouped, data, assumptions)
        case EveryLayer() if assumptions.law == "finite-width":
            return expanded_statistics(model, observed_path(data), assumptions)
    return model.reduce(data, assumptions)


def _prepared_groups(ungrouped: EveryLayer, data: xr.Dataset, assumptions: Assumptions) -> GroupedStatistics:
    """What is needed of networks in groups, by the model of networks of one group."""
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
    """Reduce a path under a model whose law is that of a finite width, with the likelihood's adjustment.

    Arguments:
        model: the model.
        path: the transitions.
        assumptions: of the fit.
        layout: where to take the statistics, about any reference; as the data ask for where None.
        nodes: how many nodes they have then; as many as the data ask for where None.
        pooled: take all networks of one width together.
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
    """The moments at each width; or of each network, at its own coordinates."""
    if not form.by_network:
        return law_at(form.kind, u, widths=np.unique(path.width), centre=centre).moments
    each = [
        law_at(form.kind, own, widths=width[None], centre=centre).moments
        for own, width in zip(u, path.width, strict=True)
    ]
    return jax.tree.map(lambda *x: np.concatenate(x), *each)


def _largest_change(path: Path, layout: Layout, reference: Moments, form: Form) -> float:
    """Of ρ, by another reference than that of the layout."""
    change = 0.0
    number = path.network if form.by_network else path.width_index(np.unique(path.width))
    for block, terms in terms_by_block(path):
        before, after = (
            variance_ratio(moments.at(number[block]), terms, layout.centre) for moments in (layout.reference, reference)
        )
        change = max(change, float(np.abs(after / before - 1).max()))
    return change
