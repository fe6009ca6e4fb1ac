"""A Transformer each of Flax (NNX) and Equinox, and bugs in their initialisation, before and after the fix."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from flax import nnx

import sdeinfer as si

WIDTH, LAYERS, HEADS = 256, 6, 4
TOKENS = jr.normal(jr.key(1), (4, WIDTH))
BLOCKS = si.Stack(
    (
        si.blocks.Block(si.blocks.SelfAttention(heads=HEADS), norm="layer"),
        si.blocks.Block(si.blocks.MLP(activation="gelu_tanh"), norm="layer"),
    )
)
"""The blocks of both."""


class FlaxAttention(nnx.Module):
    def __init__(self, init, scale, rngs):
        self.scale = scale
        self.qkv = nnx.List([nnx.Linear(WIDTH, WIDTH, use_bias=False, kernel_init=init, rngs=rngs) for _ in range(3)])
        self.out = nnx.Linear(WIDTH, WIDTH, use_bias=False, kernel_init=init, rngs=rngs)

    def __call__(self, x):
        q, k, v = (each(x).reshape(len(x), HEADS, -1) for each in self.qkv)
        weights = jax.nn.softmax(self.scale * jnp.einsum("ahd,bhd->hab", q, k))
        return self.out(jnp.einsum("hab,bhd->ahd", weights, v).reshape(x.shape))


class FlaxMLP(nnx.Module):
    def __init__(self, init, rngs):
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, use_bias=False, kernel_init=init, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, use_bias=False, kernel_init=init, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.gelu(self.up(x)))


class FlaxLayer(nnx.Module):
    def __init__(self, init, scale, rngs):
        self.attention, self.mlp = FlaxAttention(init, scale, rngs), FlaxMLP(init, rngs)
        self.norms = nnx.List([nnx.LayerNorm(WIDTH, rngs=rngs) for _ in range(2)])

    def __call__(self, x):
        x = x + self.attention(self.norms[0](x))
        return x + self.mlp(self.norms[1](x))


class FlaxTransformer(nnx.Module):
    def __init__(self, seed, init, scale=(WIDTH // HEADS) ** -0.5):
        rngs = nnx.Rngs(seed)
        self.layers = nnx.List([FlaxLayer(init, scale, rngs) for _ in range(LAYERS)])

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def variance_as_sd(seed, fixed):
    return FlaxTransformer(
        seed, lambda key, shape, dtype, **_: jr.normal(key, shape, dtype) * (shape[0] ** (-0.5 if fixed else -1.0))
    )


def truncated(seed, fixed):
    kept = 0.87962566 if fixed else 1.0
    return FlaxTransformer(
        seed, lambda key, shape, dtype, **_: jr.truncated_normal(key, -2, 2, shape, dtype) * shape[0] ** -0.5 / kept
    )


def logits_not_scaled(seed, fixed):
    scale = (WIDTH // HEADS) ** -0.5 if fixed else 1.0
    return FlaxTransformer(seed, nnx.initializers.lecun_normal(), scale)


class EquinoxAttention(eqx.Module):
    qkv: jax.Array
    out: jax.Array
    scale: float

    def __call__(self, x):
        q, k, v = jnp.einsum("te,khde->kthd", x, self.qkv)
        weights = jax.nn.softmax(self.scale * jnp.einsum("ahd,bhd->hab", q, k))
        return jnp.einsum("hab,bhd->ahd", weights, v).reshape(x.shape) @ self.out.T


class EquinoxMLP(eqx.Module):
    up: jax.Array
    down: jax.Array

    def __call__(self, x):
        return jax.nn.gelu(x @ self.up.T) @ self.down.T


class EquinoxLayer(eqx.Module):
    attention: EquinoxAttention
    mlp: EquinoxMLP

    def __call__(self, x):
        x = x + self.attention(normed(x))
        return x + self.mlp(normed(x))


class EquinoxTransformer(eqx.Module):
    layers: list[EquinoxLayer]

    def __init__(self, seed, mode="fan_in", qkv_fan=WIDTH, scale=(WIDTH // HEADS) ** -0.5):
        def drawn(key, *shape, fan=None):
            fan = fan or (shape[1] if mode == "fan_in" else shape[0])
            return jr.normal(key, shape) * fan**-0.5

        self.layers = []
        for key in jr.split(jr.key(seed), LAYERS):
            keys = jr.split(key, 4)
            qkv = drawn(keys[0], 3, HEADS, WIDTH // HEADS, WIDTH, fan=qkv_fan)
            attention = EquinoxAttention(qkv, drawn(keys[1], WIDTH, WIDTH), scale)
            mlp = EquinoxMLP(drawn(keys[2], 4 * WIDTH, WIDTH), drawn(keys[3], WIDTH, 4 * WIDTH))
            self.layers.append(EquinoxLayer(attention, mlp))

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def normed(x):
    x = x - x.mean(-1, keepdims=True)
    return x / jnp.sqrt(jnp.square(x).mean(-1, keepdims=True))


def kaiming_mode(seed, fixed):
    return EquinoxTransformer(seed, mode="fan_in" if fixed else "fan_out")


def fan_of_a_head(seed, fixed):
    return EquinoxTransformer(seed, qkv_fan=WIDTH if fixed else WIDTH // HEADS)


def logits_over_width(seed, fixed):
    return EquinoxTransformer(seed, scale=(WIDTH // HEADS if fixed else WIDTH) ** -0.5)
