"""Outputs of every network were observed, beside the covariance of its initial tokens; all layers are latent."""

from typing import Literal

import xarray as xr
from sdeinfer.models.thinned_path import INNOVATIONS, thinned_path  # pyright: ignore[reportMissingImports]

from sdeinfer.layers import Architecture
from sdeinfer.likelihood import Bridges, bridges_of, observing, outputs_transitions, require_densities
from sdeinfer.observation import outputs_of


def prepare(data: xr.Dataset) -> Bridges:
    """All that the likelihood needs of the data."""
    path = outputs_transitions(data)
    require_densities(path, data)
    return bridges_of(path, outputs=outputs_of(data))


@observing(prepare, latent=INNOVATIONS)
def outputs(
    bridges: Bridges, *, architecture: Architecture, law: Literal["finite-width", "limit"] = "finite-width"
) -> None:
    """Independent networks of one architecture with outputs X_out ~ N(0, V_T ⊗ I) (Eq. 21).

    Arguments:
        bridges: the data, as `prepare` makes them; see `observe.observe_outputs`.
        architecture: the kind of layer.
        law: as in `thinned_path`.
    """
    thinned_path(bridges, architecture=architecture, law=law)
