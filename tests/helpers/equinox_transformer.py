"""A small Pre-LN Transformer in Equinox, with the default initialisation of `equinox.nn.Linear` and without biases."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr

import sdeinfer as si
from sdeinfer.blocks import MLP, Block, SelfAttention

WIDTH, HEADS, LAYERS, TOKENS = 32, 4, 3, 3
RECIPE = si.audit.recipes.pytorch_linear(biases=False)


class Layer(eqx.Module):
    norm1: eqx.nn.LayerNorm
    attn: eqx.nn.MultiheadAttention
    norm2: eqx.nn.LayerNorm
    mlp: eqx.nn.MLP

    def __init__(self, width, key):
        key_attention, key_mlp = jr.split(key)
        self.norm1, self.norm2 = eqx.nn.LayerNorm(width), eqx.nn.LayerNorm(width)
        self.attn = eqx.nn.MultiheadAttention(HEADS, width, key=key_attention)
        self.mlp = eqx.nn.MLP(
            width, width, 4 * width, 1, jax.nn.gelu, use_bias=False, use_final_bias=False, key=key_mlp
        )

    def __call__(self, x):
        u = jax.vmap(self.norm1)(x)
        x = x + self.attn(u, u, u, mask=jnp.tril(jnp.ones((len(x), len(x)), bool)))
        return x + jax.vmap(self.mlp)(jax.vmap(self.norm2)(x))


class Transformer(eqx.Module):
    layers: list[Layer]

    def __init__(self, key, *, width=WIDTH, layers=LAYERS):
        self.layers = [Layer(width, own) for own in jr.split(key, layers)]

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def blocks():
    """Its blocks; strengths are those of the recipe."""
    attention = SelfAttention(heads=HEADS, pattern=si.CAUSAL)
    mlp = MLP(activation="gelu_tanh", expansion=4)
    return si.Stack((Block(attention, norm="layer"), Block(mlp, norm="layer")))


def prompt(width=WIDTH):
    return jr.normal(jr.key(9), (TOKENS, width))


def copied(key):
    """The first layer in the place of all."""
    network = Transformer(key)
    return eqx.tree_at(lambda each: each.layers, network, [network.layers[0]] * LAYERS)
