"""Models: NumPyro programs of observed networks, one type for each kind of data.

A program is a function of prepared data. A custom program is any function of a path that samples parameters, builds a
layer and observes a `CovariancePath`; `as_model` wraps it as an `EveryLayer`, `each_network` if it needs every network.
Tests: `tests/infer/test_models.py`.
"""

import abc
import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ClassVar

import xarray as xr
from jaxtyping import ArrayLike

from sdeinfer._arguments import shown
from sdeinfer._files import InputError
from sdeinfer.layers import AbstractLayer
from sdeinfer.likelihood._path import AbstractPath
from sdeinfer.likelihood._program import inside, program_name
from sdeinfer.likelihood._statistics import PathStatistics
from sdeinfer.likelihood._transitions import Path, any_transitions


@dataclasses.dataclass(frozen=True)
class AbstractModel(abc.ABC):
    """A NumPyro program for one kind of data.

    Attributes:
        program: the NumPyro program, a function of prepared data.
    """

    program: Callable[..., None]

    def __call__(self, prepared: Any, *given: Any, **named: Any) -> None:
        """Run the program on prepared data."""
        if isinstance(prepared, xr.Dataset):
            raise InputError(
                f"model: {self.name} takes prepared data, not a Dataset: run it on si.prepare({self.name}, data), or "
                "use si.fit"
            )
        if isinstance(prepared, AbstractPath) and not self.takes(prepared):
            raise InputError(
                f"model: {self.name} cannot be used inside another NumPyro program or under its handlers; pass it to "
                "si.fit, with prior={…} for its parameters"
            )
        self.program(prepared, *given, **named)

    @property
    def name(self) -> str:
        """The program's name."""
        return program_name(self.program)

    def takes(self, path: AbstractPath) -> bool:
        """Whether the program is one of such a path."""
        del path
        return False

    @property
    def takes_architecture(self) -> bool:
        """Whether layers are sampled by the assumptions of a fit."""
        return True

    @property
    def is_one_layer(self) -> bool:
        """Whether the density of the data is that of a `CovariancePath` of one layer, which the assumptions have."""
        return False

    @property
    def acceptance(self) -> float:
        """Target acceptance probability of NUTS.

        Where data hardly identify τ0 or the gap, the posterior bends: with 0.8, half to 2 % of the draws diverge
        there, with 0.9 a tenth as many, for 1.3 times the steps.
        """
        return 0.9

    @property
    def dense(self) -> bool | list[tuple[str, ...]]:
        """Sites with a dense block of NUTS's mass matrix, which is diagonal for others; all if True."""
        return True

    def start_of(self, name: str, prepared: Any) -> tuple[ArrayLike, float]:
        """Centre and half width of the interval in which chains start a site, in its unconstrained coordinate."""
        del name, prepared
        return 0.0, 2.0

    def select(self, data: xr.Dataset) -> xr.Dataset:
        """The part of a Dataset that the model uses."""
        return data

    def pool(self, prepared: Any) -> Any:
        """Reduce prepared data further to what the joint density needs; it may pool networks."""
        return prepared


@dataclasses.dataclass(frozen=True)
class EveryLayer(AbstractModel):
    """Networks observed at every layer; a program may make the layers itself, and need each network."""

    makes_layers: bool = False
    needs_networks: bool = False

    @property
    def takes_architecture(self) -> bool:
        """Whether layers are sampled by the assumptions: in a model of the package, or in one in a handler."""
        innermost = inside(self.program)
        return not self.makes_layers or (isinstance(innermost, AbstractModel) and innermost.takes_architecture)

    @property
    def is_one_layer(self) -> bool:
        return not self.makes_layers and not self.needs_networks

    def takes(self, path: AbstractPath) -> bool:
        return not isinstance(path, PathStatistics) or path.group is None

    def pool(self, prepared: AbstractPath) -> AbstractPath:
        return prepared.pooled() if isinstance(prepared, PathStatistics) and not self.needs_networks else prepared


@dataclasses.dataclass(frozen=True)
class LatentLayers(AbstractModel):
    """Networks with latent layers, whose innovations are the site `site`."""

    site: ClassVar[str] = "innovations"
    transitions: Callable[[xr.Dataset], Path] = any_transitions
    selection: Callable[[xr.Dataset], xr.Dataset] = lambda data: data

    def select(self, data: xr.Dataset) -> xr.Dataset:
        return self.selection(data)


@dataclasses.dataclass(frozen=True)
class GroupModel(EveryLayer):
    """Networks in groups, observed at every layer."""

    ungrouped: EveryLayer = dataclasses.field(kw_only=True)

    @property
    def is_one_layer(self) -> bool:
        return False

    @property
    def acceptance(self) -> float:
        """Larger, as the posterior of many groups is narrow at σ near zero, where long steps diverge."""
        return 0.98

    def takes(self, path: AbstractPath) -> bool:
        return isinstance(path, PathStatistics) and path.group is not None


def as_model(model: Callable[..., None]) -> AbstractModel:
    """Return a model unchanged; wrap any other NumPyro program as an `EveryLayer`."""
    if isinstance(model, AbstractModel):
        return model
    if not callable(model) or isinstance(model, type | AbstractLayer):
        raise InputError(f"model: a NumPyro program is needed, as si.models.full_path, got {shown(model)}")
    return _of_program(model)


@functools.lru_cache(maxsize=64)
def _of_program(program: Callable[..., None]) -> EveryLayer:
    # One object per program: it is part of the keys of the caches of compiled functions.
    innermost = inside(program)
    return EveryLayer(
        program, makes_layers=True, needs_networks=isinstance(innermost, EveryLayer) and innermost.needs_networks
    )


def each_network(program: Callable[..., None]) -> EveryLayer:
    """Declare that a program has numbers of each network: a layer, a site, a mask or a covariate; also a decorator.

    Other programs have one layer for all networks: sums over the networks suffice, which are fitted faster, and may be
    of more networks than there is memory for.

    Arguments:
        program: a NumPyro program, a function of a path.

    Returns:
        The model, for `fit` and for NumPyro.
    """
    return dataclasses.replace(_of_program(program), needs_networks=True)
