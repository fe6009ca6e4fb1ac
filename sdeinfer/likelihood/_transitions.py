"""Everything that the likelihood of a path needs from the data, computed once."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import xarray as xr
from jaxtyping import Array, Float

from sdeinfer._files import InputError
from sdeinfer.covariance import pairs, singular, spectrum, vech
from sdeinfer.layers import attention_drift, relu_drift
from sdeinfer.observe import validate


class Transitions(eqx.Module):
    """Observed one-layer transitions V → V + dV in the spectral coordinates of V (see `covariance.Spectrum`).

    In these coordinates, and divided by √(h (1 + [i = j])), the p entries of dV are independent normals under the Euler
    chain of every architecture: z ~ N(θ₁ b₁ + θ₂ b₂, a + κ² e). The four arrays are z, b₁, b₂ and e.

    Attributes:
        increments: z, shape (networks, transitions, p).
        attention_drift: b₁, shape (networks, transitions, p).
        relu_drift: b₂, shape (networks, transitions, p).
        mixing: e, shape (networks, transitions, p).
        log_jacobian: log |∂z/∂dV| summed over a network's transitions, which makes densities of z densities of V;
            shape (networks,).
    """

    increments: Float[Array, "networks transitions p"]
    attention_drift: Float[Array, "networks transitions p"]
    relu_drift: Float[Array, "networks transitions p"]
    mixing: Float[Array, "networks transitions p"]
    log_jacobian: Float[Array, " networks"]

    @property
    def networks(self) -> int:
        """How many networks."""
        return self.increments.shape[0]


def transitions(data: xr.Dataset) -> Transitions:
    """Reduce a Dataset in which every layer was observed to its transitions.

    Raises:
        InputError: for data that are not valid, that skip layers, or in which a covariance is singular, so that its
            transition has no density.
    """
    data = validate(data)
    layers = data["layer"].values
    if (np.diff(layers) != 1).any():
        raise InputError(
            f"layer: the full path needs every layer, got layers {', '.join(f'{n:g}' for n in layers[:4])}, …"
        )
    V = data["covariance"].values
    without_density = singular(V[:, :-1])
    if without_density.any():
        network, layer = np.argwhere(without_density)[0]
        raise InputError(
            f"covariance: network {network}, layer {layers[layer]:g}: singular, so that its transition has no density "
            "(two tokens coincide, up to rounding)"
        )
    V = jnp.asarray(V, float)
    V = (V + jnp.swapaxes(V, -1, -2)) / 2
    result = _transitions(V, 1 / jnp.asarray(data["width"].values, V.dtype))
    for name, term in vars(result).items():
        finite = np.isfinite(np.asarray(term)).reshape(len(V), -1).all(axis=1)
        if not finite.all():
            network = int(np.argmin(finite))
            raise InputError(f"covariance: network {network}: too large or too small for its law, {name} overflows")
    return result


@jax.jit
def _transitions(V: Float[Array, "networks layers m m"], h: Float[Array, " networks"]) -> Transitions:
    tokens = V.shape[-1]
    rows, columns = pairs(tokens)
    root = jnp.sqrt(jnp.where(rows == columns, 2.0, 1.0))

    def one(V, dV, h):
        coordinates = spectrum(V)

        def packed(S):
            return vech(coordinates.whiten(S)) / root

        log_jacobian = -(tokens + 1) * coordinates.log_volume - jnp.sum(jnp.log(root * jnp.sqrt(h)))
        return (
            packed(dV) / jnp.sqrt(h),
            packed(attention_drift(V)) * jnp.sqrt(h),
            packed(relu_drift(V)) * jnp.sqrt(h),
            coordinates.mixing,
            log_jacobian,
        )

    over_layers = jax.vmap(one, in_axes=(0, 0, None))
    z, b1, b2, e, log_jacobian = jax.vmap(over_layers)(V[:, :-1], jnp.diff(V, axis=1), h)
    return Transitions(z, b1, b2, e, log_jacobian.sum(axis=1))
