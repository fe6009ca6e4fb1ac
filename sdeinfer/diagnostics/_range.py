"""The range of the law: how far the softmax is from its expansion, and layers outside the range against exact ones.

The law of a layer is a series that does not hold there, but exact layers of width n can be drawn from any start, by the
covariance chain. This tells data that left the range from data of another architecture.
"""

from typing import NamedTuple

import jax.random as jr
import numpy as np
import pandas as pd
from jaxtyping import Float

from sdeinfer.diagnostics._posterior import Posterior
from sdeinfer.diagnostics._thresholds import LEAST_USED
from sdeinfer.infer._measures import logit_scale, mean_spread
from sdeinfer.infer._settings import LARGEST_LOGIT
from sdeinfer.likelihood import any_transitions
from sdeinfer.likelihood._transitions import used_of, with_used
from sdeinfer.networks import sample_layer

LAYERS, DRAWS = 256, 96
"""Largest number of layers that are compared, those nearest to the range; and number of posterior draws, whose standard
deviation has an error of 7 %: with 24 draws, 15 %, and one of eight sets with shared weights passed, at 5.7 for 8.0."""

LARGEST = 1e6
"""Largest entry of V in a layer that is compared."""


class Range(NamedTuple):
    """Measures of the range of the law.

    Attributes:
        spread: mean spread of the logits in a row of the softmax, of the transitions that the fit used.
        share: share of the transitions that the fit used.
        temperatures: names of the temperatures τ0.
        beyond: share of the posterior draws at whose τ0 the mean spread is larger than the law allows.
        limit: τ0 at which it is as large as that.
        exact: the table of `excluded_layers`, where few transitions were used and exact layers can be drawn.
    """

    spread: float
    share: float
    temperatures: tuple[str, ...]
    beyond: float
    limit: float
    exact: pd.DataFrame | None


def range_of(posterior: Posterior) -> Range | None:
    """The range of the law at the posterior mean; None without attention, or for a kind of layer that is not known."""
    kind, attrs = posterior.kind, posterior.tree.attrs
    if kind is None or not kind.coordinates.temperatures:
        return None
    used, layers = used_of(posterior.data), posterior.tree["layers"].to_dataset()
    tau0 = np.min([layers[name].values for name in kind.coordinates.temperatures], axis=0)
    scale = logit_scale(posterior.data)
    spread = scale / tau0[:, None]
    # All networks of data in chunks count, of which the data are some.
    share = 1 - float(attrs["left_out"]) if "used_transitions" in attrs else float(used.mean())
    limit = mean_spread(scale[used]) / LARGEST_LOGIT
    draws = posterior.tree["posterior"].to_dataset()
    coldest = [draws[name].values for name in kind.coordinates.temperatures if name in draws and draws[name].ndim == 2]
    beyond = float(np.mean(np.min(coldest, axis=0) < limit)) if coldest else 0.0
    rare = share < LEAST_USED and posterior.one_layer and "out_of_range" not in attrs
    exact = excluded_layers(posterior, spread) if rare else None
    return Range(mean_spread(spread[used]), share, tuple(kind.coordinates.temperatures), beyond, limit, exact)


def excluded_layers(posterior: Posterior, spread: Float[np.ndarray, "networks layers"]) -> pd.DataFrame | None:
    """Compare layers outside the range of the law with exact layers from the same starts."""
    data, kind = posterior.data, posterior.known_kind
    values = data["covariance"].transpose("network", "layer", "token_a", "token_b").values
    with np.errstate(invalid="ignore"):
        small = np.abs(values).max(axis=(-2, -1)) < LARGEST
    outside = ~used_of(data) & small[:, :-1] & small[:, 1:]
    if not outside.any():
        return None
    path = any_transitions(with_used(data, outside))
    path = path.take(np.argsort(spread[path.network, path.layer], kind="stable")[:LAYERS])
    starts, ends, widths = path.starts(slice(None)), path.ends(slice(None)), path.width[path.network]
    draws = {name: posterior.tree["posterior"].to_dataset()[name].values.reshape(-1) for name in kind.declared()}
    chosen = np.linspace(0, len(next(iter(draws.values()))) - 1, DRAWS).round().astype(int)
    found = []
    for number, draw in enumerate(chosen):
        layer = kind.with_parameters({name: x[draw] for name, x in draws.items()})
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
