"""Statistics of transitions in the form that a model needs: pooled over networks, or with one law per network."""

import dataclasses
from functools import lru_cache

import jax.numpy as jnp
import numpy as np
import xarray as xr

from sdeinfer.covariance import EVERY_TOKEN, Pattern
from sdeinfer.layers import Architecture, kind_of
from sdeinfer.likelihood import (
    AbstractModel,
    Assumptions,
    ChunkedPath,
    EveryLayer,
    Layout,
    Path,
    PathStatistics,
    blank_statistics,
    layer_of,
    path_layout,
    path_statistics,
)


def reduced(
    model: AbstractModel,
    path: Path | ChunkedPath,
    assumptions: Assumptions,
    layout: Layout | None = None,
    *,
    nodes: int | None = None,
    pooled: bool = True,
) -> PathStatistics:
    """The statistics of transitions for a model.

    Arguments:
        model: the model.
        path: the transitions.
        assumptions: assumptions of the fit.
        layout: nodes and mean features; `path_layout` if None.
        nodes: number of nodes for `path_layout`; chosen by the data if None.
        pooled: sum over the networks of one width, unless the model needs every network.
    """
    layout = path_layout(path, nodes=nodes) if layout is None else layout
    form = form_of(model, len(path.width), path.tokens, assumptions, path.pattern)
    return path_statistics(path, layout, pooled=pooled and form.pooled, assumptions=assumptions)


@dataclasses.dataclass(frozen=True)
class Form:
    """The form of the statistics that a model's joint density needs.

    Attributes:
        kind: the kind of layer; None for a program that observes the path without a single layer, as by a mixture.
        pooled: whether the statistics can be summed over the networks of one width.
    """

    kind: Architecture | None
    pooled: bool = True


@lru_cache(maxsize=64)
def form_of(
    model: AbstractModel, networks: int, tokens: int, assumptions: Assumptions, pattern: Pattern = EVERY_TOKEN
) -> Form:
    """The form of statistics that a model needs, found by tracing its program on blank data."""
    if not (isinstance(model, EveryLayer) and model.makes_layers):
        return Form(assumptions.kind)
    blank = blank_statistics(tokens, 1, pattern=pattern, assumptions=assumptions)
    zeros = {"weights": np.zeros((networks, *blank.weights.shape[1:])), "width": np.zeros(networks, int)}
    probe = dataclasses.replace(blank, **zeros, constant=jnp.zeros(networks))
    layer = layer_of(model, probe)
    if layer is None:
        return Form(None, pooled=False)
    kind = kind_of(layer)
    if any(value.ndim for value in layer.parameters().values()):
        return Form(kind, pooled=False)
    return Form(kind, pooled=model.pool(probe) is not probe)


def kind_of_program(model: AbstractModel, data: xr.Dataset, assumptions: Assumptions) -> Architecture | None:
    """The kind of layer that a custom program builds, see `Form`."""
    pattern = Pattern.in_attributes(data.attrs)
    return form_of(model, data.sizes["network"], data.sizes["token_a"], assumptions, pattern).kind
