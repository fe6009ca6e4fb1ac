"""Shaped attention, Eq. 1, 9 and Theorem 4.2."""

import math
from collections.abc import Mapping

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Float, PRNGKeyArray

from sdeinfer._files import InputError
from sdeinfer.layers._base import AbstractLayer, gamma_parameter, shortcut, tau0_parameter
from sdeinfer.layers._limit import Limit


class ShapedAttention(AbstractLayer):
    """X′ = λX + γ A X W_V/√n with A = I + softmax(Y/τ) − 11ᵀ/m (Eq. 1, 9), and the SDE of Theorem 4.2.

    Attributes:
        gamma: strength γ of the residual branch, in (0, 1]; λ² + γ² = 1.
        tau0: constant τ0 > 0 of the softmax temperature τ = τ0 √(n n_k).
        key_width: width n_k of queries and keys; the network's own width where None. The limit does not depend on it.
    """

    gamma: Float[Array, ""] = eqx.field(converter=gamma_parameter)
    tau0: Float[Array, ""] = eqx.field(converter=tau0_parameter)
    key_width: int | None = eqx.field(default=None, static=True)

    def __check_init__(self):
        check_key_width(self.key_width)

    def forward(self, X: Float[Array, "m n"], *, key: PRNGKeyArray) -> Float[Array, "m n"]:
        """Eq. 1 with the attention matrix of Eq. 9."""
        tokens, width = X.shape
        key_width = width if self.key_width is None else self.key_width
        key_queries, key_keys, key_values = jr.split(key, 3)
        queries = X @ jr.normal(key_queries, (width, key_width), X.dtype) / math.sqrt(width)
        keys = X @ jr.normal(key_keys, (width, key_width), X.dtype) / math.sqrt(width)
        values = X @ jr.normal(key_values, (width, width), X.dtype) / math.sqrt(width)
        tau = self.tau0 * math.sqrt(width * key_width)
        A = jnp.eye(tokens, dtype=X.dtype) + jax.nn.softmax(queries @ keys.T / tau, axis=1) - 1 / tokens
        return shortcut(self.gamma) * X + self.gamma * (A @ values)

    def limit(self) -> Limit:
        """Theorem 4.2."""
        variance = self.gamma**2
        return Limit(
            attention_drift=variance / self.tau0**2,
            relu_drift=jnp.zeros_like(variance),
            linear_noise=variance * (2 - variance),
            attention_noise=(variance / self.tau0) ** 2,
        )

    def parameters(self) -> Mapping[str, Array]:
        """γ and τ0."""
        return {"gamma": self.gamma, "tau0": self.tau0}


def check_key_width(key_width: int | None) -> None:
    """Refuse a width of queries and keys that is not positive."""
    if key_width is not None and key_width < 1:
        raise InputError(f"key_width: at least 1 is needed, got {key_width}")
