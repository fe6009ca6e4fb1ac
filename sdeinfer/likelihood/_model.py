"""Models: NumPyro programs of observed networks, one type for each kind of data.

A program is a function of prepared data. A custom program is any function of a path that samples parameters, builds a
layer and observes a `CovariancePath`; `as_model` wraps it as an `EveryLayer`.
"""

import abc
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
import xarray as xr
from numpyro import handlers
from numpyro.distributions import Unit
from numpyro.primitives import Messenger

from sdeinfer._arguments import shown
from sdeinfer._files import InputError, first_line
from sdeinfer.layers import AbstractLayer, Architecture
from sdeinfer.likelihood._assumptions import Assumptions
from sdeinfer.likelihood._bridges import Bridges
from sdeinfer.likelihood._full_path import CovariancePath, FullPath
from sdeinfer.likelihood._groups import GroupedStatistics, grouped_statistics
from sdeinfer.likelihood._observed import observed_path
from sdeinfer.likelihood._path import AbstractPath
from sdeinfer.likelihood._plain import Transitions
from sdeinfer.likelihood._statistics import PathStatistics, path_statistics

PATH = "covariance"
"""Name of the observed networks in results, whatever the name of a program's site."""


@dataclasses.dataclass(frozen=True)
class AbstractModel(abc.ABC):
    """A NumPyro program for one kind of data.

    Attributes:
        program: the NumPyro program, a function of prepared data.
    """

    program: Callable[[Any], None]

    def __call__(self, prepared: Any) -> None:
        """Run the program on prepared data."""
        if isinstance(prepared, xr.Dataset):
            raise InputError(
                f"model: {self.name} takes prepared data, not a Dataset: run it on si.prepare({self.name}, data), or "
                "use si.fit"
            )
        if isinstance(prepared, AbstractPath) and not isinstance(self, EveryLayer):
            raise InputError(
                f"model: {self.name} takes data of its own, see si.prepare, so no program can call it and no handler "
                "change it: fit it itself, with prior={…} for its parameters"
            )
        self.program(prepared)

    @property
    def name(self) -> str:
        """The program's name."""
        return _name_of(self.program)

    @property
    def acceptance(self) -> float:
        """Target acceptance probability of NUTS.

        Where data say little of τ0 or of the gap, the posterior bends: with 0.8, half to 2 % of the draws diverge
        there, with 0.9 a tenth as many, for 1.3 times the steps.
        """
        return 0.9

    @property
    def dense(self) -> bool | list[tuple[str, ...]]:
        """Sites with a dense block of NUTS's mass matrix, which is diagonal for others; all if True."""
        return True

    def start_of(self, name: str, prepared: Any) -> tuple[float, float]:
        """Centre and half width of the interval in which chains start a site, in its unconstrained coordinate."""
        del name, prepared
        return 0.0, 2.0

    def select(self, data: xr.Dataset) -> xr.Dataset:
        """The part of a Dataset that the model uses."""
        return data

    @abc.abstractmethod
    def reduce(self, data: xr.Dataset, assumptions: Assumptions) -> Any:
        """Reduce a Dataset to the program's argument, once, outside the sampler."""

    def pool(self, prepared: Any) -> Any:
        """Reduce prepared data further to what the joint density needs; it may pool networks."""
        return prepared

    def blocks(self, prepared: Any) -> Iterator[tuple[Any, int | None]]:
        """Split prepared data into blocks of one shape, each with its number of actual networks (all if None)."""
        yield prepared, None

    def entries(self, prepared: Any) -> int:
        """Entries of the largest array of the likelihood at one draw, which bounds the draws evaluated at a time."""
        del prepared
        return 1


