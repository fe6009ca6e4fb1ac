"""The problem of observed covariances, whose layers have a law that holds in a range.

Tests: `tests/infer/test_fit.py`.
"""

import abc
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
import xarray as xr
from jaxtyping import Bool, Int, PRNGKeyArray, PyTree

from sdeinfer._progress import phase
from sdeinfer.infer._chains import Draws
from sdeinfer.infer._densities import adjustment_of, log_likelihoods
from sdeinfer.infer._measures import Measure, attention_bend, attention_growth, logit_spread, relu_growth, rounding
from sdeinfer.infer._mode import Pilot
from sdeinfer.infer._predictive import affordable_draws, labelled_predictions, predict, with_numbers
from sdeinfer.infer._problem import NETWORK, AbstractProblem, Labels, Layers, Prepared, Sites, labels_by_trace, stamp
from sdeinfer.infer._range import range_to_fit
from sdeinfer.infer._settings import ADJUSTED_LIKELIHOOD, Law
from sdeinfer.layers import AbstractLayer
from sdeinfer.layers._base import limit_on_host
from sdeinfer.layers._templates import SIZES, attributes_of_layer
from sdeinfer.likelihood._assumptions import Assumptions
from sdeinfer.likelihood._model import EveryLayer
from sdeinfer.likelihood._transitions import USED, Path, with_used
from sdeinfer.observation import validate


@dataclasses.dataclass(frozen=True)
class AbstractCovariances(AbstractProblem):
    """A model of observed covariances; the kind is None for a program without a single layer, as of a mixture."""

    assumptions: Assumptions
    kind: AbstractLayer | None

    @property
    def by_user(self) -> bool:
        """Whether the model is a program of a user."""
        return isinstance(self.model, EveryLayer) and self.model.makes_layers

    @property
    def measures(self) -> set[Measure]:
        if self.kind is None:
            return {rounding}
        attention = {logit_spread, attention_growth, attention_bend} if self.kind.coordinates.temperatures else set()
        return {rounding} | attention | ({relu_growth} if limit_on_host(self.kind).relu_drift else set())

    def parts(
        self, data: xr.Dataset
    ) -> Iterator[tuple[str | None, Int[np.ndarray, " members"], "AbstractCovariances"]]:
        """Networks with a range of their own: a label, their indices, and the problem for them."""
        yield None, np.arange(data.sizes["network"]), self

    @abc.abstractmethod
    def transitions(self, data: xr.Dataset) -> Path:
        """The used transitions, in the range of the law or not."""

    @abc.abstractmethod
    def pilot(self, path: Path) -> Pilot:
        """The estimates given some of the transitions of a path."""

    @abc.abstractmethod
    def reduced(self, data: xr.Dataset, path: Path) -> PyTree:
        """The data that the likelihood takes, from the transitions in range."""

    def prepare(self, data: xr.Dataset, largest_logit: float) -> Prepared:
        phase("finding the range of the law")
        data = validate(data)
        path, attributes, _ = range_to_fit(self, data, self.transitions(data), largest_logit)
        phase("preparing the data")
        statistics, used = self.reduced(data, path), path.used
        attributes = {"largest_logit": largest_logit, "left_out": float(1 - used.mean()), **attributes}
        return Prepared(statistics, statistics, data, used, attributes)

    def of_networks(self, networks: PyTree, layers: np.ndarray) -> np.ndarray:
        """Layers of every network, shape (..., networks, coordinates), or one of all, from those of pooled data."""
        del networks
        return layers

    def affordable_draws(self, prepared: Prepared) -> int:
        return affordable_draws(prepared.data)

    def predict(
        self,
        prepared: Prepared,
        samples: Sites,
        layers: Layers,
        draws: Int[np.ndarray, " some"],
        *,
        law: Law,
        key: PRNGKeyArray,
    ) -> xr.Dataset | None:
        del samples
        if self.kind is None or layers is None:
            return None
        chosen = self.of_networks(prepared.networks, layers)[:, draws]
        points = chosen.reshape(-1, *chosen.shape[2:])
        replicates = predict(points, prepared.data, architecture=self.kind, law=law, key=key)
        return with_numbers(labelled_predictions(replicates, len(chosen), draws))

    def labels(self, prepared: Prepared) -> Labels:
        return labels_by_trace(self.model, prepared.networks, {NETWORK: prepared.data[NETWORK].values})

    def observed(self, prepared: Prepared) -> dict[str, xr.Dataset]:
        assert prepared.used is not None
        return groups_of_data(prepared.data, prepared.used)

    def label(self, labels: Labels, prepared: Prepared, before: Sites, draws: Draws) -> dict[str, xr.Dataset]:
        networks, groups = prepared.networks, super().label(labels, prepared, before, draws)
        if (adjustment := adjustment_of(networks)) is not None:
            of_networks = networks.with_adjustment(jax.device_put(adjustment.of_densities()))
            of_data = log_likelihoods(self.model, of_networks, draws.samples, draws.layers)
            groups[ADJUSTED_LIKELIHOOD] = groups["log_likelihood"]
            groups["log_likelihood"] = labels.of_densities(of_data)
        if self.kind is not None and draws.layers is not None:
            at_mean = self.of_networks(networks, draws.layers).mean(axis=(0, 1))
            index = prepared.data["network"]
            of_each = np.broadcast_to(np.asarray(at_mean, np.float64), (len(index), at_mean.shape[-1]))
            values = self.kind.coordinates.constrained(of_each.T)
            groups["layers"] = xr.Dataset(
                {name: ("network", value) for name, value in values.items()}, coords={"network": index.values}
            )
        return groups

    def attributes(self, labels: Labels, prepared: Prepared, draws: Draws) -> dict[str, Any]:
        of_all = {name: draws.samples[name] for name in draws.log_prior if labels.of_all(name)}
        # The data may come from layers of other sizes than those that are fitted.
        entries = {
            **{str(name): value for name, value in prepared.data.attrs.items() if name not in SIZES},
            **({"architecture": "none"} if self.kind is None else attributes_of_layer(self.kind)),
            **{f"fixed_{name}": value for name, value in self.assumptions.fixed.items()},
            "model": self.model.name,
            "every_layer": float(isinstance(self.model, EveryLayer)),
            "law": self.assumptions.law,
            **stamp(),
            **_identified(self, of_all),
            **_fixed_by_program(self, draws, of_all),
        }
        if (adjustment := adjustment_of(prepared.networks)) is not None:
            entries["adjustment_error"] = float(np.asarray(adjustment.error).max())
        return entries


