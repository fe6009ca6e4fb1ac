"""Models: NumPyro programs of observed networks, one type for each kind of data.

A program is a function of prepared data. A user's program is any function of a path that samples parameters, builds a
layer and observes a `CovariancePath`; `as_model` makes an `EveryLayer` of it.
"""

import abc
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.random as jr
import xarray as xr
from numpyro import handlers

from sdeinfer._files import InputError
from sdeinfer.layers import AbstractLayer
from sdeinfer.likelihood._assumptions import Assumptions
from sdeinfer.likelihood._bridges import Bridges
from sdeinfer.likelihood._full_path import CovariancePath
from sdeinfer.likelihood._groups import GroupedStatistics, grouped_statistics
from sdeinfer.likelihood._statistics import PathStatistics, path_statistics
from sdeinfer.likelihood._transitions import observed_path


@dataclasses.dataclass(frozen=True)
class AbstractModel(abc.ABC):
    """A NumPyro program, callable as one.

    Attributes:
        program: the NumPyro program, a function of prepared data.
    """

    program: Callable[[Any], None]

    def __call__(self, prepared: Any) -> None:
        """Run the program, as NumPyro does."""
        if isinstance(prepared, xr.Dataset):
            raise InputError(
                f"model: {self.name} takes prepared data, not a Dataset: run it on si.prepare({self.name}, data), or "
                "use si.fit"
            )
        self.program(prepared)

    @property
    def name(self) -> str:
        """The program's name."""
        program = self.program
        while isinstance(program, functools.partial):
            program = program.func
        return getattr(program, "__name__", type(program).__name__)

    @property
    def acceptance(self) -> float:
        """The mean acceptance that NUTS adapts its step to."""
        return 0.8

    def select(self, data: xr.Dataset) -> xr.Dataset:
        """The part of a Dataset that the model looks at."""
        return data

    @abc.abstractmethod
    def reduce(self, data: xr.Dataset, assumptions: Assumptions) -> Any:
        """Reduce a Dataset to what the program needs, once, outside the sampler."""

    def pool(self, prepared: Any) -> Any:
        """Reduce prepared data to what the joint density needs, which may know less of each network."""
        return prepared

    def blocks(self, prepared: Any) -> Iterator[tuple[Any, int | None]]:
        """Cut prepared data into parts of one shape; with each, how many of its networks count (all where None)."""
        yield prepared, None


@dataclasses.dataclass(frozen=True)
class EveryLayer(AbstractModel):
    """Networks of which every layer was observed.

    Attributes:
        makes_layers: whether the program samples the layers' parameters itself, instead of by its data's assumptions.
    """

    makes_layers: bool = False

    def reduce(self, data: xr.Dataset, assumptions: Assumptions) -> PathStatistics:
        """The sufficient statistics of every network."""
        return path_statistics(observed_path(data), assumptions=assumptions)

    def pool(self, prepared: PathStatistics) -> PathStatistics:
        """Networks of one width taken together, where all have one layer."""
        return prepared if self.has_own_layers(prepared) else prepared.pooled()

    def blocks(self, prepared: PathStatistics) -> Iterator[tuple[PathStatistics, int | None]]:
        """Blocks of networks; a program with a layer for each network, or plates of its own, sees all at once."""
        if self.makes_layers:
            yield prepared, None
        else:
            yield from prepared.blocks()

    def has_own_layers(self, prepared: PathStatistics) -> bool:
        """Whether the program gives each network a layer of its own."""
        return self.makes_layers and any(leaf.ndim for leaf in jax.tree.leaves(layer_of(self, prepared)))


@dataclasses.dataclass(frozen=True)
class LatentLayers(AbstractModel):
    """Networks of which some layers are latent.

    Attributes:
        bridges: from a Dataset to the program's data.
        site: of the latent layers, standard normals in a plate whose elements are independent given all other sites.
        selection: the part of a Dataset that the model looks at.
    """

    bridges: Callable[[xr.Dataset, Assumptions], Bridges]
    site: str
    selection: Callable[[xr.Dataset], xr.Dataset] = lambda data: data

    def select(self, data: xr.Dataset) -> xr.Dataset:
        """The layers that are looked at."""
        return self.selection(data)

    def reduce(self, data: xr.Dataset, assumptions: Assumptions) -> Bridges:
        """Bridges from each observation to the next."""
        return self.bridges(data, assumptions)


@dataclasses.dataclass(frozen=True)
class Groups(AbstractModel):
    """Networks in groups, every layer of which was observed.

    Attributes:
        ungrouped: the model of networks of one group, by which each group's range and expansion are found.
    """

    ungrouped: EveryLayer

    @property
    def acceptance(self) -> float:
        """The more groups, the more narrow corners the posterior has: of σ near zero, and of a τ0 or a gap of which
        little is known. Steps that suit other posteriors sometimes diverge there.
        """  # noqa: D205
        return 0.98

    def reduce(self, data: xr.Dataset, assumptions: Assumptions) -> GroupedStatistics:
        """The sufficient statistics of every network, with one adjustment for each group."""
        return grouped_statistics(data, assumptions)

    def pool(self, prepared: GroupedStatistics) -> GroupedStatistics:
        """Networks of one group and width taken together."""
        return prepared.pooled()

    def blocks(self, prepared: GroupedStatistics) -> Iterator[tuple[GroupedStatistics, int | None]]:
        """Blocks of networks."""
        yield from prepared.blocks()


def as_model(model: Callable[..., None]) -> AbstractModel:
    """A model as it is, and of any other NumPyro program one whose layers were all observed.

    Raises:
        InputError: for what cannot be called.
    """
    if isinstance(model, AbstractModel):
        return model
    if not callable(model):
        raise InputError(f"model: a NumPyro program is needed, got {model!r}")
    return _of_program(model)


@functools.lru_cache(maxsize=64)
def _of_program(program: Callable[..., None]) -> EveryLayer:
    # One object for each program: compiled functions are found by it.
    return EveryLayer(program, makes_layers=True)


def layer_of(model: AbstractModel, prepared: Any) -> AbstractLayer:
    """The layer, or one for each network, that a program observes; its leaves are shapes and types.

    Raises:
        InputError: for a program that does not observe exactly one `CovariancePath`.
    """

    def run(prepared: Any) -> AbstractLayer | None:
        return layer_in(handlers.trace(handlers.seed(model, jr.key(0))).get_trace(prepared))

    found = jax.eval_shape(run, prepared)
    if found is None:
        raise InputError(f"model: {model.name} must observe one si.likelihood.CovariancePath, obs=path.observed")
    return found


def layer_in(trace: Mapping[str, dict[str, Any]]) -> AbstractLayer | None:
    """The layer, or one for each network, of the `CovariancePath` in a trace; None where there is not exactly one."""
    distributions = [_unwrapped(site["fn"]) for site in trace.values() if site["type"] == "sample"]
    layers = [fn.layer for fn in distributions if isinstance(fn, CovariancePath)]
    return layers[0] if len(layers) == 1 else None


def _unwrapped(distribution: Any) -> Any:
    """A distribution without the masks, scales and expansions about it."""
    while hasattr(distribution, "base_dist"):
        distribution = distribution.base_dist
    return distribution
