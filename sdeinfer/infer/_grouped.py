"""The problem of networks in groups. Tests: `tests/models/test_hierarchical.py`."""

import dataclasses
import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import xarray as xr
from jaxtyping import Int, PyTree

from sdeinfer._files import InputError
from sdeinfer.infer._covariances import AbstractCovariances
from sdeinfer.infer._mode import Pilot, layer_at, posterior_mode
from sdeinfer.infer._networks import Networks
from sdeinfer.infer._problem import GROUP, NETWORK, Labels, Prepared, labels_by_trace
from sdeinfer.likelihood._model import GroupModel
from sdeinfer.likelihood._reduction import path_layout
from sdeinfer.likelihood._statistics import Estimates, PathStatistics
from sdeinfer.likelihood._transitions import Path
from sdeinfer.observation._dataset import groups_of


@dataclasses.dataclass(frozen=True)
class Grouped(AbstractCovariances):
    """Networks in groups, observed at every layer."""

    model: GroupModel

    @functools.cached_property
    def alone(self) -> Networks:
        """The problem of a single group, which determines each group's range, mode and adjustment."""
        return Networks(self.model.ungrouped, self.assumptions, self.assumptions.kind)

    def parts(self, data: xr.Dataset) -> Iterator[tuple[str | None, Int[np.ndarray, " members"], AbstractCovariances]]:
        groups = groups_of(data)
        for number, label in enumerate(groups.labels):
            yield str(label), groups.members(number), self.alone

    def transitions(self, data: xr.Dataset) -> Path:
        return self.alone.transitions(data)

    def pilot(self, path: Path) -> Pilot:
        return self.alone.pilot(path)

    def reduced(self, data: xr.Dataset, path: Path) -> PathStatistics:
        path.require_densities()
        groups, model, layout, adjustments, layers = groups_of(data), self.alone.model, path_layout(path), [], []
        networks = self.alone.statistics(path, layout, pooled=False)
        for number, label in enumerate(groups.labels):
            members = groups.members(number)
            transitions = path.of_networks(members)
            try:
                statistics = model.pool(self.alone.adjusted(networks.of_networks(members), transitions))
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
        estimates = Estimates(*(jnp.asarray(x, float) for x in (centre, precision)))
        return dataclasses.replace(networks, estimates=estimates)

    def of_networks(self, networks: PyTree, layers: np.ndarray) -> np.ndarray:
        return layers[..., np.asarray(networks.width), :]

    def labels(self, prepared: Prepared) -> Labels:
        coords = {NETWORK: prepared.data[NETWORK].values, GROUP: np.asarray(groups_of(prepared.data).labels)}
        return labels_by_trace(self.model, prepared.networks, coords, {GROUP: GROUP})
