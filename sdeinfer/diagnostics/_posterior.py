"""A posterior as the diagnostics read it: draws, parameters, priors, and the data that were fitted."""

import dataclasses
import functools

import numpy as np
import pandas as pd
import xarray as xr

from sdeinfer._files import InputError
from sdeinfer.diagnostics._fitted import fitted_data
from sdeinfer.diagnostics._summary import draws_of, fixed_of, identified_of, summarise, with_chain
from sdeinfer.infer._assume import architecture_of
from sdeinfer.layers import AbstractLayer, template
from sdeinfer.layers._templates import ARCHITECTURES, architecture_in, is_named
from sdeinfer.likelihood._transitions import used_of

PRIOR_SD = 1.5
"""Standard deviation of a coordinate on the real line, about 0, by the default priors."""


@dataclasses.dataclass(frozen=True, eq=False)
class Posterior:
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
    ) -> "Posterior":
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
    def every_layer(self) -> bool:
        """Whether every layer was observed and fitted."""
        return bool(self.tree.attrs.get("every_layer"))

    @property
    def one_layer(self) -> bool:
        """Whether one layer was fitted to all networks, observed at every layer."""
        return self.tree.attrs.get("model") == "full_path"

    @property
    def has_alternatives(self) -> bool:
        """Whether other architectures are tried: for a named architecture with one layer for all networks."""
        return self.kind is not None and is_named(self.kind) and self.one_layer

    @property
    def networks(self) -> int:
        """Number of networks that were fitted; of data in chunks more than are kept."""
        return int(self.tree.attrs.get("networks", self.data.sizes["network"]))

    @property
    def repetitions(self) -> float:
        """The ratio of all transitions of the fit to those that are kept; above 1 for data in chunks."""
        kept = int(used_of(self.data).sum())
        return float(self.tree.attrs.get("used_transitions", kept)) / kept

    @functools.cached_property
    def fixed(self) -> dict[str, float]:
        """As `fixed_of`."""
        return fixed_of(self.tree)

    @functools.cached_property
    def identified(self) -> list[str]:
        """As `identified_of`."""
        return identified_of(self.tree)

    @functools.cached_property
    def draws(self) -> dict[str, xr.Dataset]:
        """`draws_of` the prior and the posterior."""
        return {group: draws_of(self.tree, group) for group in ("prior", "posterior")}

    @functools.cached_property
    def table(self) -> pd.DataFrame:
        """As `summarise`."""
        return summarise(self.tree)

    @functools.cached_property
    def priors(self) -> dict[str, tuple[float, float]]:
        """Mean and standard deviation of each coordinate on the real line by its prior, from the draws of the fit.

        They are those of the kind of layer and of all named architectures. A coordinate without draws, as one that only
        another architecture has, has the default priors'. A fixed one has its value and a standard deviation of 0.
        """
        kinds = [template(name) for name in ARCHITECTURES] + ([] if self.kind is None else [self.kind])
        draws = self.tree["prior"].to_dataset() if "prior" in self.tree.children else {}
        fixed, found = self.fixed, {}
        for name, parameter in {k: v for kind in kinds for k, v in kind.coordinates.sampled.items()}.items():
            if name in fixed:
                found[name] = float(parameter.to_real(np.float64(fixed[name]))), 0.0
            elif name in draws and draws[name].size:
                real = np.asarray(parameter.to_real(draws[name].values))
                found[name] = float(real.mean()), float(real.std())
            else:
                found[name] = 0.0, PRIOR_SD
        return found

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
