"""Brownian increments over the steps of a fixed grid: drawn from a key, or given as an array."""
# pyright: reportIncompatibleVariableOverride=false
# Diffrax declares t0, t1 and levy_area as attributes, and implements them as properties and fields, as here.

import math

import equinox as eqx
import equinox.internal as eqxi
import jax
import jax.numpy as jnp
from diffrax import AbstractBrownianPath, BrownianIncrement
from jaxtyping import Array, Float, Int, PRNGKeyArray

from sdeinfer.layers._keys import NetworkKeys, key_words, threefry

INCREMENTS_ONLY = "a Brownian motion on steps has increments only: no values at a time, no Lévy areas"


class BrownianSteps(AbstractBrownianPath):
    """A Brownian motion of which only the increments over the steps of one fixed grid are ever asked for.

    Each increment is drawn afresh from the key and the step's start, so a second look at the same step, as
    checkpointed reverse-mode differentiation takes it, gives the same number. Diffrax's `UnsafeBrownianPath` draws in
    the same way but refuses reverse mode, since it cannot know that the grid is fixed; here the grid is. The
    numbers are those of `layers._keys`, which are drawn faster than those of `jax.random`.

    Attributes:
        shape: shape and type of one increment; paths are its last axis.
        key: where the randomness comes from.
        block: which of many such motions of one key.
        together: how many paths are drawn for, of which the first are kept; as many as there are where None.
    """

    shape: jax.ShapeDtypeStruct = eqx.field(static=True)
    key: PRNGKeyArray
    block: Int[Array, ""] | int = 0
    together: int | None = eqx.field(static=True, default=None)
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
            raise ValueError(INCREMENTS_ONLY)
        t0, t1 = eqxi.nondifferentiable(t0), eqxi.nondifferentiable(t1)
        # In single precision, so that grids that differ by rounding share their increments; `step_grid` refuses steps
        # that single precision does not tell apart.
        start = jax.lax.bitcast_convert_type(jnp.asarray(t0, jnp.float32), jnp.uint32)
        # The first bit tells these keys from all others that are made of the same one.
        block = jnp.asarray(self.block, jnp.uint32) | jnp.uint32(1 << 31)
        keys = NetworkKeys(*threefry(*key_words(self.key), block[None], start))
        *sizes, paths = self.shape.shape
        together = paths if self.together is None else self.together
        normals = keys.normals((math.prod(sizes) * together,), self.shape.dtype)
        kept = normals.reshape(*sizes, together)[..., :paths]
        return kept * jnp.sqrt(t1 - t0).astype(self.shape.dtype)


class BrownianArray(AbstractBrownianPath):
    """A Brownian motion whose increments over the steps of one grid are given, to be differentiated or inferred.

    Attributes:
        grid: the times between which the solver steps, shape (steps + 1,).
        normals: increments divided by the root of their steps, shape (steps, ...): standard normals.
    """

    grid: Float[Array, " times"]
    normals: Float[Array, "steps ..."]
    levy_area: type[BrownianIncrement] = eqx.field(static=True, default=BrownianIncrement)

    @property
    def t0(self):
        return self.grid[0]

    @property
    def t1(self):
        return self.grid[-1]

    def evaluate(self, t0, t1=None, left: bool = True, use_levy: bool = False) -> Float[Array, "..."]:  # noqa: FBT001, FBT002
        """The increment over [t0, t1], which must be a step of the grid."""
        del left
        if t1 is None or use_levy:
            raise ValueError(INCREMENTS_ONLY)
        # The middle of a step lies between its ends whatever their rounding.
        number = jnp.searchsorted(self.grid, (t0 + t1) / 2) - 1
        ends = jnp.stack([t0, t1])
        known = jnp.abs(self.grid[number + jnp.arange(2)] - ends).max() <= 0.01 * (t1 - t0)
        normals = eqx.error_if(self.normals[number], ~known, "BrownianArray: asked for what is not a step of its grid")
        return normals * jnp.sqrt(t1 - t0).astype(self.normals.dtype)
