"""The last layer of every network was observed, beside the first; all between are latent."""

from typing import Literal

import xarray as xr
from sdeinfer.models.thinned_path import INNOVATIONS, thinned_path  # pyright: ignore[reportMissingImports]
from sdeinfer.models.thinned_path import prepare as prepare_thinned_path  # pyright: ignore[reportMissingImports]

from sdeinfer.layers import Architecture
from sdeinfer.likelihood import Bridges, observing


def ends(data: xr.Dataset) -> xr.Dataset:
    """The first and the last observed layer."""
    return data.isel(layer=[0, -1])


@observing(prepare_thinned_path, select=ends, latent=INNOVATIONS)
def terminal(
    bridges: Bridges, *, architecture: Architecture, law: Literal["finite-width", "limit"] = "finite-width"
) -> None:
    """Independent networks of one architecture, of which the first and the last observed layer are looked at.

    Arguments:
        bridges: the data, as `prepare` makes them.
        architecture: the kind of layer.
        law: as in `thinned_path`.
    """
    thinned_path(bridges, architecture=architecture, law=law)
