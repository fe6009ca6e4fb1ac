"""Paths of the neural covariance SDE."""

import math
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from diffrax import AbstractAdjoint
from jaxtyping import Array, Float, PRNGKeyArray, PyTree
from numpy.typing import ArrayLike

from sdeinfer._arguments import at_least_one, checked
from sdeinfer._compiler import RUN_ONCE
from sdeinfer._files import InputError
from sdeinfer.covariance import factor_on_host, is_concrete, semidefinite_cholesky, validate_covariance
from sdeinfer.layers import AbstractLayer, check_parameters
from sdeinfer.solve._blocks import in_blocks, solve_in_blocks
from sdeinfer.solve._brownian import BrownianArray
from sdeinfer.solve._grid import Grid, step_grid
from sdeinfer.solve._limits import limit_over, limit_over_on_host
from sdeinfer.solve._psd import PSDSplitting
from sdeinfer.solve._solve import fill_after, scan_paths, solve_paths
from sdeinfer.solve._weak_error import STEP, step_within

ONCE: dict[str, Any] = {"compiler_options": RUN_ONCE}
"""A derivative outside of `jax.jit` is mostly computed once; with LLVM's optimisations it compiles for 20 to 80 s."""


@checked
def simulate(
    layer: AbstractLayer,
    V0: Float[Array | np.ndarray, "m m"],
    ts: ArrayLike,
    *,
    paths: int,
    step: float | None = None,
    tolerance: float | None = None,
    adjoint: AbstractAdjoint | None = None,
    key: PRNGKeyArray,
) -> Float[Array, "paths times m m"]:
    """Simulate the covariance SDE dV = b(V) dt + Σ(V)^{1/2} dB of Corollary 4.3 from V0 at time 0.

    The result is differentiable with respect to the layer's parameters and V0. At a singular V0, as of equal tokens, it
    is so along changes that keep the rank, as those of x in V0 = x xᵀ: a path goes with the root of an eigenvalue that
    leaves 0, and its derivative by single entries of such a V0 is another number than that of the mean. Take
    differences there, or a V0 that is definite. A derivative inside of `jax.jit` takes
    longer to compile than one outside, and a tenth of the time to evaluate; `jax.jit`'s
    `compiler_options={"xla_backend_optimization_level": 0}` makes it as the one outside.

    Arguments:
        layer: the architecture, with its parameters.
        V0: covariance at time 0, shape (m, m); it may be singular.
        ts: depth-times t = ℓ/n ≥ 0 at which to save, increasing (dimensionless).
        paths: number of independent paths.
        step: longest step in depth-time; each interval between saved times is cut into equal steps no longer than this.
            None for 0.05, or for the step that `tolerance` asks for.
        tolerance: largest weak error of the correlations, the logarithms of V_αα, and of the logarithm of the effective
            rank, in place of `step`: pilot runs choose the step, see `solve.step_within`. The layer, V0 and the key
            must not be traced then.
        adjoint: how Diffrax differentiates the solve, as `diffrax.RecursiveCheckpointAdjoint()`. Where None, the
            solver's steps run in a scan with checkpoints, differentiable in forward and reverse mode to any order.
        key: PRNG key; the paths also depend on `paths` and on the kind of device.

    Returns:
        V at the saved times, shape (paths, times, m, m). The cubic attention drift can make a path explode: its entries
        are +∞ from then on, never NaN. `simulate_stopped` returns the time and keeps the finite values.

    Raises:
        InputError: for a V0 that is not a covariance, and for invalid times or steps (see `step_grid`). Under `jax.jit`
            values out of range raise at run time; `equinox.filter_jit` shows a clear message.
    """
    layer, V0 = check_inputs(layer, V0, paths)
    if tolerance is not None:
        if step is not None:
            raise InputError("tolerance: chooses the step, and needs step=None")
        step = step_within(layer, V0, ts, tolerance=tolerance, key=key)
    grid = step_grid(ts, STEP if step is None else step)
    V, stopped = solve_from_key(layer, V0, grid, PSDSplitting(), adjoint, paths, key)
    return jax.device_put(fill_after(stopped, V, ts, np.inf))


