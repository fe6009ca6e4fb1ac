"""Many paths in blocks of one shape, on all cores: one compiled program serves all data.

Tests: `tests/solve/test_paths.py`.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray

from sdeinfer._threads import in_threads, on_cpu
from sdeinfer.solve._grid import Grid, Times
from sdeinfer.solve._psd import BrownianSteps, PSDSplitting
from sdeinfer.solve._solve import Paths, scan_paths, solve_paths
from sdeinfer.terms._limit import Limit, LimitSteps

BLOCK_PATHS = 256
"""Number of paths per block on a CPU, between the two bounds on entries."""

LEAST_BLOCK_ENTRIES = 2**12
"""Smallest number of factor entries per block on a CPU: calls of smaller blocks would take longer than their work."""

BLOCK_ENTRIES = 2**15
"""Largest number of factor entries per block on a CPU, to fit in a cache."""

ACCELERATOR_ENTRIES = 2**26
"""Largest number of factor entries per block on an accelerator, which bounds the memory."""


def block_size(paths: int, entries: int) -> int:
    """The number of paths, with so many entries of a factor, that are drawn and solved at a time."""
    if on_cpu():
        # The same for every number of paths, so that one compiled shape serves all.
        return max(1, min(max(BLOCK_PATHS, LEAST_BLOCK_ENTRIES // entries), BLOCK_ENTRIES // entries))
    # An accelerator is fastest with all paths at once.
    return min(1 << (paths - 1).bit_length(), max(1, ACCELERATOR_ENTRIES // entries))


def scan_in_blocks(
    limit: Limit | LimitSteps,
    X0: Float[Array, "m m"],
    grid: Grid,
    *,
    paths: int,
    solver: PSDSplitting,
    key: PRNGKeyArray,
) -> tuple[Float[Array, "paths times m m"], Float[Array, " paths"]]:
    """Solve for many paths of traced arguments. Blocks and keys equal those of `solve_in_blocks`, so results agree."""
    size = block_size(paths, X0.size)
    members = min(paths, size)
    shape = jax.ShapeDtypeStruct((*limit.normals(len(X0)), members), X0.dtype)
    starts = jnp.broadcast_to(X0[..., None], (*X0.shape, members))

    def block(number):
        brownian = BrownianSteps(shape=shape, key=key, block=number, together=size)
        V, stopped = scan_paths(limit, starts, grid, brownian, solver=solver)
        return jnp.moveaxis(V, -1, 0), stopped

    if paths <= size:
        return block(0)
    # Reverse mode solves a block again instead of storing it.
    V, stopped = jax.lax.map(jax.checkpoint(block), jnp.arange(-(-paths // size)))
    return V.reshape(-1, *V.shape[2:])[:paths], stopped.reshape(-1)[:paths]


def solve_in_blocks(
    limit: Limit | LimitSteps,
    X0: Float[np.ndarray, "#paths m m"],
    grid: Grid,
    *,
    paths: int,
    solver: PSDSplitting = PSDSplitting(),  # noqa: B008 an immutable module
    key: PRNGKeyArray,
) -> tuple[Float[np.ndarray, "paths times m m"], Float[np.ndarray, " paths"]]:
    """Solve for many paths of concrete arguments: V at the saved times, as of `solve_paths`, and the stopping times.

    The coefficients and X0 are those of all paths or have one value per path; or the coefficients those of each step.
    """
    X0 = np.broadcast_to(X0, (paths, *X0.shape[1:]))
    changes_over_depth = isinstance(limit, LimitSteps)
    if changes_over_depth:
        limit = limit.padded(X0.dtype)
    else:
        limit = jax.tree.map(lambda c: np.broadcast_to(np.asarray(c, X0.dtype), paths), limit)
    size = block_size(paths, X0[0].size)
    times = grid.times(X0.dtype)
    V = np.empty((paths, len(grid.saved), *X0.shape[1:]), X0.dtype)
    stopped = np.empty(paths, X0.dtype)

    def solve(number: int) -> None:
        members = np.minimum(np.arange(number * size, (number + 1) * size), paths - 1)
        count = min(size, paths - number * size)
        coefficients = limit if changes_over_depth else jax.tree.map(lambda c: c[members], limit)
        block = _solve_block(solver, coefficients, np.moveaxis(X0[members], 0, -1), times, key, np.uint32(number))
        V_block, stopped_block = (np.asarray(x) for x in block)
        V[members[:count]] = np.moveaxis(V_block[: len(grid.saved), ..., :count], -1, 0)
        stopped[members[:count]] = stopped_block[:count]

    in_threads(solve, range(-(-paths // size)))
    return V, stopped


@jax.jit
def _solve_block(
    solver: PSDSplitting,
    limit: Limit | LimitSteps,
    X0: Float[Array, "m m paths"],
    times: Times,
    key: PRNGKeyArray,
    number: Array,
) -> Paths:
    shape = jax.ShapeDtypeStruct((*limit.normals(len(X0)), X0.shape[-1]), jnp.asarray(X0).dtype)
    return solve_paths(limit, X0, times, BrownianSteps(shape=shape, key=key, block=number), solver=solver)
