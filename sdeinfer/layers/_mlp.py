"""The shaped MLP, Eq. 19 and 20."""

import math
from typing import Any, ClassVar

import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, ArrayLike, Float, Int, PRNGKeyArray

from sdeinfer.covariance import gram, matmul
from sdeinfer.layers._base import AbstractLayer
from sdeinfer.layers._finite_width import FiniteWidth
from sdeinfer.layers._keys import NetworkKeys
from sdeinfer.layers._relu import relu_kink, shaped_relu
from sdeinfer.layers._wishart import column_sum, factor, whole, wishart_draws, wishart_factor, with_gram
from sdeinfer.parameters import C_MINUS, C_PLUS
from sdeinfer.terms import Limit


class ShapedMLP(AbstractLayer):
    """X′ = σ_s(X) √(c/n) W (Eq. 19); dV = b_ReLU dt + Σ_lin^{1/2} dB (Eq. 20).

    Attributes:
        c_plus: c₊ of the slope 1 + c₊/√n.
        c_minus: c₋ of the slope 1 + c₋/√n.
    """

    architecture: ClassVar[str | None] = "mlp"

    c_plus: Float[Any, ""] = C_PLUS.field()
    c_minus: Float[Any, ""] = C_MINUS.field()

    def forward(self, X: Float[Array, "m n"], *, key: PRNGKeyArray) -> Float[Array, "m n"]:
        """Eq. 19."""
        width = X.shape[1]
        W = jr.normal(key, (width, width), X.dtype)
        return shaped_relu(X, self.c_plus, self.c_minus, width) @ W / math.sqrt(width)

    @property
    def skewness(self) -> float:
        """Skewness of the sample covariance of n units."""
        return 2.0

    def forward_covariance(
        self, V: Float[Array, "m m blocks networks"], *, width: Int[Array, ""] | int, keys: NetworkKeys
    ) -> Float[Array, "m m blocks networks"]:
        """V′ ~ Wishart(n, S/n), S = (c/n) σ_s(X) σ_s(X)ᵀ; given V = XXᵀ/n, X has uniformly random directions."""
        tokens, _, blocks, _ = V.shape
        n, freedom = jnp.asarray(width, V.dtype), width // blocks
        sizes = {"tokens": tokens, "blocks": blocks, "dtype": V.dtype, "keys": keys}
        # The same columns are drawn twice: first for their Gram matrix, then for their images.
        K = with_gram(V, column_sum(lambda G: G, freedom, **sizes) / n)

        def images(G):
            return shaped_relu(matmul(K, G), self.c_plus, self.c_minus, width)

        F = factor(whole(column_sum(images, freedom, **sizes)) / n)
        drawn = wishart_draws([freedom], **sizes)
        return gram(matmul(F, wishart_factor(freedom, drawn.normals[0], drawn.chi[0])) / jnp.sqrt(n))

    def limit(self) -> Limit:
        """Eq. 20."""
        return Limit(relu_drift=(self.c_plus - self.c_minus) ** 2, linear_noise=jnp.ones_like(self.c_plus))

    def finite_width(self, width: ArrayLike) -> FiniteWidth:
        """The exact mean of the layer, and its variance up to q²; both depend on c₊ and c₋ only through q."""
        q = relu_kink(self.c_plus, self.c_minus, width)
        return FiniteWidth.without_attention(
            4 * jnp.asarray(width) * q, relu_growth=4 * q, relu_tokens=q, relu_growth_square=16 * q**2
        )
