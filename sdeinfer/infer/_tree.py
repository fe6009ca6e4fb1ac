"""Groups and attributes common to the results of `fit` and `approximate`."""

import datetime
import importlib.metadata
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import xarray as xr
from jaxtyping import Float

from sdeinfer.layers import SIZES, Architecture
from sdeinfer.likelihood import USED, AbstractModel, Assumptions, EveryLayer, LatentLayers, used_of


def groups_of_data(data: xr.Dataset) -> dict[str, xr.Dataset]:
    """The groups observed_data and constant_data.

    Arguments:
        data: the observed networks, with the transitions that were used.
    """
    return {
        "observed_data": data[["covariance"]].drop_vars("width"),
        "constant_data": data[[USED]].drop_vars("width").assign(width=data["width"].drop_vars("width")),
    }


def layers_group(
    kind: Architecture, layers: Float[np.ndarray, "*networks coordinates"], data: xr.Dataset
) -> xr.Dataset:
    """The group `layers`: the parameters of each network's layer, or of that of all, at the mean of its coordinates."""
    each = np.broadcast_to(np.asarray(layers, np.float64), (data.sizes["network"], layers.shape[-1]))
    values = kind.coordinates.constrained(each.T)
    return xr.Dataset(
        {name: ("network", value) for name, value in values.items()}, coords={"network": data["network"].values}
    )


def makes_layers(model: AbstractModel) -> bool:
    """Whether a model is a program of a user."""
    return isinstance(model, EveryLayer) and model.makes_layers


def fixed_by_program(
    model: AbstractModel,
    kind: Architecture | None,
    layers: Float[np.ndarray, "*draws coordinates"] | None,
    samples: Mapping[str, np.ndarray],
) -> dict[str, float]:
    """Attributes with the coordinates that a program gives one value for all, as those of a conditioned model.

    Arguments:
        model: the model.
        kind: the kind of layer.
        layers: draws of the coordinates of the layers.
        samples: draws of the sampled sites; if one of them does not vary, nothing is taken for fixed.
    """
    if not makes_layers(model) or kind is None or layers is None or any(np.ptp(x) == 0 for x in samples.values()):
        return {}
    values = {name: layers[..., place] for place, name in enumerate(kind.coordinates.sampled)}
    return {
        f"fixed_{name}": float(kind.coordinates.sampled[name].from_real(u.flat[0]))
        for name, u in values.items()
        if np.ptp(u) == 0 and name not in samples
    }


def attributes_of(
    model: AbstractModel,
    data: xr.Dataset,
    assumptions: Assumptions,
    kind: Architecture | None,
    sampled: Sequence[str],
    *,
    largest_logit: float,
) -> dict[str, Any]:
    """Attributes of a result: those of the data, the architecture, the model, its law and range, and the version.

    Arguments:
        model: the model.
        data: the observed networks, with the transitions that were used.
        assumptions: assumptions of the fit.
        kind: the kind of layer; None for a program without a single one.
        sampled: names of the sampled sites that are no parameters of each network or group.
        largest_logit: bound on the spread of the logits, see `in_range`.
    """
    fixed = {f"fixed_{name}": value for name, value in assumptions.fixed.items()}
    known = assumptions.architecture.coordinates if assumptions.architecture else None
    # A program may have further sites; those of the package's models are not public.
    coordinates = sampled if makes_layers(model) else () if known is None else known.identified
    if known is not None:
        coordinates = [name for name in coordinates if name not in known.sampled or name in known.identified]
    # The data may come from layers of other sizes than those that are fitted.
    own = {name: value for name, value in data.attrs.items() if name not in SIZES}
    architecture = {"architecture": "none"} if kind is None else kind.attributes()
    return {
        **own,
        **architecture,
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
