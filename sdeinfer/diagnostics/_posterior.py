"""A posterior with its axis of chains, and the data in it. Tests: `tests/diagnostics/test_check.py`."""

import numpy as np
import xarray as xr

from sdeinfer._files import InputError
from sdeinfer.diagnostics._summary import with_chain
from sdeinfer.diagnostics._thresholds import EQUAL_NUMBERS
from sdeinfer.likelihood._transitions import USED
from sdeinfer.observation import validate
from sdeinfer.observation._dataset import validate_labels
from sdeinfer.observation._doubts import labels_of


def with_chains(post: xr.DataTree) -> xr.DataTree:
    """A posterior with its axis of chains, also where one chain was selected, as by `post.isel(chain=0)`."""
    tree = xr.DataTree.from_dict({name: with_chain(group.to_dataset()) for name, group in post.children.items()})
    tree.attrs = dict(post.attrs)
    return tree


def has_prior(post: xr.DataTree) -> bool:
    """Whether a posterior has draws of its prior; a selection of chains may leave none."""
    return "prior" in post.children and bool(post["prior"].sizes["chain"] * post["prior"].sizes["draw"])


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
    if "covariance" in known.coords:
        known = known.reset_coords("covariance")
    known = known[["covariance"]]
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
    sizes, tokens = data.sizes, known.sizes["token_a"]
    _require(sizes["network"] == networks, f"{sizes['network']} networks, where {networks} were fitted")
    _require(sizes["token_a"] == tokens, f"{sizes['token_a']} tokens, where {tokens} were fitted")
    given_labels, labels = labels_of(data), labels_of(known)
    _require(set(labels.tolist()) <= set(given_labels.tolist()), "other labels of networks")
    layers = known["layer"].values
    # With latent layers a model may use some of the observed ones, as `terminal` the first and the last.
    subset = bool(np.isin(layers, data["layer"]).all()) and not post.attrs.get("every_layer")
    _require(subset or np.array_equal(data["layer"], layers), "other layers")
    part = data.assign_coords(network=given_labels).sel(network=labels, layer=layers)
    _require(np.array_equal(part["width"], known["width"]), "other widths")
    V, fitted = (dataset["covariance"].values.astype(np.float64) for dataset in (part, known))
    norms = np.sqrt(np.diagonal(fitted, axis1=-2, axis2=-1))
    # Equal covariances may have been stored in different types.
    near = (np.abs(V - fitted) <= EQUAL_NUMBERS * norms[..., :, None] * norms[..., None, :]).all(axis=(-2, -1))
    if not near.all():
        network, layer = np.argwhere(~near)[0]
        _require(False, f"network {labels[network]} differs at layer {layers[layer]:g}")  # noqa: FBT003


def _require(condition: bool, difference: str) -> None:  # noqa: FBT001
    if not condition:
        raise InputError(f"data: not the data that were fitted: {difference}")
