"""The problems: networks observed at every layer, in groups, or with latent layers; increments of branches.

Tests: `tests/models/test_hierarchical.py`.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import xarray as xr
from jaxtyping import Int, PRNGKeyArray, PyTree

from sdeinfer._files import InputError
from sdeinfer.blocks._attributes import BLOCKS, attributes_of_blocks, stack_in
from sdeinfer.blocks._coefficients import labelled_coefficients
from sdeinfer.blocks._order import BlockOrder
from sdeinfer.covariance import Pattern
from sdeinfer.covariance._pattern import EVERY_TOKEN
from sdeinfer.infer._chains import Draws
from sdeinfer.infer._covariances import AbstractCovariances
from sdeinfer.infer._densities import given_latent, prior_draws
from sdeinfer.infer._innovations import Scores, law_at, scores_of, shift_to_exact_mode
from sdeinfer.infer._measures import Measure, relu_growth
from sdeinfer.infer._metropolis import Metropolis, draw_latent, latent_mode
from sdeinfer.infer._mode import LayerAt, Mode, Pilot, curvature_of_priors, layer_at, posterior_mode
from sdeinfer.infer._problem import (
    GROUP,
    NETWORK,
    AbstractProblem,
    Labels,
    Layers,
    Prepared,
    Sites,
    labels_by_trace,
    pose,
    stamp,
)
from sdeinfer.infer._samplers import AbstractSampler
from sdeinfer.infer._sandwich import sandwich
from sdeinfer.layers import AbstractLayer, template
from sdeinfer.likelihood._assumptions import Assumptions
from sdeinfer.likelihood._increments import BranchModel, BranchPath
from sdeinfer.likelihood._model import EveryLayer, GroupModel, LatentLayers
from sdeinfer.likelihood._path import no_adjustment
from sdeinfer.likelihood._program import PATH, layer_of_each, shared_layer
from sdeinfer.likelihood._reduction import Layout, path_layout, path_statistics
from sdeinfer.likelihood._statistics import NODES, Estimates, PathStatistics, blank_statistics
from sdeinfer.likelihood._transitions import Path, observed_path
from sdeinfer.observation import validate_branches
from sdeinfer.observation._dataset import groups_of
from sdeinfer.observation._networks import MEASURED, NO_BLOCKS


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

    def pilot(self, data: xr.Dataset, path: Path) -> Pilot:
        del data

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

    def prepare(self, data: xr.Dataset) -> Prepared:
        statistics = self.adjusted(observed_path(data, self.assumptions.other_terms))
        return Prepared(statistics, statistics, data)


@dataclasses.dataclass(frozen=True)
class Grouped(AbstractCovariances):
    """Networks in groups, observed at every layer."""

    model: GroupModel

    @functools.cached_property
    def alone(self) -> Networks:
        """The problem of a single group, which determines each group's range, mode and adjustment."""
        return Networks.of(self.model.ungrouped, self.assumptions)

    def parts(self, data: xr.Dataset) -> Iterator[tuple[str | None, Int[np.ndarray, " members"], AbstractCovariances]]:
        groups = groups_of(data)
        for number, label in enumerate(groups.labels):
            yield str(label), groups.members(number), self.alone

    def pilot(self, data: xr.Dataset, path: Path) -> Pilot:
        return self.alone.pilot(data, path)

    def prepare(self, data: xr.Dataset) -> Prepared:
        path, groups, model = observed_path(data, self.assumptions.other_terms), groups_of(data), self.alone.model
        layout, adjustments, layers = path_layout(path), [], []
        networks = self.alone.statistics(path, layout, pooled=False)
        for number, label in enumerate(groups.labels):
            members = groups.members(number)
            transitions = path.of_networks(members)
            if not len(transitions):
                raise InputError(f"group {label}: used: no transition is left")
            try:
                statistics = model.pool(self.alone.adjusted(transitions, layout, networks.of_networks(members)))
            except InputError as error:
                raise InputError(f"group {label}: {error}") from error
            layers.append(layer_at(model, statistics, posterior_mode(model, statistics)))
            adjustments.append(statistics.adjustment)
        networks = networks.in_groups(groups)
        if networks.adjustment is not None:
            adjustment = jax.tree.map(lambda *of_groups: jnp.stack(of_groups)[networks.group], *adjustments)
            networks = dataclasses.replace(networks, adjustment=adjustment)
        centre, sd = (np.stack([getattr(layer, name) for layer in layers]) for name in ("u", "sd"))
        # Less about twice the information in the population's prior: below it the likelihood is flat and asymmetric.
        # Without this, eight groups of Transformers have three quarters of the effective draws.
        precision = np.maximum(1 / np.maximum(sd, 1e-12) ** 2 - 4.0, 0.0)
        networks = dataclasses.replace(
            networks, estimates=Estimates(*(jnp.asarray(x, float) for x in (centre, precision)))
        )
        return Prepared(networks, networks, data)

    def of_networks(self, networks: PyTree, layers: np.ndarray) -> np.ndarray:
        return layers[..., np.asarray(networks.width), :]

    def labels(self, prepared: Prepared) -> Labels:
        coords = {NETWORK: prepared.data[NETWORK].values, GROUP: np.asarray(groups_of(prepared.data).labels)}
        return labels_by_trace(self.model, prepared.networks, coords, {GROUP: GROUP})


