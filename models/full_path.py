"""Every layer of every network was observed."""

from typing import Literal

import jax
import numpyro
import xarray as xr
from sdeinfer.models._priors import sample_layer  # pyright: ignore[reportMissingImports]

from sdeinfer.layers import Architecture
from sdeinfer.likelihood import FullPath, PathStatistics, observed_path, observing, path_statistics


def prepare(data: xr.Dataset) -> PathStatistics:
    """All that the likelihood needs of the data."""
    return path_statistics(observed_path(data))


@observing(prepare, pool=PathStatistics.pooled, blocks=PathStatistics.blocks, path=observed_path)
def full_path(
    path: PathStatistics, *, architecture: Architecture, law: Literal["finite-width", "limit"] = "finite-width"
) -> None:
    """Independent networks of one architecture, each observed at every layer.

    Arguments:
        path: the sufficient statistics of the data, as `prepare` or `infer.prepare` makes them.
        architecture: the kind of layer.
        law: "finite-width", one layer of each network's own width to the next order in 1/n; or "limit", the Euler chain
            of the SDE with steps 1/n.
    """
    layer = sample_layer(architecture)
    if path.adjustment is not None:
        layer = architecture.layer(**path.adjustment(layer.parameters()))
    coefficients = layer.limit() if law == "limit" else jax.vmap(layer.finite_width)(path.widths)
    with numpyro.plate("network", path.networks):
        numpyro.sample("covariance", FullPath(coefficients, path), obs=path.weights)
