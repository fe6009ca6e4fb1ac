"""Initial tokens with a given covariance."""

import math

import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Float, PRNGKeyArray

from sdeinfer._files import InputError
from sdeinfer.covariance._matrix import factor


def tokens_with_covariance(V0: Float[Array, "m m"], *, width: int, key: PRNGKeyArray) -> Float[Array, "m n"]:
    """Random tokens X with XXᵀ/n = V0 up to rounding: a factor of V0 times m uniformly random orthonormal directions.

    The directions matter if a layer acts on entries, as the MLP's first ReLU does (Eq. 19). The Gaussian weights of
    every later layer produce uniform directions.

    Arguments:
        V0: covariance of m tokens, possibly singular.
        width: n ≥ m.
        key: PRNG key for the directions.

    Raises:
        InputError: if n < m, because XXᵀ could not have full rank.
    """
    tokens = V0.shape[0]
    if width < tokens:
        raise InputError(f"width: {tokens} tokens need a width of at least {tokens}, got {width}")
    gaussian = jr.normal(key, (width, tokens), V0.dtype)
    Q, R = jnp.linalg.qr(gaussian)
    directions = Q * jnp.sign(jnp.diagonal(R))
    return math.sqrt(width) * factor(V0) @ directions.T
