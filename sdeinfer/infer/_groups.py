"""Labels of the axes of draws and of their densities, including the axes of networks and groups."""

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import xarray as xr
from arviz_base import dict_to_dataset
from jaxtyping import ArrayLike, PyTree
from numpyro import handlers

from sdeinfer.infer._bridged import Latent
from sdeinfer.infer._grouped import Grouped
from sdeinfer.infer._problem import AbstractProblem
from sdeinfer.likelihood import PATH, observes_path
from sdeinfer.observation import groups_of

NETWORK, GROUP = "network", "group"

type Axes = dict[str, list[Hashable]]


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
    coords: Mapping[Hashable, np.ndarray]

    @classmethod
    def of(cls, problem: AbstractProblem, prepared: PyTree, data: xr.Dataset) -> "Labels":
        """The labels of a model's sites, from a trace of its program on its data."""
        coords: dict[Hashable, np.ndarray] = {NETWORK: data[NETWORK].values}
        if isinstance(problem, Latent):
            return cls({}, {PATH: [NETWORK]}, [PATH], coords)
        if isinstance(problem, Grouped):
            coords[GROUP] = np.asarray(groups_of(data).labels)
        values: Axes = {}
        densities: Axes = {}
        paths: list[str] = []

        def run(prepared: PyTree) -> None:
            trace = handlers.trace(handlers.seed(problem.model, jr.key(0))).get_trace(prepared)
            paths.extend(name for name, site in trace.items() if observes_path(site))
            around = [frame.name for name in paths for frame in trace[name]["cond_indep_stack"]]
            plates = dict.fromkeys(around or [NETWORK], NETWORK)
            plates |= {GROUP: GROUP} if isinstance(problem, Grouped) else {}
            for name, site in trace.items():
                if site["type"] in ("sample", "deterministic"):
                    whole = jnp.shape(site["value"])
                    batch = site["fn"].batch_shape if site["type"] == "sample" else whole
                    axes: list[Hashable] = [f"{name}_dim_{axis}" for axis in range(max(len(whole), len(batch)))]
                    for frame in site["cond_indep_stack"]:
                        axis = len(batch) + frame.dim
                        if axis >= 0 and batch[axis] == frame.size and frame.name in plates:
                            axes[axis] = plates[frame.name]
                    values[name] = axes[: len(whole)]
                    densities[name] = [NETWORK] if name in paths else axes[: len(batch)]

        jax.eval_shape(run, prepared)
        return cls(values, densities, paths, coords)

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
