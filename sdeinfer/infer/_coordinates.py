"""The coordinates of a model's layer, or of each network's layer, at values of the model's sites."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PyTree

from sdeinfer.infer._densities import constrained_sites
from sdeinfer.infer._mode import DIFFERENCES, Mode
from sdeinfer.likelihood import AbstractModel


class LayerAt(NamedTuple):
    """Coordinates of a layer, or of each network's layer, at a mode of the posterior.

    Attributes:
        u: `Coordinates.unconstrained`, shape (coordinates,) or (networks, coordinates).
        sd: standard deviations by the curvature at the mode; zero for a fixed coordinate.
        along: derivatives in the unconstrained values of the sites.
    """

    u: Float[np.ndarray, "*networks coordinates"]
    sd: Float[np.ndarray, "*networks coordinates"]
    along: Float[np.ndarray, "sites *networks coordinates"]

    def precision(self, curvature: Float[np.ndarray, "sites sites"]) -> Float[np.ndarray, "coordinates coordinates"]:
        """Precision of the coordinates, of the average network's, for a normal law of the sites; 0 for a fixed one."""
        along = self.along.reshape(len(self.along), -1, self.along.shape[-1])
        solved = np.linalg.solve(curvature, along.reshape(len(along), -1)).reshape(along.shape)
        covariance = np.einsum("snk,snl->kl", along, solved) / along.shape[1]
        free, precision = np.flatnonzero(np.diag(covariance) > 0), np.zeros_like(covariance)
        precision[np.ix_(free, free)] = np.linalg.pinv(covariance[np.ix_(free, free)], hermitian=True)
        return precision


type Pilot = Callable[[Int[np.ndarray, " some"], Mode | None], tuple[Mode, LayerAt]]
"""Function from indices of transitions, and a mode to start from or None, to the mode given these transitions."""


def layer_at(model: AbstractModel, prepared: PyTree, mode: Mode, latent: Array | None = None) -> LayerAt:
    """The coordinates of the layer at a mode.

    Arguments:
        model: the model, of a single layer or one for each network.
        prepared: pooled data of the model.
        mode: mode of the posterior.
        latent: any latent layers, for a model that has some.
    """
    step = 10 * DIFFERENCES[jnp.asarray(1.0).dtype.itemsize]
    steps = step * np.eye(len(mode.x))
    around = np.concatenate([mode.x[None], mode.x + steps, mode.x - steps])
    sites = mode.by_site(np.asarray(around, jnp.result_type(float))[None])
    _, layers = constrained_sites(model, jax.device_put(prepared), sites, latent)
    assert layers is not None
    u = np.asarray(layers[0], np.float64)
    count = len(mode.x)
    along = (u[1 : 1 + count] - u[1 + count :]) / (2 * step)
    # Variance of each coordinate by the delta method; `along` has the shape (sites, ..., coordinates).
    variance = np.einsum("s...,st,t...->...", along, mode.covariance, along)
    return LayerAt(u[0], np.sqrt(np.maximum(variance, 0.0)), along)
