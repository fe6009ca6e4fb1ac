"""The problem of networks observed at every layer. Tests: `tests/infer/test_fit.py`."""

import dataclasses
from collections.abc import Callable

import jax
import numpy as np
import xarray as xr
from jaxtyping import Int

from sdeinfer.covariance import Pattern
from sdeinfer.covariance._pattern import EVERY_TOKEN
from sdeinfer.infer._covariances import AbstractCovariances
from sdeinfer.infer._innovations import Scores, law_at, scores_of, shift_to_exact_mode
from sdeinfer.infer._mode import LayerAt, Mode, Pilot, curvature_of_priors, layer_at, posterior_mode
from sdeinfer.infer._sandwich import sandwich
from sdeinfer.layers import AbstractLayer, template
from sdeinfer.likelihood._assumptions import Assumptions
from sdeinfer.likelihood._model import EveryLayer
from sdeinfer.likelihood._path import no_adjustment
from sdeinfer.likelihood._program import layer_of_each, shared_layer
from sdeinfer.likelihood._reduction import Layout, path_layout, path_statistics
from sdeinfer.likelihood._statistics import NODES, PathStatistics, blank_statistics
from sdeinfer.likelihood._transitions import Path, every_transition


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
        networks: int = 2,
        tokens: int = 2,
        pattern: Pattern = EVERY_TOKEN,
    ) -> "Networks":
        """The problem of a model; a program of a user is run on blank data of this shape."""
        if not model.makes_layers:
            return cls(model, assumptions, assumptions.kind)

        def blank(count: int) -> PathStatistics:
            return blank_statistics(tokens, count, pattern=pattern, assumptions=assumptions)

        layer = (
            layer_of_each(model, blank(networks)) if model.needs_networks else shared_layer(model, blank(1), blank(2))
        )
        own_layers = any(leaf.ndim for leaf in jax.tree.leaves(layer))
        return cls(model, assumptions, None if layer is None else template(layer), own_layers)

    @property
    def adjusted_kind(self) -> AbstractLayer | None:
        """The kind of layer, for which the likelihood is adjusted; None by the limit's law, which is not."""
        return None if self.assumptions.law == "limit" else self.kind

    def statistics(self, path: Path, layout: Layout | None = None, *, pooled: bool = True) -> PathStatistics:
        """The statistics of transitions, with the identity adjustment where the likelihood will be adjusted."""
        pooled = pooled and not self.model.needs_networks
        return self.unadjusted(path_statistics(path, layout, pooled=pooled, assumptions=self.assumptions))

    def unadjusted(self, statistics: PathStatistics) -> PathStatistics:
        if (kind := self.adjusted_kind) is None:
            return statistics
        statistics = statistics.by_network() if self.own_layers else statistics
        axis = statistics.networks if self.own_layers else None
        return dataclasses.replace(statistics, adjustment=no_adjustment(len(kind.coordinates), axis))

    def transitions(self, data: xr.Dataset) -> Path:
        return every_transition(data, self.assumptions.other_terms)

    def pilot(self, path: Path) -> Pilot:
        def estimate(chosen: Int[np.ndarray, " some"], start: Mode | None) -> tuple[Mode, LayerAt]:
            path.require_densities(chosen)
            some = path.take(chosen)
            statistics = self.statistics(some, path_layout(some, nodes=NODES[0]))
            mode = posterior_mode(self.model, statistics, start=start)
            return mode, layer_at(self.model, statistics, mode)

        return estimate

    def adjusted(
        self,
        path: Path,
        layout: Layout | None = None,
        statistics: PathStatistics | None = None,
        *,
        pooled: bool = False,
        times: float = 1.0,
        scores: Callable[[np.ndarray], Scores] | None = None,
    ) -> PathStatistics:
        """`statistics`, with the likelihood's adjustment; there is none for the limit and without a single layer.

        Statistics with this layout may be given, also of more transitions: by the factor `times`, with the scores of
        all of them at any coordinates.
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
        sample, free = path.thinned(16_384), layer.sd > 0
        times, widths = times * len(path) / len(sample), np.unique(path.width)

        def of_path(some: Path) -> Callable[[np.ndarray], Scores]:
            return lambda u: scores_of(some, law_at(kind, u, widths=widths))

        adjustment = sandwich(sample, kind, layer.u, priors=priors, free=free, times=times)
        if layer.u.ndim == 1:
            of_some = None
            if times > 4:  # the mode of the sample saves a pass over the data
                sample_statistics = path_statistics(sample, layout, pooled=True, assumptions=self.assumptions)
                of_some = shift_to_exact_mode(of_path(sample), sample_statistics, kind, layer.u, free, curvature=priors)
            scores = of_path(path) if scores is None else scores
            shift = shift_to_exact_mode(scores, statistics, kind, layer.u, free, curvature=priors, start=of_some)
            shift = jax.device_put(np.asarray(shift, adjustment.centre.dtype))
            adjustment = dataclasses.replace(adjustment, shift=shift)
        return dataclasses.replace(statistics, adjustment=adjustment)

    def reduced(self, data: xr.Dataset, path: Path) -> PathStatistics:
        del data
        path.require_densities()
        return self.adjusted(path)
