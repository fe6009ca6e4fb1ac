"""How a likelihood that is too sure, or not sure enough, is widened or narrowed."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from sdeinfer.layers import AbstractLayer


class Adjustment(eqx.Module):
    """ℓ(u) → ℓ(û + C (u − û))/φ, with the layer's coordinates u (`Coordinates.unconstrained`).

    Below a certain τ0 the law of attention does not hold for the data, and is not believed: ℓ is constant there, and
    the prior decides.

    Attributes:
        dispersion: φ.
        least_tau0: that τ0.
        centre: û, shape (parameters,).
        matrix: C, shape (parameters, parameters).
    """

    dispersion: Float[Array, ""]
    least_tau0: Float[Array, ""]
    centre: Float[Array, " parameters"]
    matrix: Float[Array, "parameters parameters"]

    def __call__[T: AbstractLayer](self, layer: T) -> T:
        """The layer with its parameters moved."""
        coordinates = layer.coordinates
        moved = self.centre + self.matrix @ (coordinates.unconstrained(layer.parameters()) - self.centre)
        values = coordinates.constrained(moved)
        for name in coordinates.temperatures:
            values[name] = _at_least(values[name], self.least_tau0)
        return layer.with_parameters(values)


def no_adjustment(parameters: int, networks: int | None = None) -> Adjustment:
    """The adjustment of so many parameters that changes nothing; with it, one program serves before and after.

    Arguments:
        parameters: how many.
        networks: length of a leading axis; there is none where None.
    """
    dtype, axes = jnp.result_type(float), () if networks is None else (networks,)
    values = (1.0, 0.0, np.zeros(parameters), np.eye(parameters))
    each = (np.broadcast_to(np.asarray(x, dtype), (*axes, *np.shape(x))) for x in values)
    return Adjustment(*jax.device_put(list(each)))


def _at_least(x: Float[Array, ""], least: Float[Array, ""]) -> Float[Array, ""]:
    """x, smoothly kept above a bound: 0.6 % more than x at 1.5 times the bound."""
    larger = jnp.maximum(x, least)
    return larger * (1 + (jnp.minimum(x, least) / larger) ** 8) ** (1 / 8)
