"""Networks observed at their first and last layer; the layers between are latent."""

from functools import partial

import xarray as xr
from sdeinfer.models.thinned_path import INNOVATIONS, observed_bridges, thinned_path  # pyright: ignore

from sdeinfer.likelihood import Bridges, LatentLayers


def ends(data: xr.Dataset) -> xr.Dataset:
    """The first and the last observed layer."""
    return data.isel(layer=[0, -1])


@partial(LatentLayers, bridges=observed_bridges, site=INNOVATIONS, selection=ends)
def terminal(bridges: Bridges) -> None:
    """Independent networks of one architecture, by their first and last observed layers.

    Arguments:
        bridges: the data from `sdeinfer.prepare`.
    """
    thinned_path(bridges)
