"""One solve of many paths at once: by Diffrax, or as a scan that is differentiable in every mode.

Diffrax's loops are differentiated backwards (`RecursiveCheckpointAdjoint`) or forwards (`ForwardMode`), not one after
the other; its `DirectAdjoint`, which is, takes several times the compilation and twice the time. Where the grid is
known, a scan with checkpoints does all of it.
"""

from collections.abc import Callable, Sequence
from typing import Any

import diffrax
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float
from numpy.typing import ArrayLike

from sdeinfer.covariance import matmul, transpose
from sdeinfer.solve._grid import Grid, GridSteps, Times
from sdeinfer.solve._psd import CovarianceTerm, PSDSplitting
from sdeinfer.terms import Limit, LimitSteps

type Paths = tuple[Float[Array, "times m m ..."], Float[Array, "..."]]

CHECKPOINTED = diffrax.RecursiveCheckpointAdjoint()
"""Reverse mode, with memory that does not grow with the number of steps; forward mode needs `diffrax.ForwardMode()`."""

CHUNK = 64
"""Steps between two checkpoints. Memory of a reverse pass grows with the number of chunks plus this number."""


def solve_paths(
    limit: Limit | LimitSteps,
    X0: Float[Array, "m m ..."],
    grid: Grid | Times,
    brownian: diffrax.AbstractBrownianPath,
    *,
    solver: PSDSplitting = PSDSplitting(),  # noqa: B008 an immutable module
    adjoint: diffrax.AbstractAdjoint = CHECKPOINTED,
) -> Paths:
    """Solve from X0 over the grid's steps.

    Arguments:
        limit: coefficients of the SDE: scalars, or one value per path; `LimitSteps` where they change with time.
        X0: factors of the initial covariances.
        grid: the solver's steps and the times to save.
        brownian: increments of shape (*normals, *paths), with the limit's `normals` of m tokens.
        solver: the solver, with its bounds on the eigenvalues.
        adjoint: how Diffrax differentiates the solve.

    Returns:
        V at the saved times, constant from a path's stopping time on; and the stopping times, +∞ for paths that were
        not stopped.
    """
    limit = jax.tree.map(lambda c: c.astype(X0.dtype), limit)
    times = grid.times(X0.dtype) if isinstance(grid, Grid) else grid
    steps = jnp.asarray(times.steps)
    solution = diffrax.diffeqsolve(
        CovarianceTerm(limit, brownian),
        solver,
        t0=steps[0],
        t1=jnp.asarray(times.end),
        dt0=None,
        y0=X0,
        stepsize_controller=GridSteps(steps),
        saveat=diffrax.SaveAt(ts=jnp.asarray(times.saved), fn=_covariance, solver_state=True),
        max_steps=len(times.steps) - 2,
        adjoint=adjoint,
        throw=False,  # steps of a fixed grid cannot fail
    )
    assert solution.ys is not None
    assert solution.solver_state is not None
    return solution.ys, solution.solver_state.stopped


def _covariance(t, X, args):
    return matmul(X, transpose(X))


def fill_after[T: Array | np.ndarray](
    stopped: Float[Array | np.ndarray, " paths"],
    V: Float[T, "paths times m m"],
    saved: ArrayLike | Sequence[float],
    value: float,
) -> Float[T, "paths times m m"]:
    """Replace V at the saved times after its path's stopping time by `value`; NumPy handles NumPy arrays."""
    where: Callable[..., Any] = np.where if isinstance(V, np.ndarray) else jnp.where
    later = np.asarray(saved, stopped.dtype) > stopped[:, None]
    return where(later[:, :, None, None], V.dtype.type(value), V)


def scan_paths(
    limit: Limit | LimitSteps,
    X0: Float[Array, "m m ..."],
    grid: Grid,
    brownian: diffrax.AbstractBrownianPath,
    *,
    solver: PSDSplitting = PSDSplitting(),  # noqa: B008 an immutable module
) -> Paths:
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
