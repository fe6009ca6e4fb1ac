"""Networks observed at some layers, such as every k-th; the layers between are latent."""

from functools import partial

import numpyro
import numpyro.distributions as dist
import xarray as xr

from sdeinfer.likelihood import Assumptions, Bridged, Bridges, LatentLayers, any_transitions, bridges_of

INNOVATIONS = "innovations"


def observed_bridges(data: xr.Dataset, assumptions: Assumptions) -> Bridges:
    """Bridges from each observed layer to the next."""
    path = any_transitions(data)
    path.require_densities(ends=True)
    return bridges_of(path, assumptions=assumptions)


@partial(LatentLayers, bridges=observed_bridges, site=INNOVATIONS)
def thinned_path(bridges: Bridges) -> None:
    """Independent networks of one architecture, each observed at some of its layers.

    Arguments:
        bridges: the data from `sdeinfer.prepare`.
    """
    layer = bridges.assumptions.sample_layer()
    with numpyro.plate("bridge", len(bridges)):
        innovations = numpyro.sample(INNOVATIONS, dist.Normal().expand(bridges.innovations).to_event(2))
        numpyro.sample("covariance", Bridged(layer, bridges, innovations), obs=bridges.end)