@dataclasses.dataclass(frozen=True)
class EveryLayer(AbstractModel):
    """Networks observed at every layer.

    Attributes:
        makes_layers: whether the program builds the layers itself instead of sampling them by the assumptions.
    """

    makes_layers: bool = False

    def reduce(self, data: xr.Dataset, assumptions: Assumptions) -> PathStatistics:
        """The sufficient statistics of every network."""
        return path_statistics(observed_path(data), assumptions=assumptions)

    def pool(self, prepared: AbstractPath) -> AbstractPath:
        """Sum the statistics over the networks of one width, unless the program needs every network.

        It does if each network has its own layer, a site or a covariate, or if the path is not observed by one layer,
        as in a mixture. `Transitions` are not pooled.
        """
        if isinstance(prepared, Transitions):
            return prepared
        assert isinstance(prepared, PathStatistics)
        if not self.makes_layers:
            return prepared.pooled()
        if layer_of(self, prepared) is None or self.has_own_layers(prepared):
            return prepared
        pooled = prepared.pooled()
        try:
            same = _site_shapes(self, pooled) == _site_shapes(self, prepared)
        except (TypeError, ValueError):  # a covariate or a plate of every network does not fit the pooled ones
            same = False
        return pooled if same else prepared

    def blocks(self, prepared: AbstractPath) -> Iterator[tuple[AbstractPath, int | None]]:
        """Blocks of networks; a custom program, which may have its own plates, gets all networks at once."""
        if self.makes_layers or not isinstance(prepared, PathStatistics):
            yield prepared, None
        else:
            yield from prepared.blocks()

    def has_own_layers(self, prepared: AbstractPath) -> bool:
        """Whether the program gives each network its own layer."""
        return self.makes_layers and any(leaf.ndim for leaf in jax.tree.leaves(layer_of(self, prepared)))


@dataclasses.dataclass(frozen=True)
class LatentLayers(AbstractModel):
    """Networks with latent layers.

    Attributes:
        bridges: function from a Dataset and assumptions to the program's data.
        site: name of the site of the latent layers, standard normals in a plate whose elements are independent given
            all other sites.
        selection: function that selects the part of a Dataset that the model uses.
    """

    bridges: Callable[[xr.Dataset, Assumptions], Bridges]
    site: str
    selection: Callable[[xr.Dataset], xr.Dataset] = lambda data: data

    def select(self, data: xr.Dataset) -> xr.Dataset:
        """The layers that the model uses."""
        return self.selection(data)

    def reduce(self, data: xr.Dataset, assumptions: Assumptions) -> Bridges:
        """Make bridges from each observation to the next."""
        return self.bridges(data, assumptions)


@dataclasses.dataclass(frozen=True)
class Groups(AbstractModel):
    """Networks in groups, observed at every layer.

    Attributes:
        ungrouped: the model of a single group, which determines each group's range and expansion point.
    """

    ungrouped: EveryLayer

    @property
    def acceptance(self) -> float:
        """Target acceptance probability of NUTS, larger than the default.

        With many groups the posterior has narrow regions, at σ near zero and at a weakly identified τ0 or gap, where
        longer steps sometimes diverge.
        """
        return 0.98

    def reduce(self, data: xr.Dataset, assumptions: Assumptions) -> GroupedStatistics:
        """The sufficient statistics of every network, by group."""
        return grouped_statistics(data, assumptions)

    def pool(self, prepared: GroupedStatistics) -> GroupedStatistics:
        """Sum the statistics over the networks of one group and width."""
        return prepared.pooled()

    def blocks(self, prepared: GroupedStatistics) -> Iterator[tuple[GroupedStatistics, int | None]]:
        """Blocks of networks."""
        yield from prepared.blocks()


def as_model(model: Callable[..., None]) -> AbstractModel:
    """Return a model unchanged; wrap any other NumPyro program as an `EveryLayer`.

    Raises:
        InputError: for an object that is not callable.
    """
    if isinstance(model, AbstractModel):
        return model
    if not callable(model) or isinstance(model, type | AbstractLayer | Architecture):
        raise InputError(f"model: a NumPyro program is needed, as si.models.full_path, got {shown(model)}")
    return _of_program(model)


@functools.lru_cache(maxsize=64)
def _of_program(program: Callable[..., None]) -> EveryLayer:
    # One object per program: it is part of the keys of the caches of compiled functions.
    return EveryLayer(program, makes_layers=True)


