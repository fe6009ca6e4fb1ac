"""The coordinates of a model's layer, or of each network's layer, at values of the model's sites."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, PyTree
from numpyro import distributions as dist

from sdeinfer.infer._densities import constrained_sites
from sdeinfer.infer._mode import DIFFERENCES, Mode, as_adjusted
from sdeinfer.likelihood import AbstractModel, EveryLayer, support_bounds
from sdeinfer.parameters import Parameter

NATURAL = {"logit": (0.0, 1.0), "log": (0.0, np.inf), "identity": (-np.inf, np.inf)}
"""Supports for which NumPyro's unconstrained value of a site equals the coordinate, by bijection."""


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


def layer_at(model: AbstractModel, prepared: PyTree, mode: Mode) -> LayerAt:
    """The coordinates of the layer at a mode.

    Arguments:
        model: the model.
        prepared: pooled data of the model.
        mode: mode of the posterior.
    """
    step = 10 * DIFFERENCES[jnp.asarray(1.0).dtype.itemsize]
    steps = step * np.eye(len(mode.x))
    around = np.concatenate([mode.x[None], mode.x + steps, mode.x - steps])
    u = _coordinates(model, prepared, mode.by_site(around))
    count = len(mode.x)
    along = (u[1 : 1 + count] - u[1 + count :]) / (2 * step)
    # Variance of each coordinate by the delta method; `along` has the shape (sites, ..., coordinates).
    variance = np.einsum("s...,st,t...->...", along, mode.covariance, along)
    return LayerAt(u[0], np.sqrt(np.maximum(variance, 0.0)), along)


def _coordinates(
    model: AbstractModel, prepared: PyTree, z: Mapping[str, Float[np.ndarray, "draws ..."]]
) -> Float[np.ndarray, "draws *networks coordinates"]:
    if isinstance(model, EveryLayer) and model.makes_layers:
        chain = {site: np.asarray(values, jnp.result_type(float))[None] for site, values in z.items()}
        _, u = constrained_sites(model, jax.device_put(as_adjusted(model, prepared)), chain)
        assert u is not None
        return np.asarray(u[0], np.float64)
    assumptions = prepared.assumptions
    columns = []
    for name, parameter in assumptions.kind.coordinates.sampled.items():
        if name in z:
            columns.append(_from_site(z[name], assumptions.prior_of(name), parameter))
        else:
            count = len(next(iter(z.values())))
            columns.append(np.full(count, parameter.to_real(np.float64(assumptions.fixed[name]))))
    return np.stack(columns, axis=-1)


def _from_site(z: np.ndarray, prior: Any, parameter: Parameter) -> np.ndarray:
    """The coordinate at NumPyro's unconstrained values z of its site."""
    if support_bounds(prior) == NATURAL[parameter.bijection]:
        return z
    return parameter.to_real(np.asarray(dist.biject_to(prior.support)(jnp.asarray(z)), np.float64))
