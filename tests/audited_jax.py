"""A Transformer each of Flax (NNX) and Equinox, and bugs in their initialisation, before and after the fix."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from audited import bug
from flax import nnx

import sdeinfer as si

WIDTH, LAYERS, HEADS = 256, 6, 4
SIZE = WIDTH // HEADS
LECUN, KAIMING = si.audit.recipes.lecun(), si.audit.recipes.kaiming("linear")
ATTENTION, MLP = si.blocks.SelfAttention(heads=HEADS), si.blocks.MLP(activation="gelu_tanh")
BLOCKS = si.Stack(tuple(si.blocks.Block(each, norm="layer") for each in (ATTENTION, MLP)))
OF_BOTH = {"inputs": jr.normal(jr.key(1), (4, WIDTH)), "architecture": BLOCKS}


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
    def __init__(self, seed, init, scale=SIZE**-0.5):
        rngs = nnx.Rngs(seed)
        self.layers = nnx.List([FlaxLayer(init, scale, rngs) for _ in range(LAYERS)])

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


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
        x = x + self.attention(jax.nn.standardize(x, epsilon=0.0))
        return x + self.mlp(jax.nn.standardize(x, epsilon=0.0))


class EquinoxTransformer(eqx.Module):
    layers: list[EquinoxLayer]

    def __init__(self, seed, mode="fan_in", qkv_fan=WIDTH, scale=SIZE**-0.5):
        def drawn(key, *shape, fan=None):
            fan = fan or (shape[1] if mode == "fan_in" else shape[0])
            return jr.normal(key, shape) * fan**-0.5

        self.layers = []
        for key in jr.split(jr.key(seed), LAYERS):
            keys = jr.split(key, 4)
            qkv = drawn(keys[0], 3, HEADS, SIZE, WIDTH, fan=qkv_fan)
            attention = EquinoxAttention(qkv, drawn(keys[1], WIDTH, WIDTH), scale)
            mlp = EquinoxMLP(drawn(keys[2], 4 * WIDTH, WIDTH), drawn(keys[3], WIDTH, 4 * WIDTH))
            self.layers.append(EquinoxLayer(attention, mlp))

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


@bug("Equinox", "vballoli/nfnets-pytorch/issues/30", KAIMING, "fan_in and fan_out are exchanged", **OF_BOTH)
def kaiming_mode(fixed, seed):
    """Kaiming's mode is fan_out in place of fan_in"""
    return EquinoxTransformer(seed, mode="fan_in" if fixed else "fan_out")


@bug("Flax", "llm-random/llm-random/pull/508", LECUN, "the variance is taken for the standard deviation", **OF_BOTH)
def variance_as_sd(fixed, seed):
    """the variance is taken for the standard deviation"""

    def init(key, shape, dtype, **_):
        return jr.normal(key, shape, dtype) * shape[0] ** (-0.5 if fixed else -1.0)

    return FlaxTransformer(seed, init)


@bug("Flax", "keras-team/keras/issues/8048", LECUN, "a normal law that is cut off at two standard devi", **OF_BOTH)
def truncated(fixed, seed):
    """a normal law is cut off at 2 standard deviations, without a correction"""
    kept = 0.87962566 if fixed else 1.0

    def init(key, shape, dtype, **_):
        return jr.truncated_normal(key, -2, 2, shape, dtype) * shape[0] ** -0.5 / kept

    return FlaxTransformer(seed, init)


@bug("Flax", "PAIR-code/tiny-transformers/issues/71", LECUN, "1/√d_k of the logits is missing", **OF_BOTH)
def logits_not_scaled(fixed, seed):
    """logits are not divided by √d_k"""
    return FlaxTransformer(seed, nnx.initializers.lecun_normal(), SIZE**-0.5 if fixed else 1.0)


@bug("Equinox", "omihub777/ViT-CIFAR/pull/11", LECUN, "logits are divided by √n in place of √d_k", **OF_BOTH)
def logits_over_width(fixed, seed):
    """logits are divided by √n in place of √d_k"""
    return EquinoxTransformer(seed, scale=(SIZE if fixed else WIDTH) ** -0.5)


@bug("Equinox", "clankur/einygpt/pull/3", LECUN, "query, key and value matrices: fan_in is that of one", **OF_BOTH)
def fan_of_a_head(fixed, seed):
    """queries, keys and values have the fan_in of one head"""
    return EquinoxTransformer(seed, qkv_fan=WIDTH if fixed else SIZE)
