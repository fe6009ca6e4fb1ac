"""Tokens that all have one inner product: the flow on the sphere as an equation for one number."""

import diffrax
import jax.numpy as jnp
from jaxtyping import Array, Float
from numpy.typing import ArrayLike

from sdeinfer._files import InputError
from sdeinfer.meanfield._solve import integrate


def equiangular_tokens(number: int, inner: float, *, dimension: int | None = None) -> Float[Array, "n D"]:
    """N unit vectors with ⟨x_i, x_j⟩ = `inner` for all i ≠ j.

    Arguments:
        number: number of tokens n.
        inner: their inner product, −1/(n − 1) ≤ g ≤ 1.
        dimension: dimension D ≥ n of the tokens; None for n.

    Raises:
        InputError: for an inner product that no n vectors have, and D < n.
    """
    dimension = number if dimension is None else dimension
    if dimension < number:
        raise InputError(f"dimension: at least {number} is needed for {number} tokens, got {dimension}")
    if not -1 <= inner * (number - 1) or inner > 1:
        raise InputError(f"inner: between {-1 / (number - 1):.3g} and 1 is needed for {number} tokens, got {inner:g}")
    # The square root of (1 − g) I + g 1 1ᵀ.
    low, high = (1 - inner) ** 0.5, (1 + (number - 1) * inner) ** 0.5
    root = low * jnp.eye(number) + (high - low) / number * jnp.ones((number, number))
    return jnp.pad(root, ((0, 0), (0, dimension - number)))


def equiangular(
    beta: ArrayLike,
    number: int,
    ts: ArrayLike,
    *,
    inner: float = 0.0,
    normalised: bool = True,
    rtol: float = 1e-10,
) -> Float[Array, " times"]:
    """The common inner product g(t) of n tokens under the flow with Q = K = V = I.

        ġ = 2 (1 − g)(1 + (n − 1) g) / (e^{β(1 − g)} + n − 1),    or 2 e^{βg} (1 − g)(1 + (n − 1) g)/n unnormalised.

    Its growth towards 1 is the rank collapse of tokens that start orthogonal.

    Arguments:
        beta: inverse temperature β ≥ 0.
        number: number of tokens n ≥ 2.
        ts: times ≥ 0, increasing.
        inner: inner product at time 0.
        normalised: whether attention is normalised (softmax).
        rtol: relative tolerance of a step; absolute too.

    Raises:
        InputError: for fewer than two tokens.
    """
    if number < 2:
        raise InputError(f"number: at least 2 tokens are needed, got {number}")
    g0 = jnp.asarray(inner, jnp.result_type(float))
    rtol = max(rtol, 10 * float(jnp.finfo(g0.dtype).eps))
    args = jnp.asarray(beta), jnp.asarray(number), normalised
    return integrate(_speed, g0, ts, args, solver=diffrax.Dopri8(), rtol=rtol, atol=rtol)[0]


def _speed(t, g, args):
    beta, number, normalised = args
    numerator = 2 * (1 - g) * (1 + (number - 1) * g)
    return numerator / (jnp.exp(beta * (1 - g)) + number - 1) if normalised else numerator * jnp.exp(beta * g) / number
