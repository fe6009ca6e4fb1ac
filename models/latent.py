"""Networks observed at some layers, at their ends, or at their outputs; the other layers are latent.

Tests: `tests/infer/test_metropolis.py`.
"""

from functools import partial

import numpyro
import numpyro.distributions as dist
import xarray as xr

from sdeinfer.likelihood._bridge import Bridged, Bridges
from sdeinfer.likelihood._model import LatentLayers
from sdeinfer.likelihood._transitions import outputs_transitions


def ends(data: xr.Dataset) -> xr.Dataset:
    """The first and the last observed layer."""
    return data.isel(layer=[0, -1])


@LatentLayers
def thinned_path(bridges: Bridges) -> None:
    """Independent networks of one architecture, each observed at some of its layers, such as every k-th."""
    layer = bridges.assumptions.sample_layer()
    with numpyro.plate("bridge", len(bridges)):
        innovations = numpyro.sample(LatentLayers.site, dist.Normal().expand(bridges.innovations).to_event(2))
        numpyro.sample("covariance", Bridged(layer, bridges, innovations), obs=bridges.end)


@partial(LatentLayers, selection=ends)
def terminal(bridges: Bridges) -> None:
    """Independent networks of one architecture, by their first and last observed layers."""
    thinned_path(bridges)


@partial(LatentLayers, transitions=outputs_transitions)
def outputs(bridges: Bridges) -> None:
    """Independent networks of one architecture with outputs X_out ~ N(0, V_T ⊗ I) (Eq. 21); see `observe_outputs`."""
    thinned_path(bridges)
