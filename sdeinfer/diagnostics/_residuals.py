"""The residuals of a fit: its data, the law at the posterior mean, and sums over the innovations.

Tests: `tests/diagnostics/test_consequences.py`.
"""

import dataclasses
import functools

import jax
import numpy as np
import xarray as xr
from jaxtyping import Bool, Float

from sdeinfer._files import InputError
from sdeinfer.diagnostics._innovations import ScoreSums, inverse_of
from sdeinfer.diagnostics._summary import fixed_of, require_groups, with_chains
from sdeinfer.diagnostics._thresholds import EQUAL_NUMBERS, PRIOR_SD
from sdeinfer.infer import law_at
from sdeinfer.infer._assume import architecture_of
from sdeinfer.infer._innovations import LawAt
from sdeinfer.layers import AbstractLayer, template
from sdeinfer.layers._templates import ARCHITECTURES, architecture_in
from sdeinfer.likelihood import any_transitions, with_pattern
from sdeinfer.likelihood._transitions import USED, Path, used_of
from sdeinfer.observation import validate
from sdeinfer.observation._dataset import validate_labels
from sdeinfer.observation._doubts import labels_of
from sdeinfer.parameters import Parameter


@dataclasses.dataclass(frozen=True, eq=False)
class Residuals:
    """A fit of covariances; what is derived from it is computed once.

    Arrays over coordinates are over those that the layer samples, on the real line.

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
    ) -> "Residuals":
        """Read a posterior; the arguments are those of `check`."""
        tree = with_chains(post)
        data = fitted_data(tree, data)
        name = tree.attrs.get("architecture")
        if architecture is None:
            return cls(tree, data, architecture_in(tree.attrs) if name in ARCHITECTURES else None)
        kind = architecture_of(data, architecture)
        assert kind is not None  # since one is named
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
    def coordinates(self) -> dict[str, Parameter]:
        """The coordinates that the layer samples."""
        return self.known_kind.coordinates.sampled

    @property
    def temperatures(self) -> tuple[str, ...]:
        """Names of the softmax temperatures τ0; none of an unknown kind."""
        return () if self.kind is None else self.kind.coordinates.temperatures

    @property
    def law(self) -> str:
        """The law that was fitted, "finite-width" or "limit"."""
        return str(self.tree.attrs.get("law", "limit"))

    @property
    def every_layer(self) -> bool:
        """Whether every layer was observed."""
        return bool(self.tree.attrs.get("every_layer"))

    @property
    def one_layer(self) -> bool:
        """Whether one layer was fitted to all networks, observed at every layer."""
        return self.tree.attrs.get("model") == "full_path"

    @functools.cached_property
    def draws(self) -> xr.Dataset:
        """The draws of the posterior."""
        return self.tree["posterior"].to_dataset()

    @functools.cached_property
    def fixed(self) -> dict[str, float]:
        """Values of the fixed coordinates by name."""
        return fixed_of(self.tree)

    @functools.cached_property
    def free(self) -> Bool[np.ndarray, " coordinates"]:
        """Which coordinates are not fixed."""
        return np.array([name not in self.fixed for name in self.coordinates], bool)

    @functools.cached_property
    def at_mean(self) -> Float[np.ndarray, "networks coordinates"]:
        """Each network's layer at its posterior mean."""
        layers, coordinates = self.tree["layers"].to_dataset(), self.known_kind.coordinates
        return coordinates.unconstrained({name: layers[name].values for name in coordinates.declared}).T

    @functools.cached_property
    def laws(self) -> list[tuple[Path, LawAt]]:
        """The distinct layers: the transitions of a layer's networks, and the law at its posterior mean."""
        kind, laws = self.known_kind, []
        path = any_transitions(with_pattern(self.data, kind.pattern), kind.other_terms)
        points, number = np.unique(self.at_mean, axis=0, return_inverse=True)
        for index, point in enumerate(points):
            transitions = path.of_networks(np.flatnonzero(number.reshape(-1) == index))
            if len(transitions):
                widths = np.unique(transitions.width)
                laws.append((transitions, law_at(kind, point, widths=widths, law=self.law)))
        return laws

    @functools.cached_property
    def sums(self) -> ScoreSums:
        """Sums over the innovations of all distinct layers."""
        parts = [ScoreSums.of(path, law, self.known_kind, fitted=self.law) for path, law in self.laws]
        sums = jax.tree.map(lambda *leaves: np.sum(leaves, axis=0), *parts)
        # A fit of data in chunks keeps some of its transitions: moves and sds are of all, tests of those kept.
        count = int(used_of(self.data).sum())
        times = float(self.tree.attrs.get("used_transitions", count)) / count
        names = ("along", "score", "information", "scatter", "of_networks", "omitted", "completed")
        return sums._replace(**{name: times * getattr(sums, name) for name in names})

    @functools.cached_property
    def priors(self) -> dict[str, tuple[float, float]]:
        """Mean and standard deviation of each coordinate by its prior, from the draws of the fit.

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
    def precision(self) -> Float[np.ndarray, " coordinates"]:
        """One over the variance by the priors; 1 for fixed coordinates, where it is not used."""
        sd = np.array([self.priors[name][1] for name in self.coordinates])
        return np.where(sd > 0, sd, 1.0) ** -2

    @functools.cached_property
    def sds(self) -> Float[np.ndarray, " coordinates"]:
        """Posterior standard deviations; NaN for what is no site of one number."""
        sds = np.full(len(self.coordinates), np.nan)
        for place, (name, parameter) in enumerate(self.coordinates.items()):
            if name in self.draws and self.draws[name].ndim == 2:
                sds[place] = np.std(parameter.to_real(self.draws[name].values))
        return sds

    def covariance(self, information: np.ndarray, precision: np.ndarray) -> np.ndarray:
        """Covariance of the free coordinates by the information in data and the precision of priors; 0 of others."""
        covariance, free = np.zeros_like(information), np.ix_(self.free, self.free)
        covariance[free] = inverse_of((information + np.diag(precision))[free])
        return covariance


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
