"""Tangents of the covariance SDE: Jacobians and gradients of networks at initialisation, with their spread."""

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PRNGKeyArray
from numpy.typing import ArrayLike

from sdeinfer._arguments import checked
from sdeinfer._files import InputError
from sdeinfer._progress import phase, with_progress_line
from sdeinfer.covariance._factors import factor_on_host
from sdeinfer.covariance._matrix import is_concrete, validate_covariance
from sdeinfer.layers import AbstractLayer
from sdeinfer.solve._blocks import solve_in_blocks
from sdeinfer.solve._grid import STEP, limit_over_on_host, step_grid
from sdeinfer.solve._psd import PSDSplitting
from sdeinfer.solve._simulate import check_inputs, solve_from_key
from sdeinfer.solve._solve import fill_after
from sdeinfer.solve._stopped import Reason, bounds_of, reason_of


class TangentPaths(eqx.Module):
    """Paths of the covariances of tokens X and of a tangent Ẋ_t = (∂X_t/∂X_0)[Ẋ_0].

    Attributes:
        covariance: V = XXᵀ/n, shape (paths, times, m, m).
        cross: Γ = XẊᵀ/n, shape (paths, times, m, m).
        tangent: D = ẊẊᵀ/n, shape (paths, times, m, m).
        time: stopping time of each path, shape (paths,); +∞ for a path that was not stopped.
        reason: the `Reason` of each path, shape (paths,).
    """

    covariance: Float[Array, "paths times m m"]
    cross: Float[Array, "paths times m m"]
    tangent: Float[Array, "paths times m m"]
    time: Float[Array, " paths"]
    reason: Int[Array, " paths"]


@checked
@with_progress_line
def tangents(
    layer: AbstractLayer,
    V0: Float[Array | np.ndarray, "m m"],
    ts: ArrayLike,
    directions: Float[Array | np.ndarray, "m m"],
    *,
    cross: Float[Array | np.ndarray, "m m"] | None = None,
    within: tuple[float, float] | None = None,
    paths: int,
    step: float = STEP,
    progress: bool = True,
    key: PRNGKeyArray,
) -> TangentPaths:
    """Simulate the joint SDE of the covariance V of tokens and the covariances Γ and D of a tangent.

    The tangent is what a network makes of a small change of its initial tokens, by the chain rule. If the change is in
    one random direction at one token β, `directions` is 1 at (β, β) and 0 elsewhere. tr D_T is then the squared norm of
    the change of all outputs, over n. Over directions it has the mean ‖J_β‖_F²/n, with J_β the Jacobian of the outputs
    by this token; and it has the law of the squared norm, over n, of the gradient that reaches the token from one white
    gradient of the outputs. D is linear in `directions` where `cross` is 0: the identity is for all tokens together.

    It is the limit of two prompts X and X + εẊ through one network, positive semi-definite for every step size, of weak
    order 2, and costs about two to four `simulate`s of 2m tokens.

    Arguments:
        layer: the architecture, with its parameters.
        V0: covariance of the tokens at time 0, shape (m, m).
        ts: depth-times at which to save, increasing.
        directions: D at time 0, shape (m, m).
        cross: Γ at time 0, shape (m, m); None for directions orthogonal to the tokens, as random ones are.
        within: exclusive lower and upper bound on the eigenvalues of V, as in `simulate_stopped`; None for no bounds.
        paths: number of independent paths.
        step: longest step in depth-time.
        progress: whether a line on a terminal or in a notebook says what is done, after two seconds.
        key: PRNG key.

    Returns:
        The paths. Without bounds the covariances are +∞ after a path explodes; with bounds they are constant after a
        path is stopped.

    Raises:
        InputError: as `simulate` and `simulate_stopped`, and if V0, `cross` and `directions` are not the blocks of a
            covariance.
    """
    del progress  # for `with_progress_line`
    phase("simulating")
    joint = joint_covariance(V0, directions, cross)
    bounds = None if within is None else bounds_of(within)
    layer, joint = check_inputs(layer, joint, paths)
    lowest, highest = (None, None) if bounds is None else (np.asarray(bound, joint.dtype) for bound in bounds)
    solver = PSDSplitting(lowest, highest, tangents=True)
    return _paths(*solve_from_key(layer, joint, step_grid(ts, step), solver, paths, key), ts, bounds)


def tangents_from(
    layer: AbstractLayer,
    V0: Float[np.ndarray, "paths m m"],
    ts: ArrayLike,
    directions: Float[np.ndarray, "#paths m m"],
    *,
    step: float = STEP,
    key: PRNGKeyArray,
) -> TangentPaths:
    """`tangents` from a V0 for each path, orthogonal to the tokens, of known arguments; V0 = +∞ stays there."""
    finite = np.isfinite(V0).all(axis=(1, 2))
    starts = np.where(finite[:, None, None], V0, np.eye(V0.shape[-1], dtype=V0.dtype))
    D0 = np.broadcast_to(directions, V0.shape)
    zero = np.zeros_like(starts)
    X0 = factor_on_host(np.block([[starts, zero], [zero, D0]]))
    grid, solver = step_grid(ts, step), PSDSplitting(tangents=True)
    joint, time = solve_in_blocks(limit_over_on_host(layer, grid), X0, grid, paths=len(X0), solver=solver, key=key)
    return _paths(joint, np.where(finite, time, -np.inf), ts, None)


def joint_covariance(
    V0: Float[Array | np.ndarray, "m m"],
    directions: Float[Array | np.ndarray, "m m"],
    cross: Float[Array | np.ndarray, "m m"] | None = None,
) -> Float[Array | np.ndarray, "2*m 2*m"]:
    """The joint covariance [[V, C], [Cᵀ, D]] of tokens and a tangent, checked where the arguments are concrete."""
    blocks = {"V0": V0, "directions": directions} | ({} if cross is None else {"cross": cross})
    for name, block in blocks.items():
        if jnp.shape(block) != (len(V0), len(V0)):
            raise InputError(f"{name}: shape {(len(V0), len(V0))} of V0 is needed, got {jnp.shape(block)}")
    if not all(map(is_concrete, blocks.values())):
        C = jnp.zeros_like(V0) if cross is None else cross
        return jnp.block([[jnp.asarray(V0), C], [C.T, jnp.asarray(directions)]])
    V, D = validate_covariance(V0), validate_covariance(directions, "directions")
    C = np.zeros_like(V) if cross is None else np.asarray(cross)
    return validate_covariance(np.block([[V, C], [C.T, D]]), "V0, cross and directions")


def _paths(joint, time, ts: ArrayLike, bounds: tuple[float, float] | None) -> TangentPaths:
    half = joint.shape[-1] // 2
    if bounds is None:
        joint = fill_after(time, joint, ts, np.inf)
        reason = jnp.where(jnp.isposinf(time), Reason.NOT, Reason.EXPLODED)
    else:
        reason = reason_of(time, joint[:, -1, :half, :half], *bounds)
    joint = jnp.asarray(joint)
    blocks = joint[..., :half, :half], joint[..., :half, half:], joint[..., half:, half:]
    return TangentPaths(*blocks, time=jnp.asarray(time), reason=reason)
