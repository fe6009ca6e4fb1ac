"""Brownian increments over the steps of a fixed grid: drawn from a key, or given as an array."""
# pyright: reportIncompatibleVariableOverride=false
# Diffrax declares t0, t1 and levy_area as attributes and implements them as properties and fields, as this file does.

import math

import equinox as eqx
import equinox.internal as eqxi
import jax
import jax.numpy as jnp
import numpy as np
from diffrax import AbstractBrownianPath, BrownianIncrement
from jaxtyping import Array, Float, Integer, PRNGKeyArray

from sdeinfer.layers import NetworkKeys, key_words, threefry

INCREMENTS_ONLY = "a Brownian motion on steps has increments only: no values at single times, no Lévy areas"


class BrownianSteps(AbstractBrownianPath):
    """A Brownian motion that is evaluated only over the steps of one fixed grid.

    Each increment is drawn from the key and the start of its step, so that evaluating a step again, as checkpointed
    reverse-mode differentiation does, gives the same increment. Diffrax's `UnsafeBrownianPath` draws in the same way
    but refuses reverse mode, because it cannot know that the grid is fixed; here it is. Random numbers come from
    `layers._keys`, which is faster than `jax.random`.

    Attributes:
        shape: shape and type of one increment; paths are its last axis.
        key: PRNG key.
        block: number of this motion among those that share the key.
        together: number of paths to draw, of which the first are kept; None draws as many as `shape` has.
    """

    shape: jax.ShapeDtypeStruct = eqx.field(static=True)
    key: PRNGKeyArray
    block: Integer[Array | np.ndarray, ""] | int = 0
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
        # that single precision cannot resolve.
        start = jax.lax.bitcast_convert_type(jnp.asarray(t0, jnp.float32), jnp.uint32)
        # The top bit separates these keys from all others derived from the same key.
        block = jnp.asarray(self.block, jnp.uint32) | jnp.uint32(1 << 31)
        keys = NetworkKeys(*threefry(*key_words(self.key), block[None], start))
        *sizes, paths = self.shape.shape
        together = paths if self.together is None else self.together
        normals = keys.normals((math.prod(sizes) * together,), self.shape.dtype)
        kept = normals.reshape(*sizes, together)[..., :paths]
        return kept * jnp.sqrt(t1 - t0).astype(self.shape.dtype)


class BrownianSums(AbstractBrownianPath):
    """A Brownian motion drawn over the steps of one grid, evaluated between any two of its times.

    It gives solves on this grid and on coarser ones the same noise, in one compiled program.

    Attributes:
        single: increments over single steps of the grid.
        grid: times of the grid, increasing, followed by +∞; exact, since the increments are drawn from them.
    """

    single: BrownianSteps
    grid: Float[Array, " times"]
    levy_area: type[BrownianIncrement] = eqx.field(static=True, default=BrownianIncrement)

    @property
    def t0(self):
        return self.single.t0

    @property
    def t1(self):
        return self.single.t1

    def evaluate(self, t0, t1=None, left: bool = True, use_levy: bool = False) -> Float[Array, "..."]:  # noqa: FBT001, FBT002
        """The increment over [t0, t1]: the sum of those over the grid's steps."""
        if t1 is None:
            raise ValueError(INCREMENTS_ONLY)
        first, last = jnp.searchsorted(self.grid, jnp.stack([t0, t1]))

        def add(number, total):
            return total + self.single.evaluate(self.grid[number], self.grid[number + 1], left, use_levy)

        return jax.lax.fori_loop(first, last, add, jnp.zeros(self.single.shape.shape, self.single.shape.dtype))


class BrownianArray(AbstractBrownianPath):
    """A Brownian motion with given increments over the steps of one grid, to differentiate or infer them.

    Attributes:
        grid: the times between which the solver steps, shape (steps + 1,).
        normals: standard normals, the increments divided by the root of their steps, shape (steps, ...).
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
        # The midpoint of a step lies between its ends whatever their rounding.
        number = jnp.searchsorted(self.grid, (t0 + t1) / 2) - 1
        ends = jnp.stack([t0, t1])
        known = jnp.abs(self.grid[number + jnp.arange(2)] - ends).max() <= 0.01 * (t1 - t0)
        normals = eqx.error_if(self.normals[number], ~known, "BrownianArray: [t0, t1] is not a step of its grid")
        return normals * jnp.sqrt(t1 - t0).astype(self.normals.dtype)
