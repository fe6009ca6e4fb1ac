"""Attention with random value matrices: the flow with common noise, a bridge to the covariance SDE."""

import math

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray
from numpy.typing import ArrayLike

from sdeinfer._files import InputError
from sdeinfer.meanfield._flow import SelfAttentionFlow, on_sphere
from sdeinfer.meanfield._solve import start_of


def solve_random_values(
    flow: SelfAttentionFlow,
    tokens: ArrayLike,
    ts: ArrayLike,
    *,
    step: float,
    key: PRNGKeyArray,
) -> Float[Array, "times n D"]:
    """Tokens at times of the flow whose value matrix is white noise in depth, common to all tokens.

        dx_i = P_{x_i} dB a_i − ½ (D − 1) ‖a_i‖² x_i dt,    a_i = residual of x_i,

    with B a D × D matrix of independent Brownian motions (Itô; the drift keeps x on the sphere). A step is a layer of a
    Transformer with V ~ N(0, 1), x ← N(x + √h V a): its expansion to second order has the SDE's mean and covariance, so
    that its weak order is 1. Without attention (β = 0 and one token) ⟨x_i, x_j⟩ is the correlation of a linear network
    of width D, whose covariance follows the covariance SDE as D and the depth grow.

    Arguments:
        flow: the flow; its own V, if any, multiplies a.
        tokens: tokens on the unit sphere at time 0, shape (n, D).
        ts: times ≥ 0, increasing, multiples of `step`.
        step: step h of the solver.
        key: PRNG key.

    Raises:
        InputError: for tokens that are not on the unit sphere, and times that are no increasing multiples of the step.
    """
    x, times = start_of(flow, tokens), np.asarray(ts, np.float64)
    numbers = np.round(times / step).astype(int)
    if not np.allclose(numbers * step, times) or not (np.diff(numbers, prepend=-1) > 0).all():
        raise InputError(f"ts: increasing multiples of the step {step:g} are needed")
    return _solved(flow, x, jnp.asarray(numbers), jnp.asarray(step), key)


def antipodal_exponent(beta: float, *, dimension: int) -> float:
    """The growth exponent of log ‖x + y‖ for two nearly antipodal tokens x, y ≈ −x with random values.

        ½ [(D − 3) − (D − 1) tanh² β].

    Antipodal tokens are unstable where it is positive, and attract their neighbours where it is negative. For β → ∞
    each token attends to itself, and −1 is the gap of the Lyapunov exponents of a product of Gaussian matrices.

    Arguments:
        beta: inverse temperature β ≥ 0.
        dimension: dimension D ≥ 2 of the tokens.
    """
    return 0.5 * ((dimension - 3) - (dimension - 1) * math.tanh(beta) ** 2)


@eqx.filter_jit
def _solved(flow: SelfAttentionFlow, x: Array, numbers: Array, step: Array, key: PRNGKeyArray) -> Array:
    """Tokens after so many steps."""

    def until(carry: tuple[Array, Array], number: Array) -> tuple[tuple[Array, Array], Array]:
        x, done = carry

        def advance(i: Array, x: Array) -> Array:
            noise = jr.normal(jr.fold_in(key, i), (x.shape[-1],) * 2, x.dtype)
            return on_sphere(x + step.astype(x.dtype) ** 0.5 * flow.residual(x, x) @ noise.mT)

        x = jax.lax.fori_loop(done, number, advance, x)
        return (x, number), x

    return jax.lax.scan(until, (x, jnp.zeros((), numbers.dtype)), numbers)[1]
