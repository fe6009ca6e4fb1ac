"""The solver's steps in a scan: for solves that are differentiated, in any mode and to any order.

Diffrax's loops are differentiated backwards (`RecursiveCheckpointAdjoint`) or forwards (`ForwardMode`), not one after
the other; its `DirectAdjoint`, which is, takes several times the compilation and twice the time. The grid is known
here, so that a scan with checkpoints does all of it.
"""

import jax
import jax.numpy as jnp
import numpy as np
from diffrax import AbstractBrownianPath
from jaxtyping import Array, Bool, Float

from sdeinfer.covariance import matmul, transpose
from sdeinfer.layers import Limit, LimitSteps
from sdeinfer.solve._grid import Grid
from sdeinfer.solve._psd import AbstractPSDSolver, CovarianceTerm, PSDEuler

CHUNK = 64
"""Steps between two checkpoints. Memory of a reverse pass grows with the number of chunks plus this number."""


def scan_paths(
    limit: Limit | LimitSteps,
    X0: Float[Array, "m m ..."],
    grid: Grid,
    brownian: AbstractBrownianPath,
    *,
    solver: AbstractPSDSolver = PSDEuler(),  # noqa: B008 an immutable module
) -> tuple[Float[Array, "times m m ..."], Float[Array, "..."]]:
    """The paths of `solve_paths`, which see for arguments and results, by a scan over the steps of a known grid."""
    limit = jax.tree.map(lambda c: c.astype(X0.dtype), limit)
    term = CovarianceTerm(limit, brownian)
    start = jnp.asarray(grid.steps[0], X0.dtype)
    initial = solver.init(term, start, start, X0, None)
    if len(grid.steps) == 1:
        return matmul(X0, transpose(X0))[None], initial.stopped

    @jax.checkpoint
    def step(state, ends_and_real):
        ends, real = ends_and_real
        X, own = state
        X1, _, _, own1, _ = solver.step(term, ends[0], ends[1], X, None, own, made_jump=False)
        return jax.tree.map(lambda new, old: jnp.where(real, new, old), (X1, own1), state), None

    def chunk(state, steps):
        return jax.lax.scan(step, state, steps)

    def interval(state, chunks):
        if len(chunks[0]) == 1:
            state, _ = chunk(state, jax.tree.map(lambda x: x[0], chunks))
        else:
            state, _ = jax.lax.scan(jax.checkpoint(chunk), state, chunks)
        return state, matmul(state[0], transpose(state[0]))

    (_, last), V = jax.lax.scan(interval, (X0, initial), _intervals(grid, np.dtype(X0.dtype)))
    return V, last.stopped


def _intervals(
    grid: Grid, dtype: np.dtype
) -> tuple[Float[np.ndarray, "times chunks steps 2"], Bool[np.ndarray, "times chunks steps"]]:
    """Ends of the steps up to each saved time, and which are steps; the first step of all stands for none."""
    times = np.asarray(grid.steps, dtype)
    last = np.searchsorted(grid.steps, grid.saved)
    counts = np.diff(last, prepend=0)
    longest = max(int(counts.max()), 1)
    size = min(CHUNK, longest)
    room = -(-longest // size) * size
    number = last[:, None] - counts[:, None] + np.arange(room)
    real = np.arange(room) < counts[:, None]
    number = np.where(real, number, 0)
    ends = np.stack([times[number], times[number + 1]], axis=-1)
    shape = (len(grid.saved), room // size, size)
    return ends.reshape(*shape, 2), real.reshape(shape)
