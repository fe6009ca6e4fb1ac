"""Many paths in blocks of one shape, on all cores: one compiled program serves all data.

Tests: `tests/solve/test_paths.py`.
"""

from collections.abc import Callable

import diffrax
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray

from sdeinfer._threads import in_threads, on_cpu
from sdeinfer.solve._grid import Grid, Times
from sdeinfer.solve._psd import BrownianSteps, PSDSplitting
from sdeinfer.solve._solve import Paths, solve_paths
from sdeinfer.terms._limit import Limit, LimitSteps

BLOCK_ENTRIES = 2**15
"""Largest number of factor entries per block on a CPU, to fit in a cache."""


def block_size(paths: int, entries: int) -> int:
    """The number of paths, with so many entries of a factor, that are drawn and solved at a time."""
    if on_cpu():
        # The same for every number of paths, so that one compiled shape serves all; more paths where they have few
        # tokens, because calls would take longer than the work.
        return max(1, min(max(256, 4096 // entries), BLOCK_ENTRIES // entries))
    # An accelerator is fastest with all paths at once; this bounds the memory.
    return min(1 << (paths - 1).bit_length(), max(1, 2**26 // entries))


def in_blocks(
    solve: Callable[[diffrax.AbstractBrownianPath], Paths],
    X0: Float[Array, "m m"],
    paths: int,
    key: PRNGKeyArray,
    *,
    normals: tuple[int, int],
) -> tuple[Float[Array, "paths times m m"], Float[Array, " paths"]]:
    """Paths of traced arguments, by `solve` of one block's Brownian motion; blocks and keys of `solve_in_blocks`."""
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


def solve_in_blocks(
    limit: Limit | LimitSteps,
    X0: Float[np.ndarray, "#paths m m"],
    grid: Grid,
    *,
    paths: int,
    solver: PSDSplitting = PSDSplitting(),  # noqa: B008 an immutable module
    key: PRNGKeyArray,
) -> tuple[Float[np.ndarray, "paths times m m"], Float[np.ndarray, " paths"]]:
    """Solve for many paths of known arguments: V at the saved times, as of `solve_paths`, and the stopping times.

    The coefficients and X0 are those of all paths or have one value per path; or the coefficients those of each step.
    """
    X0 = np.broadcast_to(X0, (paths, *X0.shape[1:]))
    steps = isinstance(limit, LimitSteps)
    if steps:
        limit = limit.padded(X0.dtype)
    else:
        limit = jax.tree.map(lambda c: np.broadcast_to(np.asarray(c, X0.dtype), paths), limit)
    size = block_size(paths, X0[0].size)
    times = grid.times(X0.dtype, padded=True)
    V = np.empty((paths, len(grid.saved), *X0.shape[1:]), X0.dtype)
    stopped = np.empty(paths, X0.dtype)

    def solve(number: int) -> None:
        members = np.minimum(np.arange(number * size, (number + 1) * size), paths - 1)
        count = min(size, paths - number * size)
        coefficients = limit if steps else jax.tree.map(lambda c: c[members], limit)
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
