"""The data that a posterior was fitted to."""

import numpy as np
import xarray as xr

from sdeinfer._files import InputError
from sdeinfer.likelihood._transitions import USED
from sdeinfer.observation import validate
from sdeinfer.observation._dataset import validate_labels
from sdeinfer.observation._faults import labels_of

ROUNDING = 1e-6
"""Largest difference of equal covariances that were stored in different types, relative to the norms of the tokens."""


def fitted_data(post: xr.DataTree, data: xr.Dataset | None = None) -> xr.Dataset:
    """The data in a posterior, with the transitions that the fit used.

    Arguments:
        post: the result of `fit`. Of data in chunks (Dask) it holds some of the networks.
        data: data to be compared with those in the posterior; None for no comparison. Networks may be in any order, and
            other layers and networks may be there where the fit used or kept only some.

    Raises:
        InputError: for data that were not fitted.
    """
    require_groups(post, "observed_data", "constant_data")
    known, constant = (post.children[group].to_dataset() for group in ("observed_data", "constant_data"))
    if USED in constant:
        known = known.assign({USED: constant[USED]})
    known = validate(known.assign_coords(width=("network", constant["width"].values)))
    if data is not None:
        _compare(known, validate_labels(data), post)
    return known


def require_groups(post: xr.DataTree, *names: str) -> None:
    """Raise an InputError where a tree has not the groups of a fit."""
    missing = [name for name in names if name not in post.children]
    if missing:
        raise InputError(f"post: a result of `fit` is needed; this one has no group {', '.join(missing)}")


def _compare(known: xr.Dataset, data: xr.Dataset, post: xr.DataTree) -> None:
    """Raise an InputError where data differ from those in a posterior."""
    networks = int(post.attrs.get("networks", known.sizes["network"]))
    for name, there, wanted in (
        ("networks", data.sizes["network"], networks),
        ("tokens", data.sizes["token_a"], known.sizes["token_a"]),
    ):
        _require(there == wanted, f"{there} {name}, where {wanted} were fitted")
    own, labels = labels_of(data), labels_of(known)
    _require(set(labels.tolist()) <= set(own.tolist()), "other labels of networks")
    layers = known["layer"].values
    # With latent layers a model may use some of the observed ones, as `terminal` the first and the last.
    some = bool(np.isin(layers, data["layer"]).all()) and not post.attrs.get("every_layer")
    _require(some or np.array_equal(data["layer"], layers), "other layers")
    part = data.assign_coords(network=own).sel(network=labels, layer=layers)
    _require(np.array_equal(part["width"], known["width"]), "other widths")
    V, fitted = (each["covariance"].values.astype(np.float64) for each in (part, known))
    norms = np.sqrt(np.diagonal(fitted, axis1=-2, axis2=-1))
    near = np.abs(V - fitted) <= ROUNDING * norms[..., :, None] * norms[..., None, :]
    if not near.all():
        network, layer = np.argwhere(~near.all(axis=(-2, -1)))[0]
        _require(False, f"network {labels[network]} differs at layer {layers[layer]:g}")  # noqa: FBT003


def _require(condition: bool, what: str) -> None:  # noqa: FBT001
    if not condition:
        raise InputError(f"data: not the data that were fitted: {what}")
