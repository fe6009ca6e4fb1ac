"""Names of the axes of a program's sites, by which its draws become Datasets."""

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
from jaxtyping import ArrayLike, PyTree
from numpyro import handlers

from sdeinfer.likelihood import AbstractModel
from sdeinfer.likelihood._program import PATH, observes_path

NETWORK, GROUP = "network", "group"

type Axes = dict[str, list[Hashable]]
type Coords = Mapping[str, np.ndarray]


class Labels(NamedTuple):
    """Names of the axes of a program's sites, without those of the draws.

    An axis is one of networks or of groups by the plate of its site, not by its length.

    Attributes:
        values: the axes of each site's values.
        densities: the axes of each site's log density.
        paths: names of the sites of observed networks.
        coords: the labels of networks and groups.
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
        found = self._labelled(densities, self.densities)
        return found.rename({name: PATH for name in self.paths if name in found} if len(self.paths) == 1 else {})

    def _labelled(self, draws: Mapping[str, ArrayLike], axes: Axes) -> xr.Dataset:
        dims: dict[Hashable, Sequence[Hashable]] = {name: axes[name] for name in draws if name in axes}
        used = {dim for each in dims.values() for dim in each}
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