@checked
def simulate_from(
    layer: AbstractLayer,
    V0: Float[Array | np.ndarray, "m m"],
    ts: ArrayLike,
    normals: Float[Array | np.ndarray, "paths steps m columns"],
    *,
    step: float = STEP,
    adjoint: AbstractAdjoint | None = None,
) -> Float[Array, "paths times m m"]:
    """Paths as a function of the standard normals that drive them, so that these can be inferred.

    Arguments:
        layer: the architecture, with its parameters.
        V0: covariance at time 0, shape (m, m); it may be singular.
        ts: depth-times at which to save, increasing.
        normals: one matrix per path and step, of the shape `layer.limit().normals(m)`. The number of steps is
            `len(step_grid(ts, step).steps) - 1`.
        step: longest step in depth-time.
        adjoint: as in `simulate`.

    Returns:
        V at the saved times, shape (paths, times, m, m), as in `simulate`.

    Raises:
        InputError: as `simulate`, and for normals of another shape.
    """
    shape = np.shape(normals)
    layer, V0 = check_inputs(layer, V0, shape[0] if shape else 0)
    grid = step_grid(ts, step)
    expected = (len(grid.steps) - 1, *layer.at(0.0).limit().normals(len(V0)))
    if shape[1:] != expected:
        raise InputError(f"normals: shape (paths, {', '.join(map(str, expected))}) is needed, got {shape}")
    once = not _known((layer, V0, normals)) and not _inside_jit()
    solve = _solve_normals_once if once else _solve_normals
    V, stopped = solve(layer, V0, grid, adjoint, normals)
    return fill_after(stopped, V, ts, jnp.inf)


def check_inputs[T: AbstractLayer](layer: T, V0: ArrayLike, paths: int) -> tuple[T, Float[Array | np.ndarray, "m m"]]:
    """Check the parameters, V0 and the number of paths, and make V0 exactly symmetric."""
    layer = check_parameters(layer)
    V0 = validate_covariance(V0) if is_concrete(V0) else _raise_unless_covariance(jnp.asarray(V0))
    # The factorisation reads one triangle: without this line the derivative would have that triangle only.
    V0 = (V0 + V0.T) / 2
    at_least_one(paths=paths)
    return layer, V0


def solve_from_key(layer, V0, grid: Grid, solver: PSDSplitting, adjoint: AbstractAdjoint | None, paths: int, key):
    """V of shape (paths, times, m, m), and the stopping times of the paths.

    Concrete arguments are solved in blocks of one shape. Traced arguments, which may be differentiated, are solved in
    one program for this grid and number of paths.
    """
    if _known((layer, V0, key)) and not _inside_jit():
        X0 = factor_on_host(np.asarray(V0))[None]
        return solve_in_blocks(limit_over_on_host(layer, grid), X0, grid, paths=paths, solver=solver, key=key)
    solve = _solve_in_jit if _inside_jit() else _solve_once
    return solve(layer, V0, grid, solver, adjoint, paths, key)


def _known(arguments: PyTree) -> bool:
    return all(map(is_concrete, jax.tree.leaves(arguments)))


def _inside_jit() -> bool:
    """Whether new arrays are traced, as inside of `jax.jit`, whose options hold for every program that it calls."""
    return not is_concrete(jnp.zeros(()))


def _solve(limit, X0, grid: Grid, brownian, solver: PSDSplitting, adjoint: AbstractAdjoint | None):
    if adjoint is None:
        return scan_paths(limit, X0, grid, brownian, solver=solver)
    return solve_paths(limit, X0, grid, brownian, solver=solver, adjoint=adjoint)


def _solve_traced(layer, V0, grid: Grid, solver: PSDSplitting, adjoint: AbstractAdjoint | None, paths: int, key):
    X0, limit = semidefinite_cholesky(V0), limit_over(layer, grid)

    def solve(brownian):
        block = jnp.broadcast_to(X0[..., None], (*X0.shape, brownian.shape.shape[-1]))
        return _solve(limit, block, grid, brownian, solver, adjoint)

    return in_blocks(solve, X0, paths, key, normals=limit.normals(len(X0)))


_solve_in_jit, _solve_once = eqx.filter_jit(_solve_traced), eqx.filter_jit(_solve_traced, **ONCE)


def _solve_from_normals(layer, V0, grid: Grid, adjoint: AbstractAdjoint | None, normals):
    X0 = jnp.broadcast_to(semidefinite_cholesky(V0)[..., None], (*V0.shape, len(normals)))
    normals = jnp.moveaxis(normals, 0, -1).astype(V0.dtype)
    brownian = BrownianArray(grid=jnp.asarray(grid.steps, V0.dtype), normals=normals)
    V, stopped = _solve(limit_over(layer, grid), X0, grid, brownian, PSDSplitting(), adjoint)
    return jnp.moveaxis(V, -1, 0), stopped


_solve_normals = eqx.filter_jit(_solve_from_normals)
_solve_normals_once = eqx.filter_jit(_solve_from_normals, **ONCE)


def _raise_unless_covariance(V0: Float[Array, "m m"]) -> Float[Array, "m m"]:
    """Raise at run time if a traced V0 is not a covariance: its factor would be that of another matrix."""
    known = jax.lax.stop_gradient(V0)
    tolerance = math.sqrt(jnp.finfo(V0.dtype).eps) * jnp.abs(known).max()
    symmetric = jnp.abs(known - known.T).max() <= tolerance
    semidefinite = jnp.linalg.eigvalsh(known)[0] >= -tolerance
    return eqx.error_if(V0, ~(symmetric & semidefinite), "V0: not symmetric, or not positive semi-definite")
