"""Brownian increments on a fixed grid of steps."""
# pyright: reportIncompatibleVariableOverride=false
# Diffrax declares t0, t1 and levy_area as attributes, and implements them as properties and fields, as here.

import equinox as eqx
import equinox.internal as eqxi
import jax
import jax.numpy as jnp
import jax.random as jr
from diffrax import AbstractBrownianPath, BrownianIncrement
from jaxtyping import Array, Float, PRNGKeyArray


class BrownianSteps(AbstractBrownianPath):
    """A Brownian motion of which only the increments over the steps of one fixed grid are ever asked for.

    Each increment is drawn afresh from the key and the step's start, so a second look at the same step, as
    checkpointed reverse-mode differentiation takes it, gives the same number. Diffrax's `UnsafeBrownianPath` draws in
    the same way but refuses reverse mode, since it cannot know that the grid is fixed; here the grid is.

    Attributes:
        shape: shape and type of one increment.
        key: where the randomness comes from.
    """

    shape: jax.ShapeDtypeStruct = eqx.field(static=True)
    key: PRNGKeyArray
    levy_area: type[BrownianIncrement] = eqx.field(static=True, default=BrownianIncrement)

    @property
    def t0(self):
        return -jnp.inf

    @property
    def t1(self):
        return jnp.inf

    def evaluate(self, t0, t1=None, left: bool = True, use_levy: bool = False) -> Float[Array, "..."]:  # noqa: FBT001, FBT002
        """The increment over [t0, t1]."""
        del left
        if t1 is None or use_levy:
            raise ValueError("BrownianSteps has increments over steps only: no values at a time, no Lévy areas")
        t0, t1 = eqxi.nondifferentiable(t0), eqxi.nondifferentiable(t1)
        # In single precision, so that grids that differ by rounding share their increments; it tells 10⁷ steps apart.
        start = jax.lax.bitcast_convert_type(jnp.asarray(t0, jnp.float32), jnp.uint32)
        key = jr.fold_in(self.key, start)
        return jr.normal(key, self.shape.shape, self.shape.dtype) * jnp.sqrt(t1 - t0).astype(self.shape.dtype)
