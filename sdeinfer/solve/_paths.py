"""One Diffrax solve of many paths at once, and sequential blocks of paths."""

from collections.abc import Callable, Sequence
from typing import Any

import diffrax
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray
from numpy.typing import ArrayLike

from sdeinfer.covariance import matmul, transpose
from sdeinfer.layers import Limit, LimitSteps
from sdeinfer.solve._brownian import BrownianSteps
from sdeinfer.solve._grid import Grid, GridSteps, Times
from sdeinfer.solve._psd import AbstractPSDSolver, CovarianceTerm, PSDEuler

type Paths = tuple[Float[Array, "times m m ..."], Float[Array, "..."]]

CHECKPOINTED = diffrax.RecursiveCheckpointAdjoint()
"""Reverse mode, with memory that does not grow with the number of steps; forward mode needs `diffrax.ForwardMode()`."""

TOGETHER, FEWEST_ENTRIES = 256, 4096
"""Paths per block on a CPU, for every number of paths, so that one compiled shape serves all; and the fewest factor
entries per block: with few tokens a block holds more paths, because calls would take longer than the work."""

ENTRIES = 2**15
"""Largest number of factor entries per block on a CPU."""

ENTRIES_ELSEWHERE = 2**26
"""Largest number of factor entries per block on an accelerator, which is fastest with all paths at once: a bound on
memory only."""


def solve_paths(
    limit: Limit | LimitSteps,
    X0: Float[Array, "m m ..."],
    grid: Grid | Times,
    brownian: diffrax.AbstractBrownianPath,
    *,
    solver: AbstractPSDSolver = PSDEuler(),  # noqa: B008 an immutable module
    adjoint: diffrax.AbstractAdjoint = CHECKPOINTED,
) -> Paths:
    """Solve from X0 over the grid's steps.

    Arguments:
        limit: coefficients of the SDE: scalars, or one value per path; `LimitSteps` where they change with time.
        X0: factors of the initial covariances.
        grid: the solver's steps and the times to save.
        brownian: increments of shape (*normals, *paths), with the solver's `normals` of m tokens.
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


def block_size(paths: int, entries: int) -> int:
    """The number of paths that are drawn and solved at a time.

    Arguments:
        paths: number of paths.
        entries: number of entries of one factor.
    """
    if jax.default_backend() == "cpu":
        return max(1, min(max(TOGETHER, FEWEST_ENTRIES // entries), ENTRIES // entries))
    return min(1 << (paths - 1).bit_length(), max(1, ENTRIES_ELSEWHERE // entries))


def in_blocks(
    solve: Callable[[diffrax.AbstractBrownianPath], Paths],
    X0: Float[Array, "m m"],
    paths: int,
    key: PRNGKeyArray,
    *,
    normals: tuple[int, int],
) -> tuple[Float[Array, "paths times m m"], Float[Array, " paths"]]:
    """Solve for many paths in blocks that fit the cache; the saved values bound the memory.

    Blocks and keys are those of `solve_in_blocks`: traced and concrete arguments give the same paths.

    Arguments:
        solve: maps Brownian motions of shape (*normals, paths of one block) to their paths.
        X0: a factor, used for its shape and type.
        paths: number of paths.
        key: PRNG key.
        normals: `Limit.normals` of m tokens.
    """
    size = block_size(paths, X0.size)
    shape = jax.ShapeDtypeStruct((*normals, min(paths, size)), X0.dtype)

    def block(number):
        V, stopped = solve(BrownianSteps(shape=shape, key=key, block=number, together=size))
        return jnp.moveaxis(V, -1, 0), stopped

    if paths <= size:
        return block(0)
    # Reverse mode solves a block again instead of storing it.
    V, stopped = jax.lax.map(jax.checkpoint(block), jnp.arange(-(-paths // size)))
    return V.reshape(-1, *V.shape[2:])[:paths], stopped.reshape(-1)[:paths]
