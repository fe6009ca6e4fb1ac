"""Adjustment of a likelihood whose curvature does not match the scatter of its score."""

import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from sdeinfer.layers import AbstractLayer


class Adjustment(eqx.Module):
    """ℓ(u) → ℓ(û + C (u − û − s))/φ, with the layer's coordinates u (`Coordinates.unconstrained`).

    For τ0 below `least_tau0` the law of attention does not hold for the data; ℓ is constant there, and the prior
    determines the posterior.

    Attributes:
        dispersion: φ.
        least_tau0: smallest τ0 at which the law is used.
        centre: û, shape (parameters,).
        matrix: C, shape (parameters, parameters).
        shift: s, the mode under the exact law of a layer less û; shape (parameters,).
        error: relative Monte Carlo error of the adjusted standard deviations, the largest of all parameters.
    """

    dispersion: Float[Any, "*groups"]
    least_tau0: Float[Any, "*groups"]
    centre: Float[Any, "*groups parameters"]
    matrix: Float[Any, "*groups parameters parameters"]
    shift: Float[Any, "*groups parameters"]
    error: Float[Any, "*groups"]

    def __call__(self, layer: AbstractLayer) -> AbstractLayer:
        """The layer with adjusted parameters."""
        coordinates = layer.coordinates
        u = coordinates.unconstrained(layer.parameters())
        moved = self.centre + self.matrix @ (u - self.centre - self.shift)
        values = coordinates.constrained(moved)
        for name in coordinates.temperatures:
            values[name] = _at_least(values[name], self.least_tau0)
        return layer.with_parameters(values)

    def of_densities(self) -> "Adjustment":
        """The adjustment with the mode and the range of the data's density, and with its own curvature."""
        identity = jnp.broadcast_to(jnp.eye(self.centre.shape[-1], dtype=self.matrix.dtype), self.matrix.shape)
        return dataclasses.replace(self, dispersion=jnp.ones_like(self.dispersion), matrix=identity)

    def of_priors(self) -> "Adjustment":
        """An adjustment that leaves nothing of the likelihood, so that a joint density is that of the priors."""
        largest = jnp.finfo(self.dispersion.dtype).max
        return dataclasses.replace(self, dispersion=jnp.full_like(self.dispersion, largest))


def no_adjustment(parameters: int, networks: int | None = None) -> Adjustment:
    """The identity adjustment; with it one compiled program serves adjusted and unadjusted likelihoods.

    Arguments:
        parameters: number of parameters.
        networks: length of a leading axis; no such axis if None.
    """
    dtype, axes = jnp.result_type(float), () if networks is None else (networks,)
    values = (1.0, 0.0, np.zeros(parameters), np.eye(parameters), np.zeros(parameters), 0.0)
    each = (np.broadcast_to(np.asarray(x, dtype), (*axes, *np.shape(x))) for x in values)
    return Adjustment(*jax.device_put(list(each)))


def _at_least(x: Float[Array, ""], least: Float[Array, ""]) -> Float[Array, ""]:
    """Smooth maximum of x and a bound; at 1.5 times the bound it exceeds x by 0.6 %."""
    larger = jnp.maximum(x, least)
    return larger * (1 + (jnp.minimum(x, least) / larger) ** 8) ** (1 / 8)
