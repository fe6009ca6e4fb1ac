"""One solve of many paths at once: by Diffrax, or as a scan that is differentiable in every mode.

Where the grid is data, Diffrax's loop serves all grids with one program. It is differentiated forwards here; its
adjoints for other modes compile for longer than a scan with checkpoints over a known grid, and take longer to run.
Tests: `tests/solve/test_simulate.py`.
"""

from collections.abc import Sequence

import diffrax
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float
from numpy.typing import ArrayLike

from sdeinfer.covariance._batched import gram
from sdeinfer.solve._grid import Grid, GridSteps, Times
from sdeinfer.solve._psd import CovarianceTerm, PSDSplitting
from sdeinfer.terms._limit import Limit, LimitSteps

type Paths = tuple[Float[Array, "times m m ..."], Float[Array, "..."]]
"""V at the saved times, constant from a path's stopping time on; and the stopping times, +∞ for paths not stopped."""

CHECKPOINT_STEPS = 64
"""Steps between two checkpoints. Memory of a reverse pass grows with the number of chunks plus this number."""


def solve_paths(
    limit: Limit | LimitSteps,
    X0: Float[Array, "m m ..."],
    times: Times,
    brownian: diffrax.AbstractBrownianPath,
    *,
    solver: PSDSplitting = PSDSplitting(),  # noqa: B008 an immutable module
) -> Paths:
    """Solve by Diffrax from factors X0 over a grid that may be traced; differentiable forwards."""
    limit = jax.tree.map(lambda c: c.astype(X0.dtype), limit)
    steps = jnp.asarray(times.steps)
    solution = diffrax.diffeqsolve(
        CovarianceTerm(limit, brownian),
        solver,
        t0=steps[0],
        t1=jnp.asarray(times.end),
        dt0=None,
        y0=X0,
        stepsize_controller=GridSteps(steps),
        saveat=diffrax.SaveAt(ts=jnp.asarray(times.saved), fn=lambda t, X, args: gram(X), solver_state=True),
        max_steps=len(times.steps) - 2,
        adjoint=diffrax.ForwardMode(),
        throw=False,  # steps of a fixed grid cannot fail
    )
    assert solution.ys is not None
    assert solution.solver_state is not None
    return solution.ys, solution.solver_state.stopped


def scan_paths(
    limit: Limit | LimitSteps,
    X0: Float[Array, "m m ..."],
    grid: Grid,
    brownian: diffrax.AbstractBrownianPath,
    *,
    solver: PSDSplitting = PSDSplitting(),  # noqa: B008 an immutable module
) -> Paths:
    """Solve from factors X0 by a scan over the steps of a known grid; differentiable in every mode."""
    limit = jax.tree.map(lambda c: c.astype(X0.dtype), limit)
    term = CovarianceTerm(limit, brownian)
    start = jnp.asarray(grid.steps[0], X0.dtype)
    initial = solver.init(term, start, start, X0, None)
    if len(grid.steps) == 1:
        return gram(X0)[None], initial.stopped

    @jax.checkpoint
    def step(state, ends_and_mask):
        ends, mask = ends_and_mask
        X, solver_state = state
        X1, _, _, solver_state1, _ = solver.step(term, ends[0], ends[1], X, None, solver_state, made_jump=False)
        return jax.tree.map(lambda new, old: jnp.where(mask, new, old), (X1, solver_state1), state), None

    def chunk(state, steps):
        return jax.lax.scan(step, state, steps)

    def interval(state, chunks):
        if len(chunks[0]) == 1:  # a scan over one chunk would compile the reverse pass for a third longer
            state, _ = chunk(state, jax.tree.map(lambda x: x[0], chunks))
        else:
            state, _ = jax.lax.scan(jax.checkpoint(chunk), state, chunks)
        return state, gram(state[0])

    (_, last), V = jax.lax.scan(interval, (X0, initial), _intervals(grid, np.dtype(X0.dtype)))
    return V, last.stopped


def _intervals(
    grid: Grid, dtype: np.dtype
) -> tuple[Float[np.ndarray, "times chunks steps 2"], Bool[np.ndarray, "times chunks steps"]]:
    """Ends of the steps up to each saved time, and a mask. Padding repeats the first step, and is masked."""
    times = np.asarray(grid.steps, dtype)
    last = np.searchsorted(grid.steps, grid.saved)
    counts = np.diff(last, prepend=0)
    longest = max(int(counts.max()), 1)
    size = min(CHECKPOINT_STEPS, longest)
    padded = -(-longest // size) * size
    mask = np.arange(padded) < counts[:, None]
    index = np.where(mask, last[:, None] - counts[:, None] + np.arange(padded), 0)
    ends = np.stack([times[index], times[index + 1]], axis=-1)
    shape = (len(grid.saved), padded // size, size)
    return ends.reshape(*shape, 2), mask.reshape(shape)


def fill_after[T: Array | np.ndarray](
    stopped: Float[Array | np.ndarray, " paths"],
    V: Float[T, "paths times m m"],
    saved: ArrayLike | Sequence[float],  # beartype counts no tuple of floats as NumPy's ArrayLike
    value: float,
) -> Float[T, "paths times m m"]:
    """Replace V at the saved times after its path's stopping time by `value`; NumPy handles NumPy arrays."""
    later = np.asarray(saved, stopped.dtype) > stopped[:, None]
    return V.__array_namespace__().where(later[:, :, None, None], V.dtype.type(value), V)
