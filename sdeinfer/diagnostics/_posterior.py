"""A posterior as the diagnostics read it: draws, parameters, priors, and the data that were fitted.

Tests: `tests/diagnostics/test_consequences.py`.
"""

import dataclasses
import functools

import numpy as np
import xarray as xr

from sdeinfer._files import InputError
from sdeinfer.diagnostics._summary import fixed_of, identified_of, with_chain
from sdeinfer.infer._assume import architecture_of
from sdeinfer.layers import AbstractLayer, template
from sdeinfer.layers._templates import ARCHITECTURES, architecture_in
from sdeinfer.likelihood._transitions import USED
from sdeinfer.observation import validate
from sdeinfer.observation._dataset import validate_labels
from sdeinfer.observation._doubts import labels_of

PRIOR_SD = 1.5
"""Standard deviation of a coordinate on the real line, about 0, by the default priors."""


@dataclasses.dataclass(frozen=True, eq=False)
class FittedPosterior:
    """The result of a fit of covariances; what is derived from it is computed once.

    Attributes:
        tree: the result of the fit, with its axis of chains.
        data: the data in it, with the transitions that the fit used.
        kind: the kind of layer; None for a custom layer that is not given.
    """

    tree: xr.DataTree
    data: xr.Dataset
    kind: AbstractLayer | None

    @classmethod
    def of(
        cls,
        post: xr.DataTree,
        data: xr.Dataset | None = None,
        architecture: AbstractLayer | type[AbstractLayer] | None = None,
    ) -> "FittedPosterior":
        """Read a posterior."""
        tree = with_chains(post)
        data = fitted_data(tree, data)
        name = tree.attrs.get("architecture")
        if architecture is None:
            return cls(tree, data, architecture_in(tree.attrs) if name in ARCHITECTURES else None)
        kind = architecture_of(data, architecture)
        if kind.name != name:
            raise InputError(f"architecture: the fit is of {name}, got {kind.name}")
        return cls(tree, data, kind)

    @property
    def known_kind(self) -> AbstractLayer:
        """The kind of layer; raises an InputError if it is not known."""
        if self.kind is None:
            raise InputError(f"architecture: give the layer, architecture={self.tree.attrs.get('architecture')}")
        return self.kind

    @property
    def law(self) -> str:
        """The law that was fitted, "finite-width" or "limit"."""
        return str(self.tree.attrs.get("law", "limit"))

    @property
    def one_layer(self) -> bool:
        """Whether one layer was fitted to all networks, observed at every layer."""
        return self.tree.attrs.get("model") == "full_path"

    @functools.cached_property
    def fixed(self) -> dict[str, float]:
        """As `fixed_of`."""
        return fixed_of(self.tree)

    @functools.cached_property
    def identified(self) -> list[str]:
        """As `identified_of`."""
        return identified_of(self.tree)

    @functools.cached_property
    def priors(self) -> dict[str, tuple[float, float]]:
        """Mean and standard deviation of each coordinate on the real line by its prior, from the draws of the fit.

        They are those of the kind of layer and of all named architectures. A coordinate without draws, as one that only
        another architecture has, has the default priors'. A fixed one has its value and a standard deviation of 0.
        """
        kinds = [template(name) for name in ARCHITECTURES] + ([] if self.kind is None else [self.kind])
        draws = self.tree["prior"].to_dataset() if "prior" in self.tree.children else {}
        moments = {}
        for name, parameter in {k: v for kind in kinds for k, v in kind.coordinates.sampled.items()}.items():
            if name in self.fixed:
                moments[name] = float(parameter.to_real(np.float64(self.fixed[name]))), 0.0
            elif name in draws and draws[name].size:
                real = np.asarray(parameter.to_real(draws[name].values))
                moments[name] = float(real.mean()), float(real.std())
            else:
                moments[name] = 0.0, PRIOR_SD
        return moments

    @functools.cached_property
    def sds(self) -> dict[str, float]:
        """Posterior standard deviation of each coordinate on the real line; NaN for what is no site of one number."""
        draws = self.tree["posterior"].to_dataset()
        return {
            name: float(np.std(parameter.to_real(draws[name].values)))
            if name in draws and draws[name].ndim == 2
            else np.nan
            for name, parameter in self.known_kind.coordinates.sampled.items()
        }


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
    near = (np.abs(V - fitted) <= 1e-6 * norms[..., :, None] * norms[..., None, :]).all(axis=(-2, -1))
    if not near.all():
        network, layer = np.argwhere(~near)[0]
        _require(False, f"network {labels[network]} differs at layer {layers[layer]:g}")  # noqa: FBT003


def _require(condition: bool, difference: str) -> None:  # noqa: FBT001
    if not condition:
        raise InputError(f"data: not the data that were fitted: {difference}")
