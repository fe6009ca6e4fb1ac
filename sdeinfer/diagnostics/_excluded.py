"""Layers outside the range of the law against exact layers at the posterior's draws.

The law of a layer is a series that does not hold there, but exact layers of width n can be drawn from any start, by the
covariance chain. This tells data that left the range from data of another architecture.
"""

import jax.random as jr
import numpy as np
import pandas as pd
import xarray as xr

from sdeinfer.layers import Architecture
from sdeinfer.likelihood import any_transitions, used_of, with_used
from sdeinfer.networks import sample_layer

LAYERS, DRAWS = 256, 24
"""Largest number of layers that are compared, those nearest to the range; and number of posterior draws."""

LARGEST = 1e6
"""Largest entry of V in a layer that is compared."""


def excluded_layers(post: xr.DataTree, data: xr.Dataset, kind: Architecture, spread: np.ndarray) -> pd.DataFrame | None:
    """Compare layers outside the range of the law with exact layers from the same starts.

    Arguments:
        post: the result of `fit`, with one layer for all networks.
        data: the data that were fitted.
        kind: the kind of layer.
        spread: spread of the logits at the start of each layer, shape (networks, layers).

    Returns:
        One row for each mean over layers, of log tr V′/tr V and of log |V′|/|V|, with columns `observed`, `predicted`,
        `sd` (over posterior draws, each with layers of its own) and `z`. None if exact layers cannot be drawn.
    """
    values = data["covariance"].transpose("network", "layer", "token_a", "token_b").values
    with np.errstate(invalid="ignore"):
        small = np.abs(values).max(axis=(-2, -1)) < LARGEST
    outside = ~used_of(data) & small[:, :-1] & small[:, 1:]
    if not outside.any():
        return None
    path = any_transitions(with_used(data, outside))
    nearest = np.argsort(spread[path.network, path.layer], kind="stable")[:LAYERS]
    path = path.take(nearest)
    starts, ends, widths = path.starts(slice(None)), path.ends(slice(None)), path.width[path.network]
    draws = {name: post["posterior"].to_dataset()[name].values.reshape(-1) for name in kind.parameters}
    chosen = np.linspace(0, len(next(iter(draws.values()))) - 1, DRAWS).round().astype(int)
    found = []
    for number, draw in enumerate(chosen):
        layer = kind.layer(**{name: x[draw] for name, x in draws.items()})
        drawn = sample_layer(layer, starts, width=widths, key=jr.fold_in(jr.key(0), number))
        if drawn is None:
            return None
        found.append(_growth(starts, drawn))
    predicted, observed = np.array(found), _growth(starts, ends)
    mean, sd = predicted.mean(axis=0), predicted.std(axis=0, ddof=1)
    columns = {"observed": observed, "predicted": mean, "sd": sd, "z": (observed - mean) / sd}
    return pd.DataFrame(columns, index=["log trace", "log volume"])


def _growth(starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
    trace = [np.log(np.trace(V, axis1=-2, axis2=-1)) for V in (starts, ends)]
    volume = [np.linalg.slogdet(V)[1] for V in (starts, ends)]
    return np.array([np.mean(after - before) for before, after in (trace, volume)])
