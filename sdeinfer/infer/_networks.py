"""The problem of networks observed at every layer. Tests: `tests/infer/test_fit.py`."""

import dataclasses
from collections.abc import Callable

import jax
import numpy as np
import xarray as xr
from jaxtyping import Int

from sdeinfer.covariance import Pattern
from sdeinfer.infer._covariances import AbstractCovariances
from sdeinfer.infer._innovations import Scores, law_at, scores_of, shift_to_uncompressed_mode
from sdeinfer.infer._mode import LayerAt, Mode, Pilot, curvature_of_priors, layer_at, posterior_mode
from sdeinfer.infer._sandwich import sandwich
from sdeinfer.layers import AbstractLayer, template
from sdeinfer.likelihood._assumptions import Assumptions
from sdeinfer.likelihood._model import EveryLayer
from sdeinfer.likelihood._path import no_adjustment
from sdeinfer.likelihood._program import observed_by, shared_layer
from sdeinfer.likelihood._reduction import Layout, path_layout, path_statistics
from sdeinfer.likelihood._statistics import NODES, PathStatistics, blank_statistics
from sdeinfer.likelihood._transitions import Path, every_transition

SAMPLED_TRANSITIONS = 16_384
"""Largest number of transitions from whose starts exact layers are drawn for the adjustment of the likelihood, and to
which `check` fits other architectures."""

SAMPLES_OF_A_START = 4
"""Transitions over those of the sample, above which the sample's shift is a start for that of all: without it a fit of
10⁵ transitions in chunks takes 20 % longer, one more pass over the data."""


@dataclasses.dataclass(frozen=True)
class Networks(AbstractCovariances):
    """Networks observed at every layer; whether each has a layer of its own."""

    model: EveryLayer
    own_layers: bool = False

    @classmethod
    def of(
        cls,
        model: EveryLayer,
        assumptions: Assumptions,
        *,
        networks: int,
        tokens: int,
        pattern: Pattern,
    ) -> "Networks":
        """The problem of a model; a program of a user is run on blank data of this shape."""
        if not model.makes_layers:
            return cls(model, assumptions, assumptions.kind)

        def blank(count: int) -> PathStatistics:
            return blank_statistics(tokens, count, pattern=pattern, assumptions=assumptions)

        if model.needs_networks:
            layer, _ = observed_by(model, blank(networks))
        else:
            layer = shared_layer(model, blank(1), blank(2))
        own_layers = any(leaf.ndim for leaf in jax.tree.leaves(layer))
        return cls(model, assumptions, None if layer is None else template(layer), own_layers)

    def transitions(self, data: xr.Dataset) -> Path:
        return every_transition(data, self.assumptions.other_terms)

    def pilot(self, path: Path) -> Pilot:
        def estimate(chosen: Int[np.ndarray, " some"], start: Mode | None) -> tuple[Mode, LayerAt]:
            some = path.take(chosen)
            some.require_densities()
            statistics = self.statistics(some, path_layout(some, nodes=NODES[0]), pooled=True)
            mode = posterior_mode(self.model, statistics, start=start)
            return mode, layer_at(self.model, statistics, mode)

        return estimate

    def reduced(self, data: xr.Dataset, path: Path) -> PathStatistics:
        del data
        path.require_densities()
        return self.adjusted(self.statistics(path, path_layout(path), pooled=False), path)

    @property
    def adjusted_kind(self) -> AbstractLayer | None:
        """The kind of layer, for which the likelihood is adjusted; None by the limit's law, which is not."""
        return None if self.assumptions.law == "limit" else self.kind

    def statistics(self, path: Path, layout: Layout, *, pooled: bool) -> PathStatistics:
        """The statistics of transitions, with the identity adjustment where the likelihood will be adjusted."""
        pooled = pooled and not self.model.needs_networks
        return self.with_identity_adjustment(path_statistics(path, layout, pooled=pooled, assumptions=self.assumptions))

    def with_identity_adjustment(self, statistics: PathStatistics) -> PathStatistics:
        """The statistics with an adjustment that changes nothing, in whose place the likelihood's comes."""
        if (kind := self.adjusted_kind) is None:
            return statistics
        statistics = statistics.by_network() if self.own_layers else statistics
        axis = statistics.networks if self.own_layers else None
        return dataclasses.replace(statistics, adjustment=no_adjustment(len(kind.coordinates), axis))

    def adjusted(self, statistics: PathStatistics, path: Path) -> PathStatistics:
        """The statistics of a path with the likelihood's adjustment."""
        sample = path.thinned(SAMPLED_TRANSITIONS)
        return self.adjusted_by(statistics, sample, self.scores(path), data_per_sample=len(path) / len(sample))

    def scores(self, path: Path) -> Callable[[np.ndarray], Scores]:
        """Sums over a path by the uncompressed law, a function of the coordinates of the layer."""

        def of_path(u: np.ndarray) -> Scores:
            assert self.kind is not None
            return scores_of(path, law_at(self.kind, u, widths=np.unique(path.width)))

        return of_path

    def adjusted_by(
        self,
        statistics: PathStatistics,
        sample: Path,
        scores: Callable[[np.ndarray], Scores],
        *,
        data_per_sample: float,
    ) -> PathStatistics:
        """The statistics with the likelihood's adjustment, by exact layers from the starts of a sample of transitions.

        There is none by the limit, and without a single layer.
        """
        if (kind := self.adjusted_kind) is None:
            return statistics
        together = self.model.pool(statistics)
        assert isinstance(together, PathStatistics)
        mode = posterior_mode(self.model, together)
        layer = layer_at(self.model, together, mode)
        priors, free = layer.precision(curvature_of_priors(self.model, together, mode)), layer.sd > 0
        adjustment = sandwich(sample, kind, layer.u, priors=priors, free=free, data_per_sample=data_per_sample)
        if layer.u.ndim == 1:
            start = np.zeros_like(layer.u)
            if data_per_sample > SAMPLES_OF_A_START:
                of_sample = self.statistics(sample, path_layout(sample), pooled=True)
                start = shift_to_uncompressed_mode(self.scores(sample), of_sample, kind, layer.u, free, priors, start)
            shift = shift_to_uncompressed_mode(scores, statistics, kind, layer.u, free, priors, start)
            shift = jax.device_put(np.asarray(shift, adjustment.centre.dtype))
            adjustment = dataclasses.replace(adjustment, shift=shift)
        return dataclasses.replace(statistics, adjustment=adjustment)