@dataclasses.dataclass(frozen=True)
class Latent(AbstractCovariances):
    """Networks with latent layers."""

    model: LatentLayers

    @property
    def measures(self) -> set[Measure]:
        return super().measures - {relu_growth}  # as V may grow over the latent layers

    def sampler(self, **settings: int) -> AbstractSampler:
        return Metropolis(**settings)

    def prior(self, prepared: Prepared, *, draws: int, key: PRNGKeyArray) -> tuple[Sites, Layers]:
        latent = draw_latent(self.model, prepared.networks, key)
        return prior_draws(given_latent(self.model), prepared.networks, latent, draws=draws, key=key)

    def pilot(self, data: xr.Dataset, path: Path) -> Pilot:
        """The modes given some of the bridges, whose likelihoods are averaged over draws of the latent layers."""
        bridges = self.model.bridges(data, self.assumptions)

        def estimate(chosen: Int[np.ndarray, " some"], start: Mode | None) -> tuple[Mode, LayerAt]:
            seen = np.isin(np.arange(len(path)), chosen)
            mode = latent_mode(self.model, bridges, seen, start=start, key=jr.key(0))
            return mode, layer_at(self.model, bridges, mode, draw_latent(self.model, bridges, jr.key(0)))

        return estimate

    def prepare(self, data: xr.Dataset) -> Prepared:
        bridges = self.model.bridges(data, self.assumptions)
        return Prepared(bridges, bridges, data)

    def labels(self, prepared: Prepared) -> Labels:
        return Labels({}, {PATH: [NETWORK]}, [PATH], {NETWORK: prepared.data[NETWORK].values})

    @property
    def every_layer(self) -> bool:
        return False


@dataclasses.dataclass(frozen=True)
class Branches(AbstractProblem):
    """Increments of residual branches; priors replace those of strengths, and make gains and temperatures latent."""

    model: BranchModel
    order: BlockOrder
    priors: Mapping[str, Any]
    measured: bool = False  # whether gains and temperatures are those of the weights

    def prepare(self, data: xr.Dataset) -> Prepared:
        path = BranchPath.of(data, self.order, self.priors)
        return Prepared(path, path, data)

    def labels(self, prepared: Prepared) -> Labels:
        coords = {name: prepared.data[name].values for name in (NETWORK, "branch")}
        names = labels_by_trace(self.model, prepared.networks, coords, {"layer": "layer"})
        return names._replace(densities=names.densities | {"increments": [NETWORK, "branch"]})

    def observed(self, prepared: Prepared) -> dict[str, xr.Dataset]:
        data, read = prepared.data, ["input", "mean"]  # of the branches, which no parameter of theirs changes
        return {
            "observed_data": data.drop_vars(read),
            "constant_data": data[read],
            "coefficients": labelled_coefficients(np.asarray(prepared.networks.coefficients), self.order, data),
        }

    def attributes(self, data: xr.Dataset, labels: Labels, prepared: Prepared, draws: Draws) -> dict[str, Any]:
        del labels
        path, order = prepared.networks, self.order
        return {
            **{name: value for name, value in data.attrs.items() if name not in (MEASURED, BLOCKS)},
            **attributes_of_blocks(order),
            **{f"declared_{name}": value for name, value in (order.strengths | order.shapes).items()},
            **{f"fixed_{name}": prior.value for name, prior in path.prior if isinstance(prior.value, float)},
            "model": self.model.name,
            "identified": " ".join(name for name in draws.log_prior if not name.endswith("_offset")),
            "normed": " ".join(order.normed),
            **({MEASURED: 1.0} if self.measured else {}),
            **stamp(),
        }


@pose.register
def pose_branches(
    model: BranchModel, data: xr.Dataset, *, architecture: Any, law: str, prior: Mapping[str, Any] | None
) -> tuple[xr.Dataset, Branches]:
    """Validate increments; return them, and the problem."""
    del law
    if "increment" not in data:
        raise InputError(f"data: {model.name} takes increments of branches, as of si.observe_branches")
    data = validate_branches(data)
    measured = architecture is None and data.attrs.get(MEASURED) == 1.0
    architecture = _blocks_in(data) if architecture is None else architecture
    if not isinstance(architecture, AbstractLayer):
        raise InputError("architecture: a si.blocks.Block, or a si.Stack of the blocks of a layer, is needed")
    return data, Branches(model, BlockOrder.of_data(architecture, data), prior or {}, measured)


def _blocks_in(data: xr.Dataset) -> AbstractLayer | None:
    """The blocks that a Dataset describes; None without a description."""
    if NO_BLOCKS in data.attrs:
        raise InputError(f"architecture: no blocks describe the network ({data.attrs[NO_BLOCKS]}): give its si.Stack")
    return stack_in(data.attrs) if BLOCKS in data.attrs else None
