"""The last layer of every network was observed, beside the first; all between are latent."""

from functools import partial

import xarray as xr
from sdeinfer.models.thinned_path import INNOVATIONS, observed_bridges, thinned_path  # pyright: ignore

from sdeinfer.likelihood import Bridges, LatentLayers


def ends(data: xr.Dataset) -> xr.Dataset:
    """The first and the last observed layer."""
    return data.isel(layer=[0, -1])


@partial(LatentLayers, bridges=observed_bridges, site=INNOVATIONS, selection=ends)
def terminal(bridges: Bridges) -> None:
    """Independent networks of one architecture, of which the first and the last observed layer are used.

    Arguments:
        bridges: the data, as `sdeinfer.prepare` makes them.
    """
    thinned_path(bridges)
