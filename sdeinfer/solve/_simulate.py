"""Paths of the neural covariance SDE."""

import math
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray
from numpy.typing import ArrayLike

from sdeinfer._arguments import at_least_one, checked
from sdeinfer._progress import phase, with_progress_line
from sdeinfer.covariance._batched import semidefinite_cholesky
from sdeinfer.covariance._factors import factor_on_host
from sdeinfer.covariance._matrix import is_concrete, validate_covariance
from sdeinfer.layers import AbstractLayer
from sdeinfer.layers._base import check_parameters
from sdeinfer.solve._blocks import scan_in_blocks, solve_in_blocks
from sdeinfer.solve._grid import STEP, Grid, limit_over, limit_over_on_host, step_grid
from sdeinfer.solve._psd import PSDSplitting
from sdeinfer.solve._solve import fill_after

FORWARD_SCALARS = 8
"""Largest number of scalars along which a derivative is computed forwards: more than a shaped layer has parameters."""


@checked
@with_progress_line
def simulate(
    layer: AbstractLayer,
    V0: Float[Array | np.ndarray, "m m"],
    ts: ArrayLike,
    *,
    paths: int,
    step: float = STEP,
    progress: bool = True,
    key: PRNGKeyArray,
) -> Float[Array, "paths times m m"]:
    """Simulate the covariance SDE dV = b(V) dt + Σ(V)^{1/2} dB of Corollary 4.3 from V0 at time 0.

    The result is differentiable with respect to the layer's parameters and V0, in forward and reverse mode and to any
    order. At a singular V0, as of equal tokens, the derivative is right only along changes that keep the rank, as those
    of x in V0 = x xᵀ. A change that raises the rank moves a path by the square root of the new eigenvalue. The
    derivative with respect to single entries of V0 is then not the derivative of the mean. Use finite differences, or a
    definite V0.

    Arguments:
        layer: the architecture, with its parameters.
        V0: covariance at time 0, shape (m, m); it may be singular.
        ts: depth-times t = ℓ/n ≥ 0 at which to save, increasing (dimensionless).
        paths: number of independent paths.
        step: longest step in depth-time; each interval between saved times is cut into equal steps no longer than this.
        progress: whether a line on a terminal or in a notebook says what is done, after two seconds.
        key: PRNG key; the paths also depend on `paths` and on the kind of device.

    Returns:
        V at the saved times, shape (paths, times, m, m). The cubic attention drift can make a path explode: its entries
        are +∞ from then on, never NaN. `simulate_stopped` returns the time and keeps the finite values.

    Raises:
        InputError: for a V0 that is not a covariance, and for invalid times or steps (see `step_grid`). Under `jax.jit`
            values out of range raise at run time; `equinox.filter_jit` shows a clear message.
    """
    del progress  # for `with_progress_line`
    phase("simulating")
    layer, V0 = check_inputs(layer, V0, paths)
    V, stopped = solve_from_key(layer, V0, step_grid(ts, step), PSDSplitting(), paths, key)
    return jax.device_put(fill_after(stopped, V, ts, np.inf))


def check_inputs[T: AbstractLayer](layer: T, V0: ArrayLike, paths: int) -> tuple[T, Float[Array | np.ndarray, "m m"]]:
    """Check the parameters, V0 and the number of paths, and make V0 exactly symmetric."""
    layer = check_parameters(layer)
    V0 = validate_covariance(V0) if is_concrete(V0) else _raise_unless_covariance(jnp.asarray(V0))
    # The factorisation reads one triangle: without this line the derivative would have that triangle only.
    V0 = (V0 + V0.T) / 2
    at_least_one(paths=paths)
    return layer, V0


def solve_from_key(layer, V0, grid: Grid, solver: PSDSplitting, paths: int, key) -> tuple[Any, Any]:
    """V of shape (paths, times, m, m), and the stopping times of the paths.

    Concrete arguments are solved in blocks of one shape. Traced arguments, which may be differentiated, are solved in
    one program for this grid and number of paths.
    """
    if all(map(is_concrete, jax.tree.leaves((layer, V0, key, jnp.zeros(()))))):  # new arrays are traced inside of jit
        X0 = factor_on_host(np.asarray(V0))[None]
        return solve_in_blocks(limit_over_on_host(layer, grid), X0, grid, paths=paths, solver=solver, key=key)
    return _scan_traced(layer, V0, grid, solver, paths, key)


@eqx.filter_jit
def _scan_traced(layer, V0, grid: Grid, solver: PSDSplitting, paths: int, key):
    def paths_of(layer, V0, solver, key):
        X0, limit = semidefinite_cholesky(V0), limit_over(layer, grid)
        return scan_in_blocks(limit, X0, grid, paths=paths, solver=solver, key=key)

    return along_few_numbers(paths_of)(layer, V0, solver, key)


def along_few_numbers[T](function: Callable[..., T]) -> Callable[..., T]:
    """Differentiate `function` by tangents where few scalars are perturbed and no arrays, otherwise as JAX does.

    The reverse pass of a solve compiles for five times as long as its tangents, which are one program for all
    directions. Derivatives of derivatives go the same way.
    """
    wrapped = eqx.filter_custom_jvp(function)

    @wrapped.def_jvp
    def derivative(primals, tangents):
        directions, structure = jax.tree.flatten(tangents)
        is_perturbed = jax.tree.map(lambda tangent: tangent is not None, tangents, is_leaf=lambda x: x is None)

        def along(direction, values):
            """The function, and its tangent along a direction of the perturbed arguments."""
            perturbed, fixed = eqx.partition(values, is_perturbed)
            tangent = jax.tree.unflatten(structure, direction)
            return jax.jvp(lambda perturbed: function(*eqx.combine(perturbed, fixed)), [perturbed], [tangent])

        def with_columns(*values):
            """The function, and its derivatives by each of the perturbed scalars."""
            basis = list(jnp.eye(len(directions), dtype=directions[0].dtype))
            return jax.vmap(lambda direction: along(direction, values), out_axes=(None, 0))(basis)

        if len(directions) > FORWARD_SCALARS or any(map(jnp.ndim, directions)):
            return along(directions, primals)
        # Wrapped again, so that the columns have the same rule.
        output, columns = along_few_numbers(with_columns)(*primals)
        return output, jax.tree.map(lambda column: jnp.tensordot(jnp.stack(directions), column, 1), columns)

    return wrapped


def _raise_unless_covariance(V0: Float[Array, "m m"]) -> Float[Array, "m m"]:
    """Raise at run time if a traced V0 is not a covariance: its factor would be that of another matrix."""
    known = jax.lax.stop_gradient(V0)
    tolerance = math.sqrt(jnp.finfo(V0.dtype).eps) * jnp.abs(known).max()
    symmetric = jnp.abs(known - known.T).max() <= tolerance
    semidefinite = jnp.linalg.eigvalsh(known)[0] >= -tolerance
    return eqx.error_if(V0, ~(symmetric & semidefinite), "V0: not symmetric, or not positive semi-definite")
