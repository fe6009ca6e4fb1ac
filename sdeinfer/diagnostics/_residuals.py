"""The residuals of a fit: paths of observed layers, the law at the posterior mean, and sums over the innovations.

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
from sdeinfer.diagnostics._posterior import fitted_data, with_chains
from sdeinfer.diagnostics._summary import fixed_of
from sdeinfer.diagnostics._thresholds import PRIOR_SD
from sdeinfer.infer import law_at
from sdeinfer.infer._assume import architecture_of
from sdeinfer.infer._innovations import LawAt
from sdeinfer.layers import AbstractLayer, template
from sdeinfer.layers._templates import ARCHITECTURES, architecture_in
from sdeinfer.likelihood import any_transitions, with_pattern
from sdeinfer.likelihood._transitions import Path, used_of
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
    def known(self) -> bool:
        """Whether there are innovations: of every layer, by a known law."""
        return self.every_layer and self.kind is not None

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
