"""The shaped MLP, Eq. 19 and 20."""

import math
from collections.abc import Mapping

import equinox as eqx
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Float, PRNGKeyArray

from sdeinfer.layers._base import AbstractLayer, c_minus_parameter, c_plus_parameter
from sdeinfer.layers._limit import Limit
from sdeinfer.layers._relu import shaped_relu


class ShapedMLP(AbstractLayer):
    """X′ = σ_s(X) √(c/n) W (Eq. 19); dV = b_ReLU dt + Σ_lin^{1/2} dB (Eq. 20).

    Attributes:
        c_plus: c₊ of the slope 1 + c₊/√n.
        c_minus: c₋ of the slope 1 + c₋/√n.
    """

    c_plus: Float[Array, ""] = eqx.field(converter=c_plus_parameter)
    c_minus: Float[Array, ""] = eqx.field(converter=c_minus_parameter)

    def forward(self, X: Float[Array, "m n"], *, key: PRNGKeyArray) -> Float[Array, "m n"]:
        """Eq. 19."""
        width = X.shape[1]
        W = jr.normal(key, (width, width), X.dtype)
        return shaped_relu(X, self.c_plus, self.c_minus, width) @ W / math.sqrt(width)

    def limit(self) -> Limit:
        """Eq. 20."""
        zero = jnp.zeros_like(self.c_plus)
        return Limit(zero, (self.c_plus - self.c_minus) ** 2, jnp.ones_like(self.c_plus), zero)

    def parameters(self) -> Mapping[str, Array]:
        """c₊ and c₋."""
        return {"c_plus": self.c_plus, "c_minus": self.c_minus}
