"""The problem of networks with latent layers."""

import dataclasses

import jax.random as jr
import numpy as np
import xarray as xr
from jaxtyping import Int, PRNGKeyArray

from sdeinfer.infer._covariances import AbstractCovariances
from sdeinfer.infer._densities import given_latent, prior_draws
from sdeinfer.infer._labels import NETWORK, Labels
from sdeinfer.infer._latent import draw_latent, latent_mode
from sdeinfer.infer._measures import Measure, relu_growth
from sdeinfer.infer._metropolis import Metropolis
from sdeinfer.infer._mode import LayerAt, Mode, Pilot, layer_at
from sdeinfer.infer._problem import Layers, Prepared, Sites
from sdeinfer.infer._samplers import AbstractSampler
from sdeinfer.likelihood._model import LatentLayers
from sdeinfer.likelihood._program import PATH
from sdeinfer.likelihood._transitions import Path


@dataclasses.dataclass(frozen=True)
class Latent(AbstractCovariances):
    """Networks with latent layers."""

    model: LatentLayers

    @property
    def measures(self) -> set[Measure]:
        """Those of attention only: the spread may grow over the latent layers."""
        return super().measures - {relu_growth}

    def sampler(self, **settings: int) -> AbstractSampler:
        """Metropolis, which has moves for the latent layers."""
        return Metropolis(**settings)

    def prior(self, prepared: Prepared, *, draws: int, key: PRNGKeyArray) -> tuple[Sites, Layers]:
        """Prior draws of the unobserved sites, without latent layers, and of the layers."""
        latent = draw_latent(self.model, prepared.each, key)
        return prior_draws(given_latent(self.model), prepared.each, latent, draws=draws, key=key)

    def pilot(self, data: xr.Dataset, path: Path) -> Pilot:
        """The modes given some of the bridges, whose likelihoods are averaged over draws of the latent layers."""
        bridges = self.model.bridges(data, self.assumptions)

        def estimate(chosen: Int[np.ndarray, " some"], start: Mode | None) -> tuple[Mode, LayerAt]:
            seen = np.isin(np.arange(len(path)), chosen)
            mode = latent_mode(self.model, bridges, seen, start=start, key=jr.key(0))
            return mode, layer_at(self.model, bridges, mode, draw_latent(self.model, bridges, jr.key(0)))

        return estimate

    def prepare(self, data: xr.Dataset) -> Prepared:
        """Make bridges from each observation to the next."""
        bridges = self.model.bridges(data, self.assumptions)
        return Prepared(bridges, bridges, data)

    def labels(self, prepared: Prepared) -> Labels:
        """The parameters are scalars, and each network has a log likelihood."""
        return Labels({}, {PATH: [NETWORK]}, [PATH], {NETWORK: prepared.kept[NETWORK].values})

    @property
    def every_layer(self) -> bool:
        """Some layers are latent."""
        return False
