"""The posterior that a sampler of unconstrained parameters sees. Tests: `tests/infer/test_fit.py`."""

from collections.abc import Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray, PyTree

from sdeinfer.infer._densities import unobserved_structure
from sdeinfer.infer._mode import by_site, posterior_mode, potential_and_slope, sampled_potential
from sdeinfer.likelihood import AbstractModel
from sdeinfer.likelihood._model import EveryLayer
from sdeinfer.likelihood._statistics import PathStatistics


class Posterior(eqx.Module):
    """A posterior density of NumPyro's unconstrained parameters x by site name, or of coordinates z that whiten them.

    These are x = c + Lz, for the mode c and the inverse curvature LLᵀ. Much data determine γ a thousand times more
    closely than (c₊ + c₋)/2. In z chains start near all of the posterior, and step sizes and mass matrices are of one
    order from the first iteration on.
    """

    model: AbstractModel = eqx.field(static=True)
    prepared: PyTree
    centre: Float[Any, " values"] | None = None
    scale: Float[Any, "values values"] | None = None

    @classmethod
    def of(cls, model: AbstractModel, prepared: PyTree) -> "Posterior":
        """The posterior of pooled data, whitened where the sufficient statistics are those of one layer."""
        shared = isinstance(model, EveryLayer) and not model.needs_networks
        if not shared or not isinstance(prepared, PathStatistics) or prepared.group is not None:
            return cls(model, prepared)
        mode = posterior_mode(model, prepared)
        order = _joined(mode.by_site(np.arange(len(mode.x), dtype=float)), 0).astype(int)
        whitening = mode.x[order], np.linalg.cholesky(mode.covariance[np.ix_(order, order)])
        return cls(model, prepared, *jax.device_put([np.asarray(x, jnp.result_type(float)) for x in whitening]))

    def log_density(self, z: Mapping[str, Array]) -> Float[Array, ""]:
        """Log density up to a constant, differentiable in z."""
        return -self.potential(z)

    def potential(self, z: Mapping[str, Array]) -> Float[Array, ""]:
        """−log density up to a constant, differentiable in z."""
        return sampled_potential(self.model, self.prepared, self.unconstrained(z))

    def potential_and_slope(self, z: Mapping[str, np.ndarray]) -> tuple[Array, dict[str, Any]]:
        """The potential and its gradient in z, by the program that has found the mode."""
        value, slope = potential_and_slope(self.model, self.prepared, self.unconstrained(z))
        if self.scale is None:
            return value, slope
        along = {name: np.asarray(derivative) for name, derivative in slope.items()}
        return value, _parted(_joined(along, 0) @ np.asarray(self.scale), z)

    def unconstrained(self, z: Mapping[str, Any], *, axes: int = 0) -> dict[str, Any]:
        """NumPyro's unconstrained parameters at z by site name, with leading axes; NumPy handles NumPy arrays."""
        if self.centre is None or self.scale is None:
            return dict(z)
        flat = _joined(z, axes)
        centre, scale = (flat.__array_namespace__().asarray(x) for x in (self.centre, self.scale))
        return _parted(centre + flat @ scale.T, z)

    def initial_position(self, key: PRNGKeyArray) -> dict[str, Array]:
        """A point uniform in the intervals of `AbstractModel.start_of`; its density is positive."""
        structure = unobserved_structure(self.model, self.prepared)
        keys = jr.split(key, len(structure))
        position = {}
        for site_key, (name, leaf) in zip(keys, structure.items(), strict=True):
            centre, half = self.model.start_of(name, self.prepared)
            position[name] = jr.uniform(site_key, leaf.shape, leaf.dtype, centre - half, centre + half)
        return position


def _joined(z: Mapping[str, Any], axes: int) -> Any:
    """The values of all sites, in the order of their names, along the last axis."""
    xp: Any = jnp if any(isinstance(value, Array) for value in z.values()) else np
    return xp.concatenate([xp.reshape(z[name], (*np.shape(z[name])[:axes], -1)) for name in sorted(z)], axis=-1)


def _parted(flat: Any, like: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of `_joined`, for sites in the shapes of others."""
    return by_site({name: np.shape(like[name])[flat.ndim - 1 :] for name in sorted(like)}, flat)