def groups_of_data(data: xr.Dataset, used: Bool[np.ndarray, "networks transitions"]) -> dict[str, xr.Dataset]:
    """The groups observed_data and constant_data, with the transitions that were used."""
    width = data["width"].drop_vars("width")
    return {
        "observed_data": with_numbers(data[["covariance"]].drop_vars("width")),
        "constant_data": with_used(data, used)[[USED]].drop_vars("width").assign(width=width),
    }


def _identified(problem: AbstractCovariances, samples: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """The names of the sampled parameters; a program may have further sites, those of the package's are not public."""
    known = None if problem.kind is None else problem.kind.coordinates
    names = list(samples) if problem.by_user else () if known is None else known.identified
    if known is not None:
        names = [name for name in names if name not in known.sampled or name in known.identified]
    return {"identified": " ".join(name for name in names if name in samples)}


def _fixed_by_program(
    problem: AbstractCovariances, draws: Draws, samples: Mapping[str, np.ndarray]
) -> dict[str, float]:
    """Coordinates with one value for all draws, as those of a conditioned model; none if a site does not vary."""
    layers = draws.layers
    if not problem.by_user or problem.kind is None or layers is None or any(np.ptp(x) == 0 for x in samples.values()):
        return {}
    return {
        f"fixed_{name}": float(parameter.from_real(layers[..., place].flat[0]))
        for place, (name, parameter) in enumerate(problem.kind.coordinates.sampled.items())
        if np.ptp(layers[..., place]) == 0 and name not in samples
    }
