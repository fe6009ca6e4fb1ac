"""The problem of a fit: one kind of data, with what `fit` asks of it; and names of the axes of a program's sites.

`fit` has no branch for a kind of data. A further kind is a subclass of `AbstractProblem`, which a function that is
registered at `pose` makes for its type of model. Tests: `tests/infer/test_fit.py`.
"""

import abc
import dataclasses
import datetime
import importlib.metadata
from collections.abc import Hashable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import xarray as xr
from arviz_base import dict_to_dataset
from jaxtyping import ArrayLike, Bool, Int, PRNGKeyArray, PyTree
from numpyro import handlers

from sdeinfer.infer._chains import Draws
from sdeinfer.infer._densities import Layers, prior_draws
from sdeinfer.infer._nuts import NUTS
from sdeinfer.infer._samplers import AbstractSampler
from sdeinfer.infer._settings import MOST_DRAWS, Law
from sdeinfer.likelihood import AbstractModel
from sdeinfer.likelihood._program import PATH, observes_path

NETWORK, GROUP = "network", "group"

type Axes = dict[str, list[Hashable]]
type Coords = Mapping[str, np.ndarray]


class Labels(NamedTuple):
    """Names of the axes of a program's sites, without those of the draws, and the labels of networks and groups.

    An axis is one of networks or of groups by the plate of its site, not by its length.
    """

    values: Axes
    densities: Axes
    paths: list[str]
    coords: Coords

    def of_all(self, name: str) -> bool:
        """Whether a site has the same values for all networks."""
        return not {NETWORK, GROUP} & {*self.values.get(name, ())}

    def of_draws(self, draws: Mapping[str, ArrayLike]) -> xr.Dataset:
        """Label values of sites with leading axes (chain, draw)."""
        return self._labelled(draws, self.values)

    def of_densities(self, densities: Mapping[str, ArrayLike]) -> xr.Dataset:
        """Label log densities of sites with leading axes (chain, draw); that of the only path is named `PATH`."""
        dataset = self._labelled(densities, self.densities)
        return dataset.rename({name: PATH for name in self.paths if name in dataset} if len(self.paths) == 1 else {})

    def _labelled(self, draws: Mapping[str, ArrayLike], axes: Axes) -> xr.Dataset:
        dims: dict[Hashable, Sequence[Hashable]] = {name: axes[name] for name in draws if name in axes}
        used = {dim for names in dims.values() for dim in names}
        coords: dict[Any, Any] = {name: labels for name, labels in self.coords.items() if name in used}
        return dict_to_dataset({name: np.asarray(value) for name, value in draws.items()}, dims=dims, coords=coords)


def labels_by_trace(
    model: AbstractModel, prepared: PyTree, coords: Coords, plates: Mapping[str, str] = MappingProxyType({})
) -> Labels:
    """The labels of a model's sites by its plates, from a trace of its program."""
    values: Axes = {}
    densities: Axes = {}
    paths: list[str] = []

    def run(prepared: PyTree) -> None:
        trace = handlers.trace(handlers.seed(model, jr.key(0))).get_trace(prepared)
        paths.extend(name for name, site in trace.items() if observes_path(site))
        around = [frame.name for name in paths for frame in trace[name]["cond_indep_stack"]]
        dims = dict.fromkeys(around or [NETWORK], NETWORK) | dict(plates)
        for name, site in trace.items():
            if site["type"] in ("sample", "deterministic"):
                whole = jnp.shape(site["value"])
                batch = site["fn"].batch_shape if site["type"] == "sample" else whole
                axes: list[Hashable] = [f"{name}_dim_{axis}" for axis in range(max(len(whole), len(batch)))]
                for frame in site["cond_indep_stack"]:
                    axis = len(batch) + frame.dim
                    if axis >= 0 and batch[axis] == frame.size and frame.name in dims:
                        axes[axis] = dims[frame.name]
                values[name] = axes[: len(whole)]
                densities[name] = [NETWORK] if name in paths else axes[: len(batch)]

    jax.eval_shape(run, prepared)
    return Labels(values, densities, paths, coords)


def stamp() -> dict[str, str]:
    """Attributes of any result: the version of the package, and the time."""
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return {"sdeinfer_version": importlib.metadata.version("sdeinfer"), "created_at": now}


type Sites = Mapping[str, np.ndarray]


class Prepared(NamedTuple):
    """Prepared data of a fit.

    Attributes:
        joint: what the sampler gets, which calls the model's `pool` on it.
        networks: what gives the density of each network; the same object, unless the data are in chunks.
        data: the networks.
        used: whether each transition was fitted; None for data without transitions.
        attributes: those of the posterior that say how transitions were chosen.
    """

    joint: PyTree
    networks: PyTree
    data: xr.Dataset
    used: Bool[np.ndarray, "networks transitions"] | None = None
    attributes: dict[str, Any] = {}


@dataclasses.dataclass(frozen=True)
class AbstractProblem(abc.ABC):
    """A model to be fitted to one kind of data."""

    model: AbstractModel

    @abc.abstractmethod
    def prepare(self, data: xr.Dataset, largest_logit: float) -> Prepared:
        """Select what is in the range of the law, and reduce it to what the likelihood needs."""

    def sampler(self, **settings: int) -> AbstractSampler:
        """The default sampler."""
        return NUTS(**settings)

    def prior(self, prepared: Prepared, *, draws: int, key: PRNGKeyArray) -> tuple[Sites, Layers]:
        """Prior draws of the unobserved sites, and of the layers; with leading axes (1, draws)."""
        return prior_draws(self.model, self.model.pool(prepared.networks), draws=draws, key=key)

    def affordable_draws(self, prepared: Prepared) -> int:
        """Number of draws that get replicates of the data by default."""
        del prepared
        return MOST_DRAWS

    def predict(
        self,
        prepared: Prepared,
        samples: Sites,
        layers: Layers,
        draws: Int[np.ndarray, " some"],
        *,
        law: Law,
        key: PRNGKeyArray,
    ) -> xr.Dataset | None:
        """Replicates of the data by a law at some draws of each chain; None if there are no predictions."""
        del prepared, samples, layers, draws, law, key

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
    def attributes(self, labels: Labels, prepared: Prepared, draws: Draws) -> dict[str, Any]:
        """Attributes of the posterior: the architecture, the names of the identified parameters, fixed values."""
