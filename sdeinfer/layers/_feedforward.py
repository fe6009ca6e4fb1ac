"""The residual feed-forward layer, Eq. 4 and Theorem 3.2."""

import math
from collections.abc import Mapping

import equinox as eqx
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Float, PRNGKeyArray

from sdeinfer.layers._base import (
    AbstractLayer,
    c_minus_parameter,
    c_plus_parameter,
    gamma_parameter,
    shortcut,
)
from sdeinfer.layers._limit import Limit
from sdeinfer.layers._relu import shaped_relu


class ResidualFeedForward(AbstractLayer):
    """X′ = λX + γ σ_s(X W_pre/√n) √(c/n) W_post (Eq. 4); dV = γ² b_ReLU dt + (2γ² Σ_lin)^{1/2} dB (Theorem 3.2).

    Attributes:
        gamma: strength γ of the residual branch, in (0, 1]; λ² + γ² = 1.
        c_plus: c₊ of the slope 1 + c₊/√n.
        c_minus: c₋ of the slope 1 + c₋/√n.
    """

    gamma: Float[Array, ""] = eqx.field(converter=gamma_parameter)
    c_plus: Float[Array, ""] = eqx.field(converter=c_plus_parameter)
    c_minus: Float[Array, ""] = eqx.field(converter=c_minus_parameter)

    def forward(self, X: Float[Array, "m n"], *, key: PRNGKeyArray) -> Float[Array, "m n"]:
        """Eq. 4."""
        width = X.shape[1]
        key_pre, key_post = jr.split(key)
        W_pre = jr.normal(key_pre, (width, width), X.dtype)
        W_post = jr.normal(key_post, (width, width), X.dtype)
        hidden = shaped_relu(X @ W_pre / math.sqrt(width), self.c_plus, self.c_minus, width)
        return shortcut(self.gamma) * X + self.gamma * (hidden @ W_post / math.sqrt(width))

    def limit(self) -> Limit:
        """Theorem 3.2."""
        zero = jnp.zeros_like(self.gamma)
        relu = self.gamma**2 * (self.c_plus - self.c_minus) ** 2
        return Limit(zero, relu, 2 * self.gamma**2, zero)

    def parameters(self) -> Mapping[str, Array]:
        """γ, c₊ and c₋."""
        return {"gamma": self.gamma, "c_plus": self.c_plus, "c_minus": self.c_minus}
