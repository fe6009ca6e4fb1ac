"""The adjustment of a likelihood about the mode of the posterior."""

import dataclasses

import jax
import numpy as np

from sdeinfer.infer._coordinates import layer_at
from sdeinfer.infer._exact import shift_to_exact_mode
from sdeinfer.infer._mode import curvature_of_priors, posterior_mode
from sdeinfer.infer._sandwich import sandwich
from sdeinfer.layers import Architecture
from sdeinfer.likelihood import ChunkedPath, EveryLayer, Layout, Path, PathStatistics, path_statistics

SAMPLE = 16_384
"""Number of transitions used to find the scatter of the scores. Where there are several times as many, the mode under
the exact law is found for these first, and one pass over the data then finds it for all."""


def adjusted(
    model: EveryLayer, kind: Architecture, path: Path | ChunkedPath, layout: Layout, statistics: PathStatistics
) -> PathStatistics:
    """Statistics with the adjustment of their likelihood, see `infer._sandwich` and `infer._exact`.

    Arguments:
        model: the model.
        kind: the kind of layer.
        path: the transitions.
        layout: the layout of the statistics.
        statistics: statistics of the transitions, with the identity adjustment.
    """
    together = model.pool(statistics)
    assert isinstance(together, PathStatistics)
    mode = posterior_mode(model, together)
    layer = layer_at(model, together, mode)
    priors = layer.precision(curvature_of_priors(model, together, mode))
    sample, free = path.thinned(SAMPLE), layer.sd > 0
    times = len(path) / len(sample)
    adjustment = sandwich(sample, kind, layer.u, priors=priors, free=free, times=times)
    if layer.u.ndim == 1:
        of_some = None
        if times > 4:
            own = path_statistics(sample, layout, pooled=True, assumptions=statistics.assumptions)
            of_some = shift_to_exact_mode(sample, own, kind, layer.u, free, curvature=priors)
        shift = shift_to_exact_mode(path, statistics, kind, layer.u, free, curvature=priors, start=of_some)
        adjustment = dataclasses.replace(adjustment, shift=jax.device_put(np.asarray(shift, adjustment.centre.dtype)))
    return dataclasses.replace(statistics, adjustment=adjustment)
