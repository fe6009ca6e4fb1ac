"""Paths of the neural covariance SDE, by Diffrax."""

import math

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray
from numpy.typing import ArrayLike

from sdeinfer._files import InputError
from sdeinfer.covariance import is_concrete, validate_positive_definite
from sdeinfer.layers import AbstractLayer, Limit, check_parameters
from sdeinfer.solve._brownian import BrownianSteps
from sdeinfer.solve._psd import CovarianceTerm, PSDEuler

MOST_STEPS = 10**6
"""Between two saved times: more is a slip of the user's."""


def simulate(
    layer: AbstractLayer,
    V0: Float[Array, "m m"],
    ts: ArrayLike,
    *,
    paths: int,
    step: float = 0.01,
    key: PRNGKeyArray,
) -> Float[Array, "paths times m m"]:
    """Simulate the covariance SDE dV = b(V) dt + Σ(V)^{1/2} dB of Corollary 4.3 from V0 at time 0.

    The result can be differentiated in the layer's parameters and in V0, in reverse mode.

    Arguments:
        layer: the architecture, with its parameters.
        V0: positive definite covariance at time 0, shape (m, m).
        ts: depth-times t = ℓ/n ≥ 0 at which to save, increasing (dimensionless).
        paths: how many independent paths.
        step: longest step in depth-time; each interval between saved times is cut into equal steps no longer than this.
        key: where the randomness comes from.

    Returns:
        V at the saved times, shape (paths, times, m, m). Where the cubic attention drift lets a path explode, its
        values from then on are infinite or NaN.

    Raises:
        InputError: for a V0 that is not a positive definite covariance, or for times or steps that make no grid. Under
            `jax.jit` parameters out of range raise when they are known; `equinox.filter_jit` shows a clear message.
    """
    layer = check_parameters(layer)
    if is_concrete(V0):
        V0 = jnp.asarray(validate_positive_definite(V0))
    if paths < 1:
        raise InputError(f"paths: at least 1 is needed, got {paths}")
    return _simulate(layer.limit(), V0, *step_grid(ts, step), jr.split(key, paths))


@eqx.filter_jit
def _simulate(limit, V0, grid, saved, keys):
    X0 = jnp.linalg.cholesky(V0)
    return jax.vmap(lambda key: solve_path(limit, X0, grid, saved, key))(keys)


def solve_path(
    limit: Limit,
    X0: Float[Array, "m m"],
    grid: tuple[float, ...],
    saved: tuple[int, ...],
    key: PRNGKeyArray,
) -> Float[Array, "times m m"]:
    """Solve for one path of V = XXᵀ on the grid's steps, and keep it at the grid points `saved`."""
    limit = jax.tree.map(lambda c: c.astype(X0.dtype), limit)
    if len(grid) == 1:
        return (X0 @ X0.T)[None]
    times = np.asarray(grid)
    brownian = BrownianSteps(shape=jax.ShapeDtypeStruct((2, *X0.shape), X0.dtype), key=key)
    solution = diffrax.diffeqsolve(
        CovarianceTerm(limit, brownian),
        PSDEuler(),
        t0=float(times[0]),
        t1=float(times[-1]),
        dt0=None,
        y0=X0,
        stepsize_controller=diffrax.StepTo(ts=jnp.asarray(times, X0.dtype)),
        saveat=diffrax.SaveAt(ts=jnp.asarray(times[list(saved)], X0.dtype), fn=lambda t, X, args: X @ X.T),
        max_steps=len(grid),
        throw=False,
    )
    assert solution.ys is not None
    return solution.ys


def step_grid(ts: ArrayLike, step: float) -> tuple[tuple[float, ...], tuple[int, ...]]:
    """Cut [0, ts[0]], [ts[0], ts[1]], … into equal steps no longer than `step`.

    Returns:
        the grid from 0 on, and the positions of ts in it.
    """
    if not is_concrete(ts):
        raise InputError("ts: the times must be known when the solver is compiled, got traced values")
    times = np.asarray(ts, np.float64)
    if times.ndim != 1 or times.size == 0 or not np.isfinite(times).all():
        raise InputError(f"ts: a non-empty list of finite times is needed, got shape {times.shape}")
    if times[0] < 0 or (np.diff(times) <= 0).any():
        raise InputError("ts: times must start at 0 or later and increase")
    if not (step > 0 and math.isfinite(step)):
        raise InputError(f"step: must be positive and finite, got {step}")
    grid, saved = [0.0], []
    for time in times:
        exact = (time - grid[-1]) / step
        if exact > MOST_STEPS:
            raise InputError(f"step: {step:g} cuts the time to {time:g} into more than {MOST_STEPS} steps")
        # A ratio that is whole but for rounding is not rounded up.
        steps = max(math.ceil(exact - 1e-9), int(time > grid[-1]))
        grid.extend(np.linspace(grid[-1], time, steps + 1)[1:].tolist())
        saved.append(len(grid) - 1)
    return tuple(grid), tuple(saved)
