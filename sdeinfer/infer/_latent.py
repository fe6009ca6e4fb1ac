"""The problem of networks with latent layers. Tests: `tests/infer/test_metropolis.py`."""

import dataclasses

import jax.random as jr
import numpy as np
import xarray as xr
from jaxtyping import Int, PRNGKeyArray

from sdeinfer.infer._covariances import AbstractCovariances
from sdeinfer.infer._densities import given_latent_layers, prior_draws
from sdeinfer.infer._latent_densities import draw_latent, latent_mode
from sdeinfer.infer._measures import Measure, relu_growth
from sdeinfer.infer._metropolis import Metropolis
from sdeinfer.infer._mode import LayerAt, Mode, Pilot, layer_at
from sdeinfer.infer._problem import NETWORK, Labels, Layers, Prepared, Sites
from sdeinfer.infer._samplers import AbstractSampler
from sdeinfer.likelihood._bridge import Bridges, bridges_of
from sdeinfer.likelihood._model import LatentLayers
from sdeinfer.likelihood._program import PATH
from sdeinfer.likelihood._transitions import Path


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
        return prior_draws(given_latent_layers(self.model), prepared.networks, latent, draws=draws, key=key)

    def transitions(self, data: xr.Dataset) -> Path:
        return self.model.transitions(data)

    def pilot(self, path: Path) -> Pilot:
        """The modes given some of the bridges, whose likelihoods are averaged over draws of the latent layers."""
        bridges = bridges_of(path, self.assumptions)

        def estimate(chosen: Int[np.ndarray, " some"], start: Mode | None) -> tuple[Mode, LayerAt]:
            seen = np.isin(np.arange(len(path)), chosen)
            mode = latent_mode(self.model, bridges, seen, start=start, key=jr.key(0))
            return mode, layer_at(self.model, bridges, mode, draw_latent(self.model, bridges, jr.key(0)))

        return estimate

    def reduced(self, data: xr.Dataset, path: Path) -> Bridges:
        del data
        return bridges_of(path, self.assumptions)

    def labels(self, prepared: Prepared) -> Labels:
        return Labels({}, {PATH: [NETWORK]}, [PATH], {NETWORK: prepared.data[NETWORK].values})
