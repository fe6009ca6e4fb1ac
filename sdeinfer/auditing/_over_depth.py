"""The residual stream over depth, for the declared and the found strengths of branches."""

from typing import Any

import jax.random as jr
import numpy as np
import xarray as xr
from jaxtyping import Float

from sdeinfer._files import InputError
from sdeinfer.auditing._result import Audit
from sdeinfer.criteria import EffectiveRank, Ensemble, MeanCorrelation
from sdeinfer.networks import sample_networks

NETWORKS = 128
"""Number of networks of an ensemble."""

STATISTICS = ("mean square of tokens", "mean correlation", "effective rank")
"""Names of the statistics of `over_depth`."""


def over_depth(
    audit: Audit, *, V0: Float[Any, "m m"] | None = None, networks: int = NETWORKS, seed: int = 0
) -> dict[str, xr.Dataset]:
    """Statistics of the residual stream before the first and after each layer.

    Ensembles of networks of the declared and of the found strengths are drawn by the exact chain of covariances.

    Arguments:
        audit: the audit.
        V0: covariance of the stream before the first layer, shape (m, m); None for that of the first audited network.
        networks: number of networks of each ensemble.
        seed: seed of the ensembles.

    Returns:
        For "declared" (with a recipe), "found" and "observed" a Dataset with the variables `STATISTICS` and the
        dimensions network and layer.

    Raises:
        InputError: if the stream was not observed and no V0 is given.
    """
    if V0 is None:
        if audit.stream is None:
            raise InputError("V0: is needed, since the residual stream of this model was not observed")
        V0 = audit.stream[0, 0]
    width = int(audit.data["width"].values[0])
    layers = {"found": audit.found} | ({} if audit.recipe is None else {"declared": audit.architecture})
    drawn = {
        name: sample_networks(
            layer, np.asarray(V0), width=width, depth=audit.layers, networks=networks, key=jr.key(seed)
        )["covariance"].values
        for name, layer in layers.items()
    }
    if audit.stream is not None:
        drawn["observed"] = audit.stream
    return {name: _statistics(V) for name, V in drawn.items()}


def _statistics(V: Float[np.ndarray, "networks layers m m"]) -> xr.Dataset:
    flat = V.reshape(-1, 1, *V.shape[2:])
    paths = Ensemble(flat[0, 0], flat, None, np.zeros(len(flat), bool))
    found = [np.trace(flat[:, 0], axis1=-2, axis2=-1) / V.shape[-1]]
    found += [np.asarray(statistic(paths)) for statistic in (MeanCorrelation(), EffectiveRank())]
    dims = ("network", "layer")
    return xr.Dataset(
        {name: (dims, values.reshape(V.shape[:2])) for name, values in zip(STATISTICS, found, strict=True)}
    )
