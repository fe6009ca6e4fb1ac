"""Groups and attributes common to the results of `fit` and `approximate`."""

import datetime
import importlib.metadata
from collections.abc import Sequence
from typing import Any

import numpy as np
import xarray as xr
from jaxtyping import Float

from sdeinfer.layers import SIZES, AbstractArchitecture
from sdeinfer.likelihood import USED, AbstractModel, Assumptions, LatentLayers, used_of


def groups_of_data(data: xr.Dataset) -> dict[str, xr.Dataset]:
    """The groups observed_data and constant_data.

    Arguments:
        data: the observed networks, with the transitions that were used.
    """
    return {
        "observed_data": data[["covariance"]].drop_vars("width"),
        "constant_data": data[[USED]].drop_vars("width").assign(width=data["width"].drop_vars("width")),
    }


def layers_group(kind: AbstractArchitecture, layers: Float[np.ndarray, "networks coordinates"], data: xr.Dataset):
    """The group `layers`: the parameters of each network's layer at the posterior mean of its coordinates."""
    values = kind.coordinates.constrained(np.asarray(layers, np.float64).T)
    return xr.Dataset(
        {name: ("network", value) for name, value in values.items()}, coords={"network": data["network"].values}
    )


def attributes_of(
    model: AbstractModel,
    data: xr.Dataset,
    assumptions: Assumptions,
    kind: AbstractArchitecture,
    sampled: Sequence[str],
    *,
    largest_logit: float,
) -> dict[str, Any]:
    """Attributes of a result: those of the data, the architecture, the model, its law and range, and the version.

    Arguments:
        model: the model.
        data: the observed networks, with the transitions that were used.
        assumptions: assumptions of the fit.
        kind: the kind of layer.
        sampled: names of the scalar sampled sites.
        largest_logit: bound on the spread of the logits, see `in_range`.
    """
    fixed = {f"fixed_{name}": value for name, value in assumptions.fixed.items()}
    coordinates = assumptions.architecture.coordinates.identified if assumptions.architecture else sampled
    # The data may come from layers of other sizes than those that are fitted.
    own = {name: value for name, value in data.attrs.items() if name not in SIZES}
    return {
        **own,
        **kind.attributes(),
        **fixed,
        "model": model.name,
        "identified": " ".join(name for name in coordinates if name in sampled),
        "every_layer": float(not isinstance(model, LatentLayers)),
        "law": assumptions.law,
        "largest_logit": largest_logit,
        "left_out": float(1 - used_of(data).mean()),
        "sdeinfer_version": importlib.metadata.version("sdeinfer"),
        "created_at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }
