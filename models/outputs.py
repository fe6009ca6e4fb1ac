"""Networks observed at their initial tokens and their outputs; all layers are latent."""

from functools import partial

import xarray as xr
from sdeinfer.models.thinned_path import INNOVATIONS, thinned_path  # pyright: ignore[reportMissingImports]

from sdeinfer.likelihood import Assumptions, Bridges, LatentLayers, bridges_of, outputs_transitions
from sdeinfer.observation import outputs_of


def output_bridges(data: xr.Dataset, assumptions: Assumptions) -> Bridges:
    """Bridges from the initial tokens to the outputs."""
    path = outputs_transitions(data)
    path.require_densities()
    return bridges_of(path, outputs=outputs_of(data), assumptions=assumptions)


@partial(LatentLayers, bridges=output_bridges, site=INNOVATIONS)
def outputs(bridges: Bridges) -> None:
    """Independent networks of one architecture with outputs X_out ~ N(0, V_T ⊗ I) (Eq. 21).

    Arguments:
        bridges: the data from `sdeinfer.prepare`; see `observe_outputs`.
    """
    thinned_path(bridges)
