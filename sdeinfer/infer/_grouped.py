"""The problem of networks in groups."""

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
from sdeinfer.infer._labels import GROUP, NETWORK, Labels, labels_by_trace
from sdeinfer.infer._mode import Pilot, layer_at, posterior_mode
from sdeinfer.infer._networks import Networks
from sdeinfer.infer._problem import Prepared
from sdeinfer.likelihood._model import Groups
from sdeinfer.likelihood._reduction import path_layout
from sdeinfer.likelihood._statistics import Estimates
from sdeinfer.likelihood._transitions import Path, observed_path
from sdeinfer.observation._dataset import groups_of

WEAK = 4.0
"""Information on a coordinate, in the units of `Coordinates.unconstrained`, that is subtracted from that of a group's
estimate: about twice the information in the population's prior. Below it the likelihood is flat and asymmetric, and the
group's offset is not centred at its estimate."""


@dataclasses.dataclass(frozen=True)
class Grouped(AbstractCovariances):
    """Networks in groups, observed at every layer."""

    model: Groups

    @functools.cached_property
    def alone(self) -> Networks:
        """The problem of a single group, which determines each group's range, mode and adjustment."""
        return Networks.of(self.model.ungrouped, self.assumptions)

    def parts(self, data: xr.Dataset) -> Iterator[tuple[str | None, Int[np.ndarray, " members"], AbstractCovariances]]:
        """Each group, with the problem of a single group."""
        groups = groups_of(data)
        for number, label in enumerate(groups.labels):
            yield str(label), groups.members(number), self.alone

    def pilot(self, data: xr.Dataset, path: Path) -> Pilot:
        """The estimates as if all networks were one group."""
        return self.alone.pilot(data, path)

    def prepare(self, data: xr.Dataset) -> Prepared:
        """Reduce networks in groups, with the adjustment and the estimates of each group by the model of one group."""
        path, groups, model = observed_path(data, self.assumptions.other_terms), groups_of(data), self.alone.model
        layout, adjustments, layers = path_layout(path), [], []
        each = self.alone.statistics(path, layout, pooled=False)
        for number, label in enumerate(groups.labels):
            members = groups.members(number)
            own = path.of_networks(members)
            if not len(own):
                raise InputError(f"group {label}: used: no transition is left")
            try:
                statistics = model.pool(self.alone.adjusted(own, layout, each.of_networks(members)))
            except InputError as error:
                raise InputError(f"group {label}: {error}") from error
            layers.append(layer_at(model, statistics, posterior_mode(model, statistics)))
            adjustments.append(statistics.adjustment)
        each = each.in_groups(groups)
        if each.adjustment is not None:
            adjustment = jax.tree.map(lambda *of_groups: jnp.stack(of_groups)[each.group], *adjustments)
            each = dataclasses.replace(each, adjustment=adjustment)
        centre, sd = (np.stack([getattr(layer, name) for layer in layers]) for name in ("u", "sd"))
        precision = np.maximum(1 / np.maximum(sd, 1e-12) ** 2 - WEAK, 0.0)
        each = dataclasses.replace(each, estimates=Estimates(*(jnp.asarray(x, float) for x in (centre, precision))))
        return Prepared(each, each, data)

    def of_networks(self, each: PyTree, layers: np.ndarray) -> np.ndarray:
        """Layers of every network from those of each group and width."""
        return layers[..., np.asarray(each.width), :]

    def labels(self, prepared: Prepared) -> Labels:
        """Those of the plates of the program, of networks and of groups."""
        coords = {NETWORK: prepared.kept[NETWORK].values, GROUP: np.asarray(groups_of(prepared.kept).labels)}
        return labels_by_trace(self.model, prepared.each, coords, {GROUP: GROUP})
