"""The used transitions of a Dataset."""

import numpy as np
import xarray as xr

from sdeinfer._files import InputError
from sdeinfer.covariance import Pattern
from sdeinfer.likelihood._chunked_path import ChunkedPath, chunked_path
from sdeinfer.likelihood._transitions import Path, used_of
from sdeinfer.observation import in_chunks, outputs_of, validate
from sdeinfer.terms import AbstractTerm


def observed_path(data: xr.Dataset, others: tuple[AbstractTerm, ...] = ()) -> Path:
    """The used transitions of a Dataset in which every layer was observed.

    Arguments:
        data: observed networks.
        others: terms of the limit beside the package's.

    Raises:
        InputError: for invalid data, for data that skip layers, or if a transition starts at a singular covariance and
            so has no density.
    """
    path = any_transitions(data, others)
    if (path.gap != 1).any():
        layers = ", ".join(f"{number:g}" for number in data["layer"].values[:4])
        raise InputError(f"layer: the full path needs every layer, got layers {layers}, …; use models.thinned_path")
    path.require_densities()
    return path


def path_of(data: xr.Dataset, others: tuple[AbstractTerm, ...] = ()) -> Path | ChunkedPath:
    """`observed_path` of a Dataset in memory, or of one in chunks, which `infer.survey` has examined."""
    if not in_chunks(data):
        return observed_path(data, others)
    path = chunked_path(data, others)
    path.require_densities()
    return path


def any_transitions(data: xr.Dataset, others: tuple[AbstractTerm, ...] = ()) -> Path:
    """The used transitions from each observed layer to the next; they may skip layers or start at singular V."""
    data = validate(data)
    if outputs_of(data):
        raise InputError("outputs: the data hold covariances of outputs, not of the last layer; use models.outputs")
    return _path(data, others)


def outputs_transitions(data: xr.Dataset) -> Path:
    """The transitions from the first layer of each network to the sample covariance of its outputs.

    Raises:
        InputError: for invalid data or data without outputs.
    """
    data = validate(data)
    if not outputs_of(data):
        raise InputError("outputs: the data are not of outputs; make them with observe_outputs")
    return _path(data)


def _path(data: xr.Dataset, others: tuple[AbstractTerm, ...] = ()) -> Path:
    network, layer = np.nonzero(used_of(data))
    if not len(network):
        raise InputError("used: no transition is left")
    width, gap = data["width"].values.astype(np.float64), np.diff(data["layer"].values).astype(int)
    pattern, first = Pattern.in_attributes(data.attrs), int(data["layer"].values[0])
    return Path(data["covariance"].values, width, network, layer, gap, pattern, others, first_layer=first)
