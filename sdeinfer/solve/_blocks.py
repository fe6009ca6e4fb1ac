"""Many paths in blocks of one shape, on all cores and devices: one compiled program serves all data."""

from collections.abc import Callable
from functools import partial

import diffrax
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray

from sdeinfer._compiler import BALANCED
from sdeinfer._devices import devices_for, divided, launching, on_cpu
from sdeinfer._threads import in_threads
from sdeinfer.solve._brownian import BrownianSteps, BrownianSums
from sdeinfer.solve._grid import Grid, Times
from sdeinfer.solve._psd import PSDSplitting
from sdeinfer.solve._solve import Paths, solve_paths
from sdeinfer.terms import Limit, LimitSteps

TOGETHER, FEWEST_ENTRIES = 256, 4096
"""Paths per block on a CPU, for every number of paths, so that one compiled shape serves all; and the fewest factor
entries per block: with few tokens a block holds more paths, because calls would take longer than the work."""

ENTRIES = 2**15
"""Largest number of factor entries per block on a CPU."""

ENTRIES_ELSEWHERE = 2**26
"""Largest number of factor entries per block on an accelerator, which is fastest with all paths at once: a bound on
memory only."""


def block_size(paths: int, entries: int) -> int:
    """The number of paths that are drawn and solved at a time.

    Arguments:
        paths: number of paths.
        entries: number of entries of one factor.
    """
    if on_cpu():
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


def solve_in_blocks(
    limit: Limit | LimitSteps,
    X0: Float[np.ndarray, "#paths m m"],
    grid: Grid,
    *,
    paths: int,
    solver: PSDSplitting = PSDSplitting(),  # noqa: B008 an immutable module
    noise: Grid | None = None,
    key: PRNGKeyArray,
) -> tuple[Float[np.ndarray, "paths times m m"], Float[np.ndarray, " paths"]]:
    """Solve for many paths; no argument may be traced.

    Of several devices each solves equally many paths of every block. Keys belong to blocks, so the paths do not depend
    on the number of devices.

    Arguments:
        limit: coefficients of the SDE: scalars, or one value per path; or of each step, the same for all paths.
        X0: factors of the initial covariances: one for all paths, or one per path.
        grid: the solver's steps and the times to save.
        paths: number of paths.
        solver: the solver, with its bounds on the eigenvalues.
        noise: the grid over whose steps the Brownian motion is drawn, with all times of `grid`; None for `grid`.
            Solves with the same key and noise have the same Brownian motions.
        key: PRNG key.

    Returns:
        V at the saved times, as `solve_paths` returns it, and the stopping time of each path.
    """
    X0 = np.broadcast_to(X0, (paths, *X0.shape[1:]))
    steps = isinstance(limit, LimitSteps)
    if steps:
        limit = limit.padded(X0.dtype)
    else:
        limit = jax.tree.map(lambda c: np.broadcast_to(np.asarray(c, X0.dtype), paths), limit)
    size = block_size(paths, X0[0].size)
    devices = devices_for(size)
    times = grid.times(X0.dtype, padded=True)
    drawn = (grid if noise is None else noise).times(X0.dtype, padded=True).steps
    V = np.empty((paths, len(grid.saved), *X0.shape[1:]), X0.dtype)
    stopped = np.empty(paths, X0.dtype)

    def solve(number: int) -> None:
        members = np.minimum(np.arange(number * size, (number + 1) * size), paths - 1)
        count = min(size, paths - number * size)
        coefficients = limit if steps else jax.tree.map(lambda c: c[members], limit)
        starts = np.moveaxis(X0[members], 0, -1)
        with launching(devices):
            coefficients = coefficients if steps else divided(coefficients, devices)
            starts = divided(starts, devices)
            block = _solve_block(solver, coefficients, starts, times, drawn, key, np.uint32(number))
            V_block, stopped_block = (np.asarray(x) for x in block)
        V[members[:count]] = np.moveaxis(V_block[: len(grid.saved), ..., :count], -1, 0)
        stopped[members[:count]] = stopped_block[:count]

    in_threads(solve, range(-(-paths // size)))
    return V, stopped


@partial(jax.jit, compiler_options=BALANCED)
def _solve_block(
    solver: PSDSplitting,
    limit: Limit | LimitSteps,
    X0: Float[Array, "m m paths"],
    times: Times,
    drawn: Float[Array, " drawn"],
    key: PRNGKeyArray,
    number: Array,
) -> tuple[Float[Array, "times m m paths"], Float[Array, " paths"]]:
    shape = jax.ShapeDtypeStruct((*limit.normals(len(X0)), X0.shape[-1]), jnp.asarray(X0).dtype)
    brownian = BrownianSums(single=BrownianSteps(shape=shape, key=key, block=number), grid=drawn)
    return solve_paths(limit, X0, times, brownian, solver=solver)
