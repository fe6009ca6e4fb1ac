"""Groups and attributes common to the results of `fit` and `approximate`."""

import datetime
import importlib.metadata
from collections.abc import Mapping
from typing import Any

import numpy as np
import xarray as xr
from jaxtyping import Float

from sdeinfer.infer._bridged import Latent
from sdeinfer.infer._problem import AbstractProblem
from sdeinfer.layers import SIZES, Architecture
from sdeinfer.likelihood import USED, used_of
from sdeinfer.observation import in_chunks


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


def attributes_of_draws(
    problem: AbstractProblem,
    layers: Float[np.ndarray, "*draws coordinates"] | None,
    samples: Mapping[str, np.ndarray],
) -> dict[str, Any]:
    """Attributes with the names of the parameters that are sampled, and the values of those that a program fixes.

    The latter are coordinates with one value for all, as those of a conditioned model.

    Arguments:
        problem: the problem.
        layers: draws of the coordinates of the layers.
        samples: draws of the sampled sites that are no parameters of each network or group; if one of them does not
            vary, nothing is taken for fixed.
    """
    known = problem.assumptions.architecture.coordinates if problem.assumptions.architecture else None
    # A program may have further sites; those of the package's models are not public.
    names = list(samples) if problem.by_user else () if known is None else known.identified
    if known is not None:
        names = [name for name in names if name not in known.sampled or name in known.identified]
    found: dict[str, Any] = {"identified": " ".join(name for name in names if name in samples)}
    if not problem.by_user or problem.kind is None or layers is None or any(np.ptp(x) == 0 for x in samples.values()):
        return found
    for place, (name, parameter) in enumerate(problem.kind.coordinates.sampled.items()):
        if np.ptp(layers[..., place]) == 0 and name not in samples:
            found[f"fixed_{name}"] = float(parameter.from_real(layers[..., place].flat[0]))
    return found


def attributes_of(
    problem: AbstractProblem,
    data: xr.Dataset,
    *,
    largest_logit: float,
    kept: int | None = None,
) -> dict[str, Any]:
    """Attributes of a result: those of the data, the architecture, the model, its law and range, and the version.

    Arguments:
        problem: the problem.
        data: the observed networks, with the transitions that were used.
        largest_logit: bound on the spread of the logits, see `in_range`.
        kept: of data in chunks, the number of networks in the groups of the result.
    """
    assumptions = problem.assumptions
    fixed = {f"fixed_{name}": value for name, value in assumptions.fixed.items()}
    # The data may come from layers of other sizes than those that are fitted.
    own = {name: value for name, value in data.attrs.items() if name not in SIZES}
    of_chunks: dict[str, Any] = {}
    if in_chunks(data):
        counts = {"networks": data.sizes["network"], "used_transitions": int(np.count_nonzero(used_of(data)))}
        source = {"source": str(data.encoding["source"])} if "source" in data.encoding else {}
        of_chunks = {**counts, "kept_networks": kept, **source}
    architecture = {"architecture": "none"} if problem.kind is None else problem.kind.attributes()
    return {
        **own,
        **architecture,
        **fixed,
        **of_chunks,
        "model": problem.model.name,
        "every_layer": float(not isinstance(problem, Latent)),
        "law": assumptions.law,
        "largest_logit": largest_logit,
        "left_out": float(1 - used_of(data).mean()),
        **stamp(),
    }


def stamp() -> dict[str, str]:
    """Attributes of any result: the version of the package, and the time."""
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return {"sdeinfer_version": importlib.metadata.version("sdeinfer"), "created_at": now}
