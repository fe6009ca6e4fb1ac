"""Coordinates of the unconstrained parameters in which a posterior is about standard normal."""

import math
from collections.abc import Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from sdeinfer.infer._mode import posterior_mode
from sdeinfer.likelihood import AbstractModel, EveryLayer, PathStatistics


class Whitening(eqx.Module):
    """Coordinates z of NumPyro's unconstrained parameters x = c + Lz, for the mode c and the inverse curvature LLᵀ.

    Much data determine γ a thousand times more closely than (c₊ + c₋)/2. In these coordinates chains start near all of
    the posterior, and step sizes and mass matrices are of one order from the first iteration on.

    Attributes:
        centre: c, concatenated over the sites in the order of their names; shape (values,).
        scale: L, shape (values, values).
    """

    centre: Float[Any, " values"]
    scale: Float[Any, "values values"]

    def unconstrained(self, z: Mapping[str, Any], *, axes: int = 0) -> dict[str, Any]:
        """The unconstrained parameters at z by site name; NumPy handles NumPy arrays.

        Arguments:
            z: coordinates, in the shapes of the unconstrained sites.
            axes: number of leading axes that all sites have, as of chains and draws.
        """
        flat = _joined(z, axes)
        centre, scale = (flat.__array_namespace__().asarray(x) for x in (self.centre, self.scale))
        return _parted(centre + flat @ scale.T, z)

    def pulled_back(self, slope: Mapping[str, Any]) -> dict[str, Any]:
        """The derivatives in z of a function with these derivatives in x."""
        flat = _joined(slope, 0)
        return _parted(flat @ flat.__array_namespace__().asarray(self.scale), slope)


def whitening_of(model: AbstractModel, prepared: Any) -> Whitening | None:
    """The coordinates for pooled data; None unless the sufficient statistics are those of one layer."""
    if not isinstance(model, EveryLayer) or not isinstance(prepared, PathStatistics):
        return None
    form = model.form(prepared)
    if form.kind is None or form.own or prepared.group is not None:
        return None
    mode = posterior_mode(model, prepared)
    order = _joined(mode.by_site(np.arange(len(mode.x), dtype=float)), 0).astype(int)
    scale = np.linalg.cholesky(mode.covariance[np.ix_(order, order)])
    return Whitening(*jax.device_put([np.asarray(x, jnp.result_type(float)) for x in (mode.x[order], scale)]))


def _joined(z: Mapping[str, Any], axes: int) -> Any:
    """The values of all sites, in the order of their names, along the last axis."""
    xp: Any = jnp if any(isinstance(value, Array) for value in z.values()) else np
    return xp.concatenate([xp.reshape(z[name], (*np.shape(z[name])[:axes], -1)) for name in sorted(z)], axis=-1)


def _parted(flat: Any, like: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of `_joined`, for sites in the shapes of others."""
    axes, found, start = flat.ndim - 1, {}, 0
    for name in sorted(like):
        shape = np.shape(like[name])
        size = math.prod(shape[axes:])
        found[name] = flat[..., start : start + size].reshape(shape)
        start += size
    return found
