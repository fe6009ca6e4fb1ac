"""Every layer of every network was observed."""

import numpyro
import xarray as xr
from sdeinfer.models._priors import sample_layer  # pyright: ignore[reportMissingImports]

from sdeinfer.likelihood import FullPath, PathStatistics, observing, path_statistics, transitions


def prepare(data: xr.Dataset) -> PathStatistics:
    """All that the likelihood needs of the data."""
    return path_statistics(transitions(data))


@observing(prepare)
def full_path(path: PathStatistics, *, architecture: str) -> None:
    """Independent networks of one architecture, each observed at every layer.

    Arguments:
        path: the sufficient statistics of the data, as `prepare` makes them.
        architecture: "transformer", "attention", "feedforward" or "mlp".
    """
    layer = sample_layer(architecture)
    with numpyro.plate("network", path.networks):
        numpyro.sample("covariance", FullPath(layer.limit(), path), obs=path.weights)
