"""A model as a stack of blocks: against what it was made of, and what no block has."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from helpers.internals import (
    activations_of_values,
    attended,
    base_of_rotations,
    factor_of_logits,
    network_of,
    norms_of_values,
    sink_of,
    stack_in,
    text_of,
    unlike_blocks,
)
from helpers.references import assert_agrees

import sdeinfer as si
from sdeinfer.blocks import MLP, Block, SelfAttention

TOKENS, WIDTH, HEADS, HEAD_SIZE = 5, 64, 4, 16
X = jr.normal(jr.key(3), (2, TOKENS, WIDTH))


def normed(x, kind="rms"):
    x = x - x.mean(-1, keepdims=True) if kind == "layer" else x
    return x / jnp.sqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-12)


def rotated(x, base, *, half=True):
    """Rotations of (..., tokens, d) as in Llama, or of neighbours as in GPT-J."""
    d = x.shape[-1]
    angle = jnp.arange(TOKENS)[:, None] * base ** (-jnp.arange(0, d, 2) / d)
    one, other = jnp.split(x, 2, -1) if half else (x[..., ::2], x[..., 1::2])
    a, b = one * jnp.cos(angle) - other * jnp.sin(angle), other * jnp.cos(angle) + one * jnp.sin(angle)
    return jnp.concatenate([a, b], -1) if half else jnp.stack([a, b], -1).reshape(x.shape)


class Layer(eqx.Module):
    """Attention with groups and rotations, and a gated MLP, with settings that no block has."""

    w: dict[str, jax.Array]
    faults: tuple[str, ...] = eqx.field(static=True)

    def __init__(self, key, *faults):
        kv, units = 2 * HEAD_SIZE, 3 * WIDTH
        sizes = {"q": (WIDTH, WIDTH), "k": (WIDTH, kv), "v": (WIDTH, kv), "o": (WIDTH, WIDTH)}
        sizes |= {"gate": (WIDTH, units), "up": (WIDTH, units), "down": (units, WIDTH), "more": (WIDTH, WIDTH)}
        keys = jr.split(key, len(sizes))
        self.w = {name: 0.5 * jr.normal(k, n) / n[0] ** 0.5 for k, (name, n) in zip(keys, sizes.items(), strict=True)}
        self.faults = faults

    def __call__(self, x):
        added = self.attention(1.5 * normed(x))
        if "parallel" in self.faults:
            return x + added + self.mlp(normed(x), normed(x))
        x = x + (normed(added) if "norm after" in self.faults else added)
        return x + 0.5 * self.mlp(normed(x), normed(x))

    def attention(self, u):
        def split(name):
            return jnp.moveaxis((u @ self.w[name]).reshape(*u.shape[:-1], -1, HEAD_SIZE), -2, -3)

        whole, k, v = split("q"), split("k"), split("v")
        q = whole
        if "norms of queries" in self.faults:
            q, k = normed(q), normed(k)
        if "norm of queries alone" in self.faults:
            q = normed(q)
        if "repeated first" in self.faults:
            k = jnp.repeat(k, 2, axis=-3)
        if "no rotation" not in self.faults:
            q, k = rotated(q, 500.0), rotated(k, 500.0)
        if "partial rotation" in self.faults:
            q = jnp.concatenate([q[..., :8], whole[..., 8:]], -1)
        k, v = (jnp.repeat(x, HEADS // x.shape[-3], axis=-3) for x in (k, v))
        logits = q @ k.mT / (2 * HEAD_SIZE**0.5)
        if "alibi" in self.faults:
            logits = logits - 0.3 * jnp.abs(jnp.arange(TOKENS)[:, None] - jnp.arange(TOKENS))
        if "cap" in self.faults:
            logits = 2 * jnp.tanh(logits / 2)
        causal = jnp.tril(jnp.ones((TOKENS, TOKENS), bool))
        P = jax.nn.softmax(jnp.where(causal, logits, -jnp.inf), axis=-1)
        mixed = jnp.moveaxis(P @ v, -3, -2).reshape(*u.shape[:-1], WIDTH)
        if "gate" in self.faults:
            mixed = mixed * jax.nn.sigmoid(u @ self.w["more"])
        return mixed @ self.w["o"]

    def mlp(self, u, again):
        """Reads a norm that is called twice."""
        function = (lambda z: z * jnp.abs(z)) if "activation" in self.faults else jax.nn.silu
        h = function(u @ self.w["gate"]) * (again @ self.w["up"])
        return h @ self.w["down"]


class Model(eqx.Module):
    layers: list[Layer]

    def __init__(self, *faults, of_last=()):
        self.layers = [Layer(key, *faults, *(of_last * (k == 1))) for k, key in enumerate(jr.split(jr.key(0), 2))]

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def test_blocks_are_those_of_the_model():
    model = Model()
    found = si.blocks.of(model, X)
    attention, mlp = found.layers

    def square(name):
        return float(jnp.mean(jnp.stack([jnp.square(layer.w[name]) for layer in model.layers])))

    gain, of_mlp = 1.5**2 * WIDTH * np.sqrt(square("q") * square("k")), WIDTH * square("gate")
    values, units = 1.5**2 * WIDTH * square("v"), 3 * WIDTH
    of_last = WIDTH * square("o") * values / gain, 0.25 * units * square("down") * square("up") / square("gate")
    strengths = np.sqrt(of_last)
    sizes = {"heads": HEADS, "key_value_heads": 2, "pattern": si.CAUSAL, "rope": 500.0}
    branches = SelfAttention(2.0, gain, **sizes), MLP(of_mlp, "silu", expansion=3.0, gated=True)
    expected = si.Stack(tuple(Block(b, g, norm="rms") for b, g in zip(branches, strengths, strict=True)))
    assert unlike_blocks(expected, found) == []
    np.testing.assert_allclose(attention.strength, strengths[0], rtol=1e-4)
    np.testing.assert_allclose(mlp.strength, strengths[1], rtol=1e-4)
    np.testing.assert_allclose([attention.branch.gain, mlp.branch.gain], [gain, of_mlp], rtol=1e-4)
    np.testing.assert_allclose(attention.branch.temperature, 2.0, rtol=1e-6)
    assert stack_in({"blocks": text_of(found), "causal": 1.0}) == found


@pytest.mark.parametrize(
    ("fact", "changes", "of_branch"),
    [
        ("norms of queries", {}, {"qk_norm": "head"}),
        ("cap", {}, {"cap": 2.0}),
        ("norm after", {"output_norm": "rms"}, {}),
    ],
)
def test_attention_of_today_is_read(fact, changes, of_branch):
    found, plain = (si.blocks.of(Model(*facts), X) for facts in ((fact,), ()))
    attention, mlp = plain.layers
    attention = dataclasses.replace(attention, **changes, branch=dataclasses.replace(attention.branch, **of_branch))
    assert unlike_blocks(si.Stack((attention, mlp)), found) == []
    assert len(unlike_blocks(plain, found)) == 1
    assert stack_in({"blocks": text_of(found), "causal": 1.0}) == found


def test_branches_beside_each_other_are_read():
    found, plain = (si.blocks.of(Model(*facts), X) for facts in (("parallel",), ()))
    assert isinstance(found, si.blocks.Parallel)
    assert unlike_blocks(si.blocks.Parallel(plain.layers), found) == []
    assert unlike_blocks(plain, found) == ["its layers are attention beside mlp, those declared attention and mlp"]
    assert stack_in({"blocks": text_of(found), "causal": 1.0}) == found


@pytest.mark.parametrize(
    ("faults", "message"),
    [
        (("norm of queries alone",), "layer 0, attention .layers.0.w.: has a norm of queries or of keys alone"),
        (("partial rotation",), "layer 0, attention .*: queries are changed in another way than by rotations"),
        (("alibi",), "layer 0, attention .*: its logits are not qkᵀ times a factor under a mask"),
        (("gate",), "layer 0, attention .*: "),
        (("activation",), "layer 0, mlp .*: its activation is none of si.blocks.ACTIVATIONS"),
    ],
)
def test_what_no_block_has_is_one_line(faults, message):
    with pytest.raises(si.InputError, match=f"^model: {message}"):
        si.blocks.of(Model(*faults), X)


def test_keys_may_be_repeated_before_they_are_turned():
    attention, _ = si.blocks.of(Model("repeated first"), X).layers
    np.testing.assert_allclose(attention.branch.temperature, 2.0, rtol=1e-6)
    assert attention.branch.groups == 2


def test_a_network_has_sizes_and_the_first_tokens():
    found = network_of(Model(), X)
    assert (found.depth, found.width) == (2, WIDTH)
    np.testing.assert_allclose(found.V0, np.einsum("pin,pjn->pij", X, X) / WIDTH, rtol=1e-6)


def test_layers_must_be_alike():
    with pytest.raises(si.InputError, match="model: layer 1, attention .*: rope None, where layer 0 has 500.0"):
        si.blocks.of(Model(of_last=("no rotation",)), X)


def test_a_recipe_declares_the_numbers():
    found = si.blocks.of(Model(), X, recipe={"*": 0.1})
    np.testing.assert_allclose([each.branch.gain for each in found.layers], [1.5**2 * WIDTH * 0.01, WIDTH * 0.01])
    np.testing.assert_allclose([each.strength for each in found.layers], [0.8, 0.05 * np.sqrt(3 * WIDTH)])


def test_differences_are_named():
    attention = Block(SelfAttention(heads=2, pattern=si.CAUSAL), norm="rms")
    other = Block(SelfAttention(heads=2), norm="layer")
    assert unlike_blocks(si.Stack((attention,)), si.Stack((other,))) == [
        "attention: norm layer, declared rms",
        "attention: mask None, declared causal",
    ]
    mlp = si.Stack((Block(MLP()),))
    assert unlike_blocks(si.Stack((attention,)), mlp) == ["its layers are mlp, those declared attention"]


@pytest.mark.parametrize("half", [True, False])
@pytest.mark.parametrize("base", [100.0, 10_000.0, 1e6])
def test_the_base_of_rotations(half, base):
    q = jr.normal(jr.key(0), (2, 3, TOKENS, HEAD_SIZE))
    assert base_of_rotations(np.asarray(q), np.asarray(rotated(q, base, half=half)), TOKENS) == base
    assert base_of_rotations(np.asarray(q), np.asarray(q[::-1]), TOKENS) is None


def test_values_show_activations_norms_and_masks():
    z = np.linspace(-3.0, 3.0, 50)
    assert [*activations_of_values(z, np.asarray(jax.nn.gelu(z, approximate=True)))] == ["gelu_tanh"]
    assert {*activations_of_values(z / 300, np.asarray(jax.nn.gelu(z / 300)))} == {"gelu", "gelu_tanh"}
    assert activations_of_values(z, z * np.abs(z)) == {}
    x = np.random.default_rng(0).standard_normal((6, 32))
    assert norms_of_values(x, 3.0 * np.asarray(normed(x))) == {"rms"}
    assert norms_of_values(x, np.asarray(normed(x, "layer"))) == {"layer"}
    assert norms_of_values(x, np.asarray(normed(x)) * np.linspace(1.0, 2.0, 32)) == set()
    logits = np.random.default_rng(1).standard_normal((2, 4, 4))
    P = np.tril(np.exp(logits))
    P /= P.sum(-1, keepdims=True)
    np.testing.assert_array_equal(attended(P), np.tri(4, dtype=bool))
    assert_agrees(factor_of_logits(P, 2 * logits, np.tri(4, dtype=bool)), 0.5)
    assert factor_of_logits(P, logits + np.arange(4), np.tri(4, dtype=bool)) is None
    assert attended(np.stack([P[0], P[1].T])) is None
    one_more = np.concatenate([P, np.ones((*P.shape[:-1], 1))], axis=-1)
    np.testing.assert_array_equal(attended(one_more), np.tri(4, dtype=bool))
    assert attended(np.concatenate([one_more, one_more[..., -1:]], axis=-1)) is None


def test_a_sink_has_one_logit_for_all_tokens():
    rng = np.random.default_rng(1)
    Y, mask = rng.standard_normal((2, 4, 4)), np.tri(4, dtype=bool)

    def probabilities(sinks):
        e = np.concatenate([np.exp(Y) * mask, np.exp(np.broadcast_to(sinks, (2, 4)))[..., None]], axis=-1)
        return e / e.sum(-1, keepdims=True)

    assert_agrees(sink_of(probabilities([[0.3], [0.5]]), Y, mask), 0.4)
    assert sink_of(probabilities(rng.standard_normal((2, 4))), Y, mask) is None
