"""Shaped blocks as modules of Flax nnx (Noci et al., 2023): at initialisation they have the law of the layers.

    layer, rngs = si.tune("transformer", V0, ..., width=512, depth=64).layer, nnx.Rngs(0)
    blocks = nnx.List(ShapedTransformer.of(layer.at((l + 0.5) / 512), 512, rngs=rngs) for l in range(64))

Weights are matrices without biases, at first with independent N(0, 1/fan_in) entries; γ, τ0, c₊ and c₋ are constants.
Tests: `tests/modules/test_modules.py`.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float

from sdeinfer import layers
from sdeinfer.layers._feedforward import hidden_units
from sdeinfer.modules._shared import OfLayer, key_size, relu_slopes, residual_weights, temperature


class ShapedAttention(OfLayer, nnx.Module):
    """X′ = λX + γ A X W_V (Eq. 1, 9, 33), with the arguments of `sdeinfer.modules.torch.ShapedAttention`.

    `more` are `rngs`, and `dtype` and `param_dtype` of `nnx.Linear`.
    """

    layer_type = layers.ShapedAttention

    def __init__(
        self,
        width: int,
        gamma: float,
        tau0: float,
        *,
        heads: int = 1,
        key_width: int | None = None,
        output_projection: bool = False,
        causal: bool = False,
        gamma1: float = 1.0,
        gamma2: float = 1.0,
        trainable_gains: bool = False,
        **more: Any,
    ):
        size, gains = key_size(width, heads, key_width), (gamma1, gamma2)
        self.heads, self.causal, self.tau = heads, causal, temperature(tau0, width, size)
        self.shortcut, self.gamma = residual_weights(gamma)
        self.query, self.key = linear(width, heads * size, **more), linear(width, heads * size, **more)
        self.value = linear(width, width, **more)
        self.output = linear(width, width, **more) if output_projection else None
        self.gamma1, self.gamma2 = (gain(start, **more) if trainable_gains else float(start) for start in gains)

    def __call__(self, X: Float[Array, "*batch m n"], mask: Bool[Array, "..."] | None = None) -> Float[Array, "..."]:
        """X′ of tokens X, (…, tokens, n); the boolean mask, broadcast to (…, tokens, tokens), says who attends."""
        values = self.by_head(self.value(X))
        mixed = self.gamma1 * wide(values) + wide(self.mixing(X, mask).astype(values.dtype) @ values)
        Z = jnp.swapaxes(mixed.astype(values.dtype), -2, -3).reshape(X.shape)
        return residual(self, X, Z if self.output is None else self.output(Z))

    def mixing(self, X: Float[Array, "*batch m n"], mask: Bool[Array, "..."] | None = None) -> Float[Array, "..."]:
        """A − γ₁I, of shape (…, heads, tokens, tokens); zero in the row of a token that attends to nothing."""
        tokens = X.shape[-2]
        attended = jnp.ones((tokens, tokens), bool)
        if self.causal:
            attended = jnp.tril(attended)
        if mask is not None:
            attended = attended & jnp.broadcast_to(mask, (*X.shape[:-2], tokens, tokens))
        attended = attended[..., None, :, :]
        Y = wide(self.by_head(self.query(X)) @ self.by_head(self.key(X)).mT) / self.tau
        # Finite, so that the softmax of a row without tokens is, and its gradient.
        Y = jnp.where(attended, Y, jnp.finfo(Y.dtype).min)
        count = jnp.maximum(attended.sum(-1, keepdims=True, dtype=Y.dtype), 1)
        return jnp.where(attended, jax.nn.softmax(Y, axis=-1) - self.gamma2 / count, 0)

    def by_head(self, Z: Float[Array, "*batch m columns"]) -> Float[Array, "..."]:
        """The columns of each head: (…, tokens, columns) as (…, heads, tokens, columns of a head)."""
        return jnp.swapaxes(Z.reshape(*Z.shape[:-1], self.heads, -1), -2, -3)


class ShapedFeedForward(OfLayer, nnx.Module):
    """X′ = λX + γ √c σ_s(X W_pre) W_post (Eq. 4), with the arguments of `sdeinfer.ResidualFeedForward`."""

    layer_type = layers.ResidualFeedForward

    def __init__(self, width: int, gamma: float, c_plus: float, c_minus: float, *, expansion: float = 1, **more: Any):
        units = hidden_units(expansion, width)
        self.shortcut, self.gamma = residual_weights(gamma)
        self.up, self.down = relu_slopes(c_plus, c_minus, width)
        self.pre, self.post = linear(width, units, **more), linear(units, width, **more)

    def __call__(self, X: Float[Array, "*batch n"]) -> Float[Array, "*batch n"]:
        """X′ of tokens X, (…, tokens, n)."""
        h = self.pre(X)
        # The slopes differ by O(1/√n), about the spacing of numbers in half precision.
        shaped = jnp.where(h > 0, self.up * wide(h), self.down * wide(h)).astype(h.dtype)
        return residual(self, X, self.post(shaped))


class ShapedTransformer(OfLayer, nnx.Module):
    """Shaped attention, then feed-forward, with one γ (Eq. 11) and the arguments of both modules."""

    layer_type = layers.ShapedTransformer

    def __init__(
        self, width: int, gamma: float, tau0: float, c_plus: float, c_minus: float, *, expansion: float = 1, **more: Any
    ):
        made = {name: more[name] for name in ("dtype", "param_dtype", "rngs") if name in more}
        self.attention = ShapedAttention(width, gamma, tau0, **more)
        self.feedforward = ShapedFeedForward(width, gamma, c_plus, c_minus, expansion=expansion, **made)

    def __call__(self, X: Float[Array, "*batch m n"], mask: Bool[Array, "..."] | None = None) -> Float[Array, "..."]:
        """X′ of tokens X, with the mask of `ShapedAttention`."""
        return self.feedforward(self.attention(X, mask))


def linear(fan_in: int, fan_out: int, **more: Any) -> nnx.Linear:
    """X W without a bias; the entries of W are at first independent N(0, 1/fan_in)."""
    drawn = nnx.initializers.normal(fan_in**-0.5)
    return nnx.Linear(fan_in, fan_out, use_bias=False, kernel_init=drawn, **more)


def gain(start: float, *, param_dtype: Any = jnp.float32, **_: Any) -> nnx.Param:
    """A parameter in float32 or above: at lower precision, numbers near 1 are too far apart for small steps."""
    return nnx.Param(wide(jnp.asarray(start, param_dtype)))


def residual(block: Any, X: Float[Array, "..."], Z: Float[Array, "..."]) -> Float[Array, "..."]:
    """λX + γZ in the type of X, rounded once: in half precision, λ near 1 would itself be 1."""
    return (block.shortcut * wide(X) + block.gamma * wide(Z)).astype(X.dtype)


def wide(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Numbers in float32, or in float64 if they are."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))