def layer_of(model: AbstractModel, prepared: Any) -> AbstractLayer | None:
    """Shapes and types of the layer that a program observes, with a leading axis if each network has its own.

    None for a program that observes the path otherwise, by a mixture, by several distributions or by a factor.

    Raises:
        InputError: if the program observes neither a path nor a factor, or has a plate of another number of networks.
    """

    def run(prepared: Any) -> AbstractLayer | None:
        trace = _trace_of_program(model, prepared)
        if not any(observes_path(site) or _is_factor(site) for site in trace.values()):
            raise InputError(f"model: {model.name} must observe one si.likelihood.CovariancePath, obs=path.observed")
        namesake = trace.get(PATH)
        if namesake is not None and namesake.get("is_observed") and not observes_path(namesake):
            raise InputError(
                f"model: {PATH} is the name of the observed networks; the site of {model.name} needs another"
            )
        return layer_in(trace)

    return jax.eval_shape(run, prepared)


def _trace_of_program(model: AbstractModel, prepared: Any) -> Mapping[str, dict[str, Any]]:
    """The sites of a program; where a plate does not fit, an error that names it."""
    with handlers.trace() as trace, handlers.seed(rng_seed=jr.key(0)):
        try:
            model(prepared)
        except (TypeError, ValueError) as error:
            if isinstance(error, InputError) or "broadcast" not in str(error):
                raise
            sizes = {name: len(site["value"]) for name, site in trace.items() if site["type"] == "plate"}
            wrong = [f"{name} of {size}" for name, size in sizes.items() if size != prepared.networks]
            if not wrong:
                raise
            raise InputError(
                f"model: {model.name} has a plate {' and '.join(wrong)}, which does not fit {prepared.networks} "
                f"networks: numpyro.plate(…, path.networks) does ({first_line(error)})"
            ) from None
    return trace


def observes_path(site: Mapping[str, Any]) -> bool:
    """Whether a site of a trace is observed networks, by one law or by a mixture of several."""
    return site["type"] == "sample" and site["is_observed"] and bool(_paths_in(site["fn"]))


def _paths_in(distribution: Any) -> list[FullPath]:
    """The laws of paths in a distribution."""
    base = _unwrapped(distribution)
    each = [_unwrapped(part) for part in getattr(base, "component_distributions", [base])]
    return [part for part in each if isinstance(part, FullPath)]


def _is_factor(site: Mapping[str, Any]) -> bool:
    return site["type"] == "sample" and isinstance(_unwrapped(site["fn"]), Unit)


def layer_in(trace: Mapping[str, dict[str, Any]]) -> AbstractLayer | None:
    """The layer of the `CovariancePath` in a trace; None unless it is the only law of paths."""
    distributions = [_unwrapped(site["fn"]) for site in trace.values() if site["type"] == "sample"]
    paths = [path for each in distributions for path in _paths_in(each)]
    return paths[0].layer if len(paths) == 1 and isinstance(paths[0], CovariancePath) else None


def _site_shapes(model: AbstractModel, prepared: Any) -> dict[str, Any]:
    """Shapes of all sites but the observed path, and of their laws."""
    shapes: dict[str, Any] = {}

    def run(prepared: Any) -> None:
        for name, site in handlers.trace(handlers.seed(model, jr.key(0))).get_trace(prepared).items():
            if site["type"] == "sample" and not observes_path(site):
                shapes[name] = jnp.shape(site["value"]), site["fn"].batch_shape

    jax.eval_shape(run, prepared)
    return shapes


def _name_of(program: Any) -> str:
    """The name of a program, of one with some arguments given, or of one in a handler."""
    while isinstance(program, functools.partial):
        program = program.func
    if isinstance(program, AbstractModel):
        return program.name
    if isinstance(program, Messenger) and program.fn is not None:
        return f"{type(program).__name__}({_name_of(program.fn)})"
    return getattr(program, "__name__", type(program).__name__)


def _unwrapped(distribution: Any) -> Any:
    """The base distribution, without masks, scales and expansions."""
    while hasattr(distribution, "base_dist"):
        distribution = distribution.base_dist
    return distribution
