"""The problem of a fit: a model, with the assumptions on its layers, for one kind of data.

Networks (`infer._networks`), networks in groups (`infer._grouped`), and networks with latent layers (`infer._bridged`)
differ in what determines their range, how they are prepared and which sampler they need.
"""

import abc
import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import xarray as xr
from jaxtyping import Float, Int, PRNGKeyArray, PyTree

from sdeinfer._files import InputError
from sdeinfer._progress import phase
from sdeinfer.infer._densities import prior_draws
from sdeinfer.infer._mode import Pilot
from sdeinfer.infer._nuts import NUTS
from sdeinfer.infer._samplers import AbstractSampler
from sdeinfer.infer._survey import survey
from sdeinfer.layers import Architecture, limit_on_host
from sdeinfer.likelihood import (
    ATTENTION_GROWTH,
    GROWTH,
    ROUNDING,
    SPREAD,
    AbstractModel,
    Assumptions,
    ChunkedPath,
    EveryLayer,
    Path,
)
from sdeinfer.observation import in_chunks


class Prepared(NamedTuple):
    """Prepared data of a fit.

    Attributes:
        joint: data of the sampler, which pools networks where it can.
        each: data of which every network has a density.
        kept: these networks, in memory.
    """

    joint: PyTree
    each: PyTree
    kept: xr.Dataset


@dataclasses.dataclass(frozen=True)
class AbstractProblem(abc.ABC):
    """A model to be fitted.

    Attributes:
        model: the model.
        assumptions: assumptions of the fit.
        kind: the kind of layer; None for a program without a single layer, see `likelihood.Form`.
    """

    model: AbstractModel
    assumptions: Assumptions
    kind: Architecture | None

    @property
    def by_user(self) -> bool:
        """Whether the model is a program of a user."""
        return isinstance(self.model, EveryLayer) and self.model.makes_layers

    @property
    def measures(self) -> set[str]:
        """Names of the measures that determine the range of the law, see `measures_of`."""
        if self.kind is None:
            return {ROUNDING}
        attention = {SPREAD, ATTENTION_GROWTH} if self.kind.coordinates.temperatures else set()
        return {ROUNDING} | attention | ({GROWTH} if limit_on_host(self.kind.template).relu_drift else set())

    def parts(self, data: xr.Dataset) -> Iterator[tuple[str | None, Int[np.ndarray, " members"], "AbstractProblem"]]:
        """Networks with a range of their own: a label, their indices, and the problem for them."""
        yield None, np.arange(data.sizes["network"]), self

    def examined(self, data: xr.Dataset, *, leave_out_damaged: bool = False) -> xr.Dataset:
        """Data in chunks after a first pass over them, see `survey`; data in memory unchanged.

        Raises:
            InputError: for data in chunks that the model cannot have, and as `survey`.
        """
        if not in_chunks(data):
            if leave_out_damaged:
                raise InputError("leave_out_damaged: is for data in chunks (Dask), as of xarray.open_zarr")
            return data
        self.refuse_chunks(data)
        phase("examining the data")
        return survey(data, self.measures, leave_out_damaged=leave_out_damaged)

    def refuse_chunks(self, data: xr.Dataset) -> None:
        """Raise an InputError for data in chunks that the model cannot have."""
        del data
        raise InputError("model: data in chunks (Dask) are for models.full_path; load the data, as data.load()")

    def sampler(self, **settings: int) -> AbstractSampler:
        """The default sampler."""
        return NUTS(**settings)

    @abc.abstractmethod
    def pilot(self, data: xr.Dataset, path: Path | ChunkedPath) -> Pilot:
        """The estimates given some of the transitions of the data."""

    @abc.abstractmethod
    def prepare(self, data: xr.Dataset) -> Prepared:
        """Reduce the data; with the law of finite width, adjust the likelihood about the posterior's mode."""

    def of_networks(self, each: PyTree, layers: np.ndarray) -> np.ndarray:
        """Layers of every network, shape (..., networks, coordinates), or one of all, from those of pooled data."""
        del each
        return layers

    def prior(
        self, each: PyTree, *, draws: int, key: PRNGKeyArray
    ) -> tuple[dict[str, np.ndarray], Float[np.ndarray, "draws *networks coordinates"] | None]:
        """Prior draws of the unobserved sites, without latent layers, and of the layers of pooled data."""
        return prior_draws(self.model, self.model.pool(each), draws=draws, key=key)
