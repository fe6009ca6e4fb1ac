"""Norms of tokens and of their covariances. Tests: `tests/blocks/test_block.py`."""

from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Float

from sdeinfer.covariance._batched import diagonal

type Norm = Literal["layer", "rms"] | None
"""LayerNorm, RMSNorm or no norm, without gains."""


def normalised_tokens(X: Float[Array, "m n"], norm: Norm, epsilon: float = 0.0) -> Float[Array, "m n"]:
    """Tokens over the root of their mean square over features, plus ε; by LayerNorm with a mean of 0."""
    if norm is None:
        return X
    if norm == "layer":
        X = X - X.mean(axis=1, keepdims=True)
    return X / jnp.sqrt(jnp.square(X).mean(axis=1, keepdims=True) + epsilon)


def normalised_covariance(
    V: Float[Array, "m m ..."], norm: Norm, mean: Float[Array, "m ..."] | None = None
) -> Float[Array, "m m ..."]:
    """V̂ = D^{-1/2} V D^{-1/2}, with D = diag V; by LayerNorm for V less the products of the tokens' means."""
    if norm is None:
        return V
    if norm == "layer" and mean is not None:
        V = V - mean[:, None] * mean
    scale = 1 / jnp.sqrt(diagonal(V))
    return V * scale[:, None] * scale
