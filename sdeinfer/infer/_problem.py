"""The problem of a fit: one kind of data, with what `fit` asks of it.

`fit` selects the part of the data to which the law applies, prepares it, samples, predicts and labels, and has no
branch for a kind of data. The kinds are networks observed at every layer (`infer._networks`), networks in groups
(`infer._grouped`), networks with latent layers (`infer._bridged`) and increments of residual branches
(`infer._branches`). A further kind is a subclass of `AbstractProblem`, which a function registered at `pose` makes for
its type of model.
"""

import abc
import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import xarray as xr
from arviz_base import dict_to_dataset
from jaxtyping import Float, Int, PRNGKeyArray, PyTree

from sdeinfer._files import InputError
from sdeinfer.infer._chains import Draws
from sdeinfer.infer._densities import prior_draws
from sdeinfer.infer._labels import Labels
from sdeinfer.infer._nuts import NUTS
from sdeinfer.infer._samplers import AbstractSampler
from sdeinfer.likelihood import AbstractModel

type Sites = Mapping[str, np.ndarray]
type Layers = Float[np.ndarray, "chains draws *networks coordinates"] | None


class Prepared(NamedTuple):
    """Prepared data of a fit.

    Attributes:
        joint: data of the sampler, which pools networks where it can.
        each: data of which every network has a density.
        kept: these networks, with the transitions that are used.
        attributes: attributes of the result: how the transitions were chosen, and how many there are of data in chunks.
    """

    joint: PyTree
    each: PyTree
    kept: xr.Dataset
    attributes: dict[str, Any] = {}


@dataclasses.dataclass(frozen=True)
class AbstractProblem(abc.ABC):
    """A model to be fitted to one kind of data.

    Attributes:
        model: the model.
    """

    model: AbstractModel

    def select(self, data: xr.Dataset, largest_logit: float) -> tuple[xr.Dataset, dict[str, Any]]:
        """The data with what is used of them, and attributes of the posterior that say how it was selected."""
        del largest_logit
        return data, {}

    @abc.abstractmethod
    def prepare(self, data: xr.Dataset) -> Prepared:
        """Reduce the data to what the likelihood needs."""

    def sampler(self, **settings: int) -> AbstractSampler:
        """The default sampler."""
        return NUTS(**settings)

    def prior(self, prepared: Prepared, *, draws: int, key: PRNGKeyArray) -> tuple[Sites, Layers]:
        """Prior draws of the unobserved sites, and of the layers; with leading axes (1, draws)."""
        return prior_draws(self.model, self.model.pool(prepared.each), draws=draws, key=key)

    def predict(
        self, prepared: Prepared, samples: Sites, layers: Layers, at: Int[np.ndarray, " some"], *, key: PRNGKeyArray
    ) -> xr.Dataset | None:
        """Replicates of the data at some draws of each chain; None if there are no predictions."""
        del prepared, samples, layers, at, key

    @abc.abstractmethod
    def labels(self, prepared: Prepared) -> Labels:
        """Names of the axes of the program's sites."""

    @abc.abstractmethod
    def observed(self, prepared: Prepared) -> dict[str, xr.Dataset]:
        """The groups of the data, and what `check` needs of them."""

    def label(self, labels: Labels, prepared: Prepared, before: Sites, draws: Draws) -> dict[str, xr.Dataset]:
        """The groups of the draws and of the data."""
        return {
            "posterior": labels.of_draws(draws.samples),
            "sample_stats": dict_to_dataset(draws.statistics),
            "log_likelihood": labels.of_densities(draws.log_likelihood),
            "log_prior": labels.of_densities(draws.log_prior),
            "prior": labels.of_draws(before),
            **self.observed(prepared),
        }

    @abc.abstractmethod
    def attributes(self, data: xr.Dataset, labels: Labels, prepared: Prepared, draws: Draws) -> dict[str, Any]:
        """Attributes of the posterior: the architecture, the names of the identified parameters, fixed values."""


@functools.singledispatch
def pose(
    model: AbstractModel, data: xr.Dataset, *, architecture: Any, law: str, prior: Mapping[str, Any] | None
) -> tuple[xr.Dataset, AbstractProblem]:
    """The model's part of valid data, and the problem of fitting it; a kind of model registers a function here."""
    del data, architecture, law, prior
    raise InputError(f"model: there is no problem for {model.name}")
