"""Networks observed at every layer. Tests: `tests/likelihood/test_full_path.py`."""

import numpyro

from sdeinfer.likelihood import CovariancePath
from sdeinfer.likelihood._model import EveryLayer
from sdeinfer.likelihood._path import AbstractPath


@EveryLayer
def full_path(path: AbstractPath) -> None:
    """Independent networks of one architecture, each observed at every layer."""
    layer = path.assumptions.sample_layer()
    with numpyro.plate("network", path.networks):
        numpyro.sample("covariance", CovariancePath(layer, path), obs=path.observed)
