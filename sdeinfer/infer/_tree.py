"""Labels, groups and attributes of the result of `fit`."""

import datetime
import importlib.metadata
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import xarray as xr
from arviz_base import dict_to_dataset
from jaxtyping import ArrayLike, Float, PyTree
from numpyro import handlers

from sdeinfer.infer._bridged import Latent
from sdeinfer.infer._densities import adjustment_of
from sdeinfer.infer._grouped import Grouped
from sdeinfer.infer._problem import AbstractProblem
from sdeinfer.layers import SIZES, Architecture
from sdeinfer.likelihood import PATH, USED, observes_path, used_of
from sdeinfer.observation import groups_of, in_chunks

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


def groups_of_data(data: xr.Dataset) -> dict[str, xr.Dataset]:
    """The groups observed_data and constant_data, with the transitions that were used."""
    return {
        "observed_data": data[["covariance"]].drop_vars("width"),
        "constant_data": data[[USED]].drop_vars("width").assign(width=data["width"].drop_vars("width")),
    }


def layers_group(
    kind: Architecture, layers: Float[np.ndarray, "*networks coordinates"], data: xr.Dataset
) -> xr.Dataset:
    """The group `layers`: the parameters of each network's layer, or of that of all, at the mean of its coordinates."""
    each = np.broadcast_to(np.asarray(layers, np.float64), (data.sizes["network"], layers.shape[-1]))
    values = kind.coordinates.constrained(each.T)
    return xr.Dataset(
        {name: ("network", value) for name, value in values.items()}, coords={"network": data["network"].values}
    )


def attributes_of_draws(
    problem: AbstractProblem,
    prepared: PyTree,
    layers: Float[np.ndarray, "*draws coordinates"] | None,
    samples: Mapping[str, np.ndarray],
) -> dict[str, Any]:
    """The error of an adjustment, the names of the parameters that are sampled, and the values of those that are fixed.

    A program fixes coordinates with one value for all draws of the layers, as those of a conditioned model. The samples
    are of the sites that are no parameters of each network or group; if one does not vary, nothing is taken for fixed.
    """
    known = problem.assumptions.architecture.coordinates if problem.assumptions.architecture else None
    # A program may have further sites; those of the package's models are not public.
    names = list(samples) if problem.by_user else () if known is None else known.identified
    if known is not None:
        names = [name for name in names if name not in known.sampled or name in known.identified]
    found: dict[str, Any] = {"identified": " ".join(name for name in names if name in samples)}
    if (adjustment := adjustment_of(prepared)) is not None:
        found["adjustment_error"] = float(np.max(adjustment.error))
    if not problem.by_user or problem.kind is None or layers is None or any(np.ptp(x) == 0 for x in samples.values()):
        return found
    for place, (name, parameter) in enumerate(problem.kind.coordinates.sampled.items()):
        if np.ptp(layers[..., place]) == 0 and name not in samples:
            found[f"fixed_{name}"] = float(parameter.from_real(layers[..., place].flat[0]))
    return found


def attributes_of(
    problem: AbstractProblem, data: xr.Dataset, *, largest_logit: float, kept: int | None = None
) -> dict[str, Any]:
    """Attributes of a result: those of the data, the architecture, the model, its law and range, and the version.

    Of data in chunks, `kept` is the number of networks in the groups of the result.
    """
    assumptions = problem.assumptions
    fixed = {f"fixed_{name}": value for name, value in assumptions.fixed.items()}
    # The data may come from layers of other sizes than those that are fitted.
    own = {name: value for name, value in data.attrs.items() if name not in SIZES}
    of_chunks: dict[str, Any] = {}
    if in_chunks(data):
        counts = {"networks": data.sizes["network"], "used_transitions": int(np.count_nonzero(used_of(data)))}
        source = {"source": str(data.encoding["source"])} if "source" in data.encoding else {}
        of_chunks = {**counts, "kept_networks": kept, **source}
    architecture = {"architecture": "none"} if problem.kind is None else problem.kind.attributes()
    return {
        **own,
        **architecture,
        **fixed,
        **of_chunks,
        "model": problem.model.name,
        "every_layer": float(not isinstance(problem, Latent)),
        "law": assumptions.law,
        "largest_logit": largest_logit,
        "left_out": float(1 - used_of(data).mean()),
        **stamp(),
    }


def stamp() -> dict[str, str]:
    """Attributes of any result: the version of the package, and the time."""
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return {"sdeinfer_version": importlib.metadata.version("sdeinfer"), "created_at": now}
