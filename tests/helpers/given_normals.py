"""Paths and steps of the SDE as functions of the standard normals that drive them."""
# pyright: reportIncompatibleVariableOverride=false

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from helpers.internals import fill_after, scan_paths, semidefinite_cholesky, step_grid
from helpers.references import extrapolated
from jaxtyping import Array, Float

from sdeinfer.solve import PSDSplitting


class BrownianArray(diffrax.AbstractBrownianPath):
    """Standard normals, shape (steps, ...), times the root of the steps of a grid."""

    grid: Float[Array, " times"]
    normals: Float[Array, "steps ..."]
    levy_area: type[diffrax.BrownianIncrement] = eqx.field(static=True, default=diffrax.BrownianIncrement)

    @property
    def t0(self):
        return self.grid[0]

    @property
    def t1(self):
        return self.grid[-1]

    def evaluate(self, t0, t1=None, left=True, use_levy=False):  # noqa: FBT002
        # The midpoint of a step lies between its ends whatever their rounding.
        number = jnp.searchsorted(self.grid, (t0 + t1) / 2) - 1
        return self.normals[number] * jnp.sqrt(t1 - t0).astype(self.normals.dtype)


@eqx.filter_jit
def paths_from(layer, V0, ts, normals, *, step: float):
    """V of shape (paths, times, m, m) from normals of shape (paths, steps, *layer.limit().normals(m))."""
    V0, grid = jnp.asarray(V0), step_grid(ts, step)
    X0 = jnp.broadcast_to(semidefinite_cholesky((V0 + V0.T) / 2)[..., None], (*V0.shape, len(normals)))
    normals = jnp.moveaxis(jnp.asarray(normals), 0, -1).astype(V0.dtype)
    brownian = BrownianArray(jnp.asarray(grid.steps, V0.dtype), normals)
    V, stopped = scan_paths(layer.limit(), X0, grid, brownian, solver=PSDSplitting())
    return fill_after(stopped, jnp.moveaxis(V, -1, 0), ts, np.inf)


def moments_of_a_step(increment, G, h: float):
    """Samples of E dV/h and E dV dVᵀ/h from dV = increment(G, h), without errors of the first order in h.

    The pair ±G cancels most of the noise, and h/2 the error.
    """
    # In a loop, which compiles the step once.
    signs, steps = np.array([1.0, -1.0, 1.0, -1.0]), h * np.array([0.5, 0.5, 1.0, 1.0])
    changes = jax.lax.map(lambda at: increment(at[0] * G, at[1]), (signs, steps))
    found = []
    for step, there, back in ((h / 2, *changes[:2]), (h, *changes[2:])):
        squares = sum(x[..., :, None] * x[..., None, :] for x in (there, back))
        found.append(((there + back) / 2 / step, squares / 2 / step))
    return jax.tree.map(lambda half, whole: extrapolated(whole, half, 1), *found)
