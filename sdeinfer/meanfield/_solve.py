"""Solve a self-attention flow on the sphere by Diffrax. Tests: `tests/meanfield/test_clusters.py`."""

from collections.abc import Callable
from typing import Any

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Bool, Float
from numpy.typing import ArrayLike

from sdeinfer._files import InputError
from sdeinfer.meanfield._flow import SelfAttentionFlow, on_sphere


class OnSphere(diffrax.Tsit5):
    """Diffrax's Tsit5, every step of which ends on the sphere: x ← x/‖x‖.

    The order is unchanged, since the exact solution is on the sphere. Without it, errors of the norm grow like exp(2t)
    where values repel (V = −I).
    """

    def step(self, terms, t0, t1, y0, args, solver_state, made_jump):  # pyright: ignore[reportIncompatibleMethodOverride]
        y1, *outcome = super().step(terms, t0, t1, y0, args, solver_state, made_jump)
        return on_sphere(y1), *outcome


def solve(
    flow: SelfAttentionFlow,
    tokens: ArrayLike,
    ts: ArrayLike,
    *,
    weights: Float[Array, " n"] | None = None,
    rtol: float | None = None,
    atol: float | None = None,
    max_steps: int = 2**16,
) -> Float[Array, "times n D"]:
    """Tokens of a flow at times, on the sphere within rounding; differentiable in the flow, the tokens and the times.

    Arguments:
        flow: the flow.
        tokens: tokens on the unit sphere at time 0, shape (n, D).
        ts: times ≥ 0, increasing.
        weights: mass of each token, with sum 1; None for 1/n each.
        rtol: relative tolerance of a step; None for 1e-7, or 1e-5 in single precision.
        atol: absolute tolerance of a step; None for a tenth of rtol's default.
        max_steps: largest number of steps, after which an error is raised.
    """
    x = start_of(flow, tokens)
    usual = 1e-7 if jnp.finfo(x.dtype).bits == 64 else 1e-5
    rtol, atol = (usual if rtol is None else rtol), (usual / 10 if atol is None else atol)
    path, _ = integrate(_field, x, ts, (flow, weights), solver=OnSphere(), rtol=rtol, atol=atol, max_steps=max_steps)
    return on_sphere(path)


def _field(t, x, args):
    # A function of the module: one made in each call would be compiled in each.
    flow, weights = args
    return flow(x, weights)


def integrate(
    field: Callable[[Any, Any, Any], Array],
    start: Float[Array, "..."],
    ts: ArrayLike,
    args: Any,
    *,
    solver: diffrax.AbstractSolver,
    rtol: float,
    atol: float,
    max_steps: int = 2**16,
    throw: bool = True,
) -> tuple[Float[Array, "times ..."], Bool[Array, ""]]:
    """The solution of ẏ = field(t, y, args) at times, of a module's function; and whether it was found."""
    if not isinstance(ts, Tracer):
        given = np.asarray(ts)
        if given.ndim != 1 or not len(given) or not (np.diff(given, prepend=-1) > 0).all() or given[0] < 0:
            raise InputError("ts: increasing times ≥ 0 are needed")
    times = jnp.asarray(ts, start.dtype)
    tolerances = jnp.asarray([rtol, atol], start.dtype)  # arrays, so that other ones compile nothing
    solution = diffrax.diffeqsolve(
        diffrax.ODETerm(field),
        solver,
        t0=0.0,
        t1=times[-1],
        dt0=None,
        y0=start,
        args=args,
        saveat=diffrax.SaveAt(ts=times),
        stepsize_controller=diffrax.PIDController(rtol=tolerances[0], atol=tolerances[1]),
        max_steps=max_steps,
        throw=throw,
    )
    assert solution.ys is not None
    return solution.ys, solution.result == diffrax.RESULTS.successful


def start_of(flow: SelfAttentionFlow, tokens: ArrayLike) -> Float[Array, "n D"]:
    """Tokens at time 0 in the precision of the flow, which may be higher than their own; on the sphere within √ε."""
    x = jnp.asarray(tokens)
    if not isinstance(x, Tracer):
        error = np.abs(np.linalg.norm(x, axis=-1) - 1).max()
        if not error <= np.finfo(x.dtype).eps ** 0.5:
            raise InputError(f"tokens: must be on the unit sphere, found ‖x‖ = 1 ± {error:.2g}: use on_sphere")
    precision = jnp.result_type(x, *jax.tree.leaves(eqx.filter(flow, eqx.is_array)))
    return x if x.dtype == precision else on_sphere(x.astype(precision))
