"""Pairs of SDE paths at two step sizes, to remove the solver's first-order error."""
# pyright: reportIncompatibleVariableOverride=false
# As in solve/_brownian.py: Diffrax declares as attributes what is implemented as properties and fields.

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from diffrax import AbstractBrownianPath, BrownianIncrement
from jaxtyping import Array, Float, PRNGKeyArray

from sdeinfer.covariance import semidefinite_cholesky
from sdeinfer.layers import AbstractLayer
from sdeinfer.solve import BrownianSteps, Grid, in_blocks, solve_paths, step_grid


class Pairs(AbstractBrownianPath):
    """A Brownian motion on a grid, evaluated over pairs of the grid's steps.

    Attributes:
        single: increments over single steps.
        grid: times of the grid, shape (2 · steps + 1,); they must be exact, since the increments are drawn from them.
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
        """Increment over [t0, t1]: the sum of the increments over its two grid steps."""
        halfway = self.grid[jnp.searchsorted(self.grid, t0, side="right")]
        first = self.single.evaluate(t0, halfway, left, use_levy)
        return first + self.single.evaluate(halfway, t1, left, use_levy)


def coarse_and_fine(
    layer: AbstractLayer, V0: Float[Array, "m m"], time: float, *, paths: int, step: float, key: PRNGKeyArray
) -> tuple[np.ndarray, np.ndarray]:
    """V at a time, by steps h ≤ `step` and h/2, driven by the same Brownian motions.

    The solver has weak order 1, so the distribution functions are F_h = F + h F₁ + O(h²), and 2 F_{h/2} − F_h = F +
    O(h²). Since both sets of paths share their noise, this extrapolation has hardly more variance than F_{h/2}.

    Arguments:
        layer: the architecture, with its parameters.
        V0: covariance at time 0, shape (m, m).
        time: depth-time, positive.
        paths: number of paths.
        step: longest step.
        key: PRNG key.

    Returns:
        V at steps h and h/2, each of shape (paths, m, m); a path that explodes at either step is +∞ in both.
    """
    steps = len(step_grid([time], step).steps) - 1
    fine = step_grid([time], time / (2 * steps))
    V, stopped = _solve(layer, V0, fine, paths, key)
    V, exploded = np.asarray(V), ~np.isinf(np.asarray(stopped))
    V = np.where(exploded[:, None, None, None], np.inf, V)
    return V[:, 0], V[:, 1]


@eqx.filter_jit
def _solve(layer, V0, fine: Grid, paths: int, key):
    X0, limit = semidefinite_cholesky(V0), layer.limit()
    coarse = Grid(fine.steps[::2], fine.saved)

    def solve(brownian):
        block = jnp.broadcast_to(X0[..., None], (*X0.shape, brownian.shape.shape[-1]))
        pairs = Pairs(single=brownian, grid=jnp.asarray(fine.steps, X0.dtype))
        V_coarse, stopped_coarse = solve_paths(limit, block, coarse, pairs)
        V_fine, stopped_fine = solve_paths(limit, block, fine, brownian)
        return jnp.concatenate([V_coarse, V_fine]), jnp.minimum(stopped_coarse, stopped_fine)

    return in_blocks(solve, X0, paths, key, normals=limit.normals(len(X0)))
