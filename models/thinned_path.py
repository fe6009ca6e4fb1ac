"""Every k-th layer of every network was observed, or any other layers; those between are latent."""

from typing import Literal

import jax
import numpyro
import numpyro.distributions as dist
import xarray as xr
from sdeinfer.models._priors import sample_layer  # pyright: ignore[reportMissingImports]

from sdeinfer.layers import Architecture
from sdeinfer.likelihood import Bridged, Bridges, bridges_of, observing, require_densities, transitions

INNOVATIONS = "innovations"


def prepare(data: xr.Dataset) -> Bridges:
    """All that the likelihood needs of the data."""
    path = transitions(data)
    require_densities(path, data, ends=True)
    return bridges_of(path)


@observing(prepare, latent=INNOVATIONS)
def thinned_path(
    bridges: Bridges, *, architecture: Architecture, law: Literal["finite-width", "limit"] = "finite-width"
) -> None:
    """Independent networks of one architecture, each observed at some of its layers.

    Arguments:
        bridges: the data, as `prepare` makes them.
        architecture: the kind of layer.
        law: "finite-width", one layer of each network's own width to the next order in 1/n; or "limit", the SDE with
            steps 1/n.
    """
    layer = sample_layer(architecture)
    coefficients = layer.limit() if law == "limit" else jax.vmap(layer.finite_width)(bridges.widths)
    with numpyro.plate("bridge", len(bridges)):
        innovations = numpyro.sample(INNOVATIONS, dist.Normal().expand(bridges.innovations).to_event(2))
        observed = Bridged(coefficients, bridges, innovations, skewness=architecture.skewness)
        numpyro.sample("covariance", observed, obs=bridges.end)
