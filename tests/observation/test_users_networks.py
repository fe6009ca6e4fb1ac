"""Networks that users would write, in their own library: from hidden states to a verdict.

Nothing of these layers is this package's: they are written down from Eq. 4, 9 and 11 anew, with four heads, an output
projection and a hidden layer four times as wide.
"""

import math
import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import pytest
from budget import assert_holds

import sdeinfer as si
from sdeinfer.layers import template

GAMMA, TAU0, C = 0.5, 1.0, 2.0
DEPTH, HEADS, EXPANSION = 16, 4, 4
TRUTH = {"gamma": GAMMA, "tau0": TAU0, "c_gap": 2 * C}


def inputs(width):
    """Three uncorrelated tokens of norm 1.7."""
    return 1.7 * math.sqrt(width) * jnp.linalg.qr(jr.normal(jr.key(9), (width, 3)))[0].T


def attend(q, k, v, temperature):
    """Heads first: (heads, tokens, width of a head)."""
    tokens = q.shape[1]
    share = jax.nn.softmax(jnp.einsum("htd,hsd->hts", q, k) / temperature, axis=-1)
    return jnp.einsum("hts,hsd->htd", jnp.eye(tokens) + share - 1 / tokens, v)


def kinked(h, width):
    up, down = 1 + C / math.sqrt(width), 1 - C / math.sqrt(width)
    return jnp.where(h > 0, up * h, down * h) * math.sqrt(2 / (up**2 + down**2))


class Linear(eqx.Module):
    weight: jax.Array

    def __init__(self, columns, rows, key):
        self.weight = jr.normal(key, (rows, columns)) / math.sqrt(columns)

    def __call__(self, X):
        return X @ self.weight.T


class EquinoxBlock(eqx.Module):
    query: Linear
    key: Linear
    value: Linear
    out: Linear
    up: Linear
    down: Linear

    def __init__(self, width, key):
        sizes = [(width, width)] * 4 + [(width, EXPANSION * width), (EXPANSION * width, width)]
        made = [Linear(*size, each) for size, each in zip(sizes, jr.split(key, 6), strict=True)]
        self.query, self.key, self.value, self.out, self.up, self.down = made

    def __call__(self, X):
        tokens, width = X.shape
        q, k, v = (part(X).reshape(tokens, HEADS, -1).swapaxes(0, 1) for part in (self.query, self.key, self.value))
        Z = attend(q, k, v, TAU0 * math.sqrt(width * width / HEADS))
        X = math.sqrt(1 - GAMMA**2) * X + GAMMA * self.out(Z.swapaxes(0, 1).reshape(tokens, width))
        return math.sqrt(1 - GAMMA**2) * X + GAMMA * self.down(kinked(self.up(X), width))


class EquinoxNetwork(eqx.Module):
    blocks: list[EquinoxBlock]

    def __init__(self, width, key):
        self.blocks = [EquinoxBlock(width, each) for each in jr.split(key, DEPTH)]


@pytest.mark.slow
def test_a_shaped_transformer_is_recovered():
    data = si.observe.equinox(
        lambda key: EquinoxNetwork(128, key),
        inputs(128),
        layers=lambda model: model.blocks,
        networks=256,
        key=jr.key(1),
    )
    kind = template("transformer", heads=HEADS, output_projection=True, expansion=EXPANSION)
    post = si.fit(si.models.full_path, data, architecture=kind, key=jr.key(3))
    found = si.check(post)
    draws = {name: post["posterior"][name].values for name in TRUTH}
    for name, true in TRUTH.items():
        print(f"\n{name}: {draws[name].mean():.4g} ± {draws[name].std():.2g}, {true:g}", end="")
        assert_holds(draws[name], true)
    print(f"\n{found.verdict}")
    assert found.passed


class GPTBlock(eqx.Module):
    """Pre-LN, as GPT-2 has it: softmax at 1/√n_k, no identity, GELU, residual branches added."""

    attention: eqx.nn.MultiheadAttention
    up: eqx.nn.Linear
    down: eqx.nn.Linear
    norms: tuple[eqx.nn.LayerNorm, eqx.nn.LayerNorm]

    def __init__(self, width, key):
        keys = jr.split(key, 3)
        self.attention = eqx.nn.MultiheadAttention(HEADS, width, key=keys[0])
        self.up = eqx.nn.Linear(width, EXPANSION * width, key=keys[1])
        self.down = eqx.nn.Linear(EXPANSION * width, width, key=keys[2])
        self.norms = (eqx.nn.LayerNorm(width), eqx.nn.LayerNorm(width))

    def __call__(self, X):
        normal = jax.vmap(self.norms[0])(X)
        X = X + self.attention(normal, normal, normal, mask=jnp.tril(jnp.ones((len(X), len(X)), bool)))
        hidden = jax.nn.gelu(jax.vmap(self.up)(jax.vmap(self.norms[1])(X)))
        return X + jax.vmap(self.down)(hidden)


@pytest.mark.slow
def test_a_vanilla_gpt_is_said_not_to_be_shaped():
    data = si.observe.equinox(
        lambda key: [GPTBlock(128, each) for each in jr.split(key, DEPTH)],
        inputs(128),
        layers=lambda blocks: blocks,
        networks=64,
        key=jr.key(4),
    )
    post = si.fit(si.models.full_path, data, architecture="transformer", key=jr.key(5))
    with warnings.catch_warnings():
        # ArviZ's, of importance weights that a wrong law does not allow.
        warnings.simplefilter("ignore")
        found = si.check(post)
    print(f"\n{found.verdict}")
    assert found.cause is not None
    assert found.cause.name == "misfit of the layers"
    assert "not layers of a shaped transformer" in found.cause.advice
