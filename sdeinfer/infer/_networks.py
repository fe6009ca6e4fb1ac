"""The problem of networks observed at every layer."""

import dataclasses

import jax
import numpy as np
import xarray as xr
from jaxtyping import Int

from sdeinfer._files import InputError
from sdeinfer.infer._covariances import AbstractCovariances
from sdeinfer.infer._exact import shift_to_exact_mode
from sdeinfer.infer._mode import LayerAt, Mode, Pilot, curvature_of_priors, layer_at, posterior_mode
from sdeinfer.infer._problem import Prepared
from sdeinfer.infer._sandwich import sandwich
from sdeinfer.infer._survey import kept_networks
from sdeinfer.layers import Architecture
from sdeinfer.likelihood import (
    Assumptions,
    ChunkedPath,
    EveryLayer,
    Form,
    Layout,
    Path,
    PathStatistics,
    blank_statistics,
    no_adjustment,
    observed_path,
    path_layout,
    path_of,
    path_statistics,
)
from sdeinfer.observation import in_chunks

NODES = 64
"""Number of nodes for the pilot estimates: the smallest number of a fit, so that they share its compiled programs."""

SAMPLE = 16_384
"""Number of transitions used to find the scatter of the scores. Where there are several times as many, the mode under
the exact law is found for these first, and one pass over the data then finds it for all."""


@dataclasses.dataclass(frozen=True)
class Networks(AbstractCovariances):
    """Networks observed at every layer.

    Attributes:
        form: the form in which the program observes them.
    """

    model: EveryLayer
    form: Form

    @classmethod
    def of(cls, model: EveryLayer, assumptions: Assumptions, blank: PathStatistics | None = None) -> "Networks":
        """The problem of a model; a program of a user needs blank data of the shape of the actual ones."""
        form = model.form(blank_statistics(2, 1, assumptions=assumptions) if blank is None else blank)
        return cls(model, assumptions, form.kind, form)

    @property
    def adjusted_kind(self) -> Architecture | None:
        """The kind of layer, for which the likelihood is adjusted; None by the limit's law, which is not."""
        return None if self.assumptions.law == "limit" else self.kind

    def refuse_chunks(self, data: xr.Dataset) -> None:
        """Raise an InputError unless there is one layer for all networks, and every layer was observed."""
        what = "data in chunks (Dask) are for"
        if not self.form.pooled:
            raise InputError(
                f"model: {what} one layer for all networks, which {self.model.name} has not; load the data"
            )
        if (np.diff(data["layer"].values) != 1).any():
            raise InputError(f"layer: {what} networks of which every layer was observed; load the data")

    def statistics(
        self, path: Path | ChunkedPath, layout: Layout | None = None, *, pooled: bool = True
    ) -> PathStatistics:
        """The statistics of transitions, with the identity adjustment where the likelihood will be adjusted.

        If pooled, they are sums over the networks of one width, unless the model needs every network. The layout has
        the nodes and the mean features; `path_layout` if None.
        """
        pooled = pooled and self.form.pooled
        found = path_statistics(path, layout, pooled=pooled, assumptions=self.assumptions)
        if (kind := self.adjusted_kind) is None:
            return found
        found = found.by_network() if self.form.own else found
        axis = found.networks if self.form.own else None
        return dataclasses.replace(found, adjustment=no_adjustment(len(kind.coordinates), axis))

    def pilot(self, data: xr.Dataset, path: Path | ChunkedPath) -> Pilot:
        """The modes of the posteriors given some of the transitions."""
        del data

        def estimate(chosen: Int[np.ndarray, " some"], start: Mode | None) -> tuple[Mode, LayerAt]:
            path.require_densities(chosen)
            some = path.take(chosen)
            statistics = self.statistics(some, path_layout(some, nodes=NODES))
            mode = posterior_mode(self.model, statistics, start=start)
            return mode, layer_at(self.model, statistics, mode)

        return estimate

    def adjusted(
        self,
        path: Path | ChunkedPath,
        layout: Layout | None = None,
        statistics: PathStatistics | None = None,
        *,
        pooled: bool = False,
    ) -> PathStatistics:
        """`statistics`, with the likelihood's adjustment; there is none for the limit and without a single layer.

        See `infer._sandwich` and `infer._exact`. Statistics with this layout may be given; others are made as there.
        """
        layout = path_layout(path) if layout is None else layout
        statistics = self.statistics(path, layout, pooled=pooled) if statistics is None else statistics
        if (kind := self.adjusted_kind) is None:
            return statistics
        together = self.model.pool(statistics)
        assert isinstance(together, PathStatistics)
        mode = posterior_mode(self.model, together)
        layer = layer_at(self.model, together, mode)
        priors = layer.precision(curvature_of_priors(self.model, together, mode))
        sample, free = path.thinned(SAMPLE), layer.sd > 0
        times = len(path) / len(sample)
        adjustment = sandwich(sample, kind, layer.u, priors=priors, free=free, times=times)
        if layer.u.ndim == 1:
            of_some = None
            if times > 4:
                own = path_statistics(sample, layout, pooled=True, assumptions=self.assumptions)
                of_some = shift_to_exact_mode(sample, own, kind, layer.u, free, curvature=priors)
            shift = shift_to_exact_mode(path, statistics, kind, layer.u, free, curvature=priors, start=of_some)
            shift = jax.device_put(np.asarray(shift, adjustment.centre.dtype))
            adjustment = dataclasses.replace(adjustment, shift=shift)
        return dataclasses.replace(statistics, adjustment=adjustment)

    def prepare(self, data: xr.Dataset) -> Prepared:
        """Prepare data for a fit; of data in chunks, only some of the networks are kept."""
        others = self.assumptions.other_terms
        path = path_of(data, others)
        if not in_chunks(data):
            each = self.adjusted(path)
            return Prepared(each, each, data)
        layout, kept = path_layout(path), kept_networks(data)
        joint = self.adjusted(path, layout)
        each = self.statistics(observed_path(kept, others), layout, pooled=False)
        return Prepared(joint, dataclasses.replace(each, adjustment=joint.adjustment), kept)
