"""Bad arguments of blocks, of their networks and of their fits: one line that says what is wrong and where."""

import dataclasses
import functools

import jax.numpy as jnp
import jax.random as jr
import numpy as np
import numpyro.distributions as dist
import pytest
from helpers.budget import assert_mean
from helpers.cases import random_covariance

import sdeinfer as si
from sdeinfer.blocks import MLP, Block, Experts, LatentAttention, Parallel, SelfAttention
from sdeinfer.layers import OverDepth

LAYER = si.Stack((Block(SelfAttention(heads=2), 0.5, "layer"), Block(MLP(), 0.5, "layer")))
ATTENTION, OF_MLP = LAYER.layers
BESIDE = Block(SelfAttention(), norm="rms"), Block(MLP(), norm="rms")
DROPPING = Block(MLP(expansion=1.0), 0.5, bias=0.1, dropout=0.3)
SHAPED, THREE_HEADS, KEY = si.ShapedMLP(0.1, -0.1), Block(SelfAttention(heads=3)), jr.key(0)
V2, V3 = (np.asarray(random_covariance(tokens)) for tokens in (2, 3))


def sampled(layer=LAYER, V0=V3, sample=si.sample_branches, **change):
    return sample(layer, V0, **{"width": 16, "depth": 2, "networks": 2} | change, key=KEY)


@functools.cache
def data():
    return si.sample_branches(LAYER, V2, width=8, depth=1, key=KEY)


def fitted(*architecture, change=lambda data: data, **settings):
    architecture = si.Stack(architecture) if architecture else LAYER
    return si.fit(si.models.branches, change(data()), architecture=architecture, key=KEY, **settings)


def fitted_with(prior):
    return lambda: fitted(prior=prior)


WHOLE = "a whole number of at least 1 is needed, got 0"
REFUSED = [
    (lambda: Block(MLP(), norm="batch"), "norm: one of layer, rms, None is needed, got 'batch'"),
    (lambda: Block(MLP(), position="middle"), "position: 'pre' or 'post' is needed, got 'middle'"),
    (lambda: Block("mlp"), "branch: a branch is needed, as si.blocks.MLP.., got 'mlp'"),
    (lambda: Block(SHAPED), "branch: .* got ShapedMLP"),
    (lambda: Block(MLP(), bias=-1.0), "bias: the variance of the biases must not be negative, got -1"),
    (lambda: Block(MLP(), dropout=1.0), "dropout: a probability below 1 is needed, got 1"),
    (lambda: Block(MLP(), dropout="yes"), "dropout: .* got 'yes'"),
    (lambda: MLP(bias=float("nan")), "bias: .* got nan"),
    (lambda: SelfAttention(bias=float("inf")), "bias: .* got inf"),
    (lambda: MLP(activation="swish"), "activation: one of gelu, .* got 'swish'"),
    (lambda: MLP(expansion=0), "expansion: must be positive, got 0"),
    (lambda: SelfAttention(heads=0), f"heads: {WHOLE}"),
    (lambda: SelfAttention(head_size=0), f"head_size: {WHOLE}"),
    (lambda: SelfAttention(heads=4, key_value_heads=0), f"key_value_heads: {WHOLE}"),
    (lambda: SelfAttention(heads=6, key_value_heads=4), "key_value_heads: 6 heads are not a multiple of 4"),
    (lambda: SelfAttention(rope=1.0), "rope: a base above 1 is needed, got 1"),
    (lambda: SelfAttention(rope_size=2), "rope_size: an even number beside a base is needed, got 2"),
    (lambda: SelfAttention(rope=1e4, rope_size=3), "rope_size: an even number beside a base is needed, got 3"),
    (lambda: SelfAttention(rope=1e4, rope_size="half"), "rope_size: an even number .* got 'half'"),
    (lambda: SelfAttention(qk_norm="heads"), "qk_norm: one of head, all, None is needed, got 'heads'"),
    (lambda: SelfAttention(cap=0.0), "cap: a positive number is needed, got 0"),
    (lambda: SelfAttention(gate="yes"), "gate: a positive number is needed, got 'yes'"),
    (lambda: SelfAttention(sink="zero"), "sink: a number is needed, got 'zero'"),
    (lambda: MLP(offset="one"), "offset: a number is needed, got 'one'"),
    (lambda: MLP(gated=True, offset=float("nan")), "offset: a number is needed, got nan"),
    (lambda: LatentAttention(heads=0), f"heads: {WHOLE}"),
    (lambda: LatentAttention(head_size=0), f"head_size: {WHOLE}"),
    (lambda: LatentAttention(value_size=0), f"value_size: {WHOLE}"),
    (lambda: LatentAttention(key_rank=0), f"key_rank: {WHOLE}"),
    (lambda: LatentAttention(query_rank=0), f"query_rank: {WHOLE}"),
    (lambda: LatentAttention(rotated_size=3), "rotated_size: an even number is needed, got 3"),
    (lambda: LatentAttention(rotated_size="half"), "rotated_size: an even number is needed, got 'half'"),
    (lambda: LatentAttention(rope=1.0), "rope: a base above 1 is needed, got 1"),
    (lambda: LatentAttention(rope=None), "rope: a base above 1 is needed, got None"),
    (lambda: LatentAttention(rotated_gain="one"), "gain: .*needed"),
    (lambda: Experts(experts=0), f"experts: {WHOLE}"),
    (lambda: Experts(chosen=0), f"chosen: {WHOLE}"),
    (lambda: Experts(experts=4, chosen=5), "chosen: at most 4, the number of experts, is needed, got 5"),
    (lambda: Experts(scores="softmax"), "scores: one of chosen, all, sigmoid is needed, got 'softmax'"),
    (lambda: Experts(router=0.0), "router: a positive number is needed, got 0"),
    (lambda: Experts(scale=-1.0), "scale: a positive number is needed, got -1"),
    (lambda: Experts(shared=-1.0), "shared: a number of at least 0 is needed, got -1"),
    (lambda: Experts(activation="swish"), "activation: one of gelu, .* got 'swish'"),
    (lambda: Experts(expansion=0), "expansion: must be positive, got 0"),
    (lambda: Block(MLP(), output_norm="batch"), "output_norm: one of layer, rms, None is needed, got 'batch'"),
    (lambda: Block(MLP(), norm="rms", position="post", output_norm="rms"), "output_norm: a block with a norm after"),
    (lambda: Block(MLP(), output_norm="rms", output_gain="one"), "output_gain: .*needed"),
    (lambda: Parallel((BESIDE[0], SHAPED)), "layers: blocks with a norm before their branches .* got ShapedMLP"),
    (
        lambda: Parallel((Block(MLP(), norm="rms", position="post"),)),
        "layers: blocks with a norm before .* got a Block",
    ),
    (lambda: Parallel((Block(MLP(), output_norm="rms"),)), "layers: blocks with a norm before .* got a Block"),
    (lambda: Parallel((BESIDE[0], Block(MLP()))), "layers: blocks beside each other have one norm and one skip"),
    (lambda: Parallel((BESIDE[0], Block(MLP(), norm="rms", skip=0.5))), "layers: .* one norm and one skip"),
    (lambda: Block(MLP(), "large"), "strength: .*needed"),
    (lambda: MLP(gain="one"), "gain: .*needed"),
    (lambda: SelfAttention(temperature="one"), "temperature: .*needed"),
    # Networks.
    (lambda: sampled(THREE_HEADS), "heads: the width 16 is not a multiple of 3; or give head_size"),
    (lambda: sampled(THREE_HEADS, sample=si.sample_networks), "heads: the width 16 is not a multiple of 3"),
    (lambda: sampled(OverDepth(THREE_HEADS, strength=lambda t: 1 + t)), "heads: the width 16 is not a multiple of 3"),
    (lambda: sampled(Block(SelfAttention(head_size=5, rope=1e4))), "rope: rotations need an even head_size, got 5"),
    (lambda: sampled(Block(MLP(expansion=0.01))), "expansion: 0.01 times a width of 16 is less than one hidden unit"),
    (lambda: sampled(Block(SelfAttention(rope=1e4, rope_size=32))), "rope_size: at most 16, the features of a head"),
    (lambda: sampled(Block(Experts(expansion=0.01))), "expansion: 0.01 times a width of 16 is less than one hidden"),
    (lambda: sampled(Block(Experts(shared=0.01))), "expansion: 0.01 times a width of 16 is less than one hidden unit"),
    (
        lambda: sampled(Parallel((THREE_HEADS,)), sample=si.sample_networks),
        "heads: the width 16 is not a multiple of 3",
    ),
    (lambda: sampled(width=2), "width: at least 3, the number of tokens, is needed, got 2"),
    (lambda: sampled(depth=0), f"depth: {WHOLE}"),
    (lambda: sampled(networks=0), f"networks: {WHOLE}"),
    (lambda: sampled("transformer"), "layer: a layer, as .* is needed, got 'transformer'"),
    (lambda: sampled(SHAPED), "architecture: a si.blocks.Block, or a si.Stack of blocks, is needed"),
    (lambda: sampled(si.Stack((OF_MLP, SHAPED))), "architecture: a si.blocks.Block, or a si.Stack of blocks"),
    (lambda: sampled(V0=-np.eye(3)), "V0: "),
    # Fits.
    (
        lambda: si.fit(si.models.branches, data(), key=KEY),
        "architecture: a si.blocks.Block, or a si.Stack of the blocks of a layer, is needed",
    ),
    (lambda: fitted(ATTENTION, SHAPED), "architecture: a si.blocks.Block, or a si.Stack of blocks, is needed"),
    (lambda: fitted(OF_MLP, ATTENTION), "architecture: branch 0 is of kind 'attention' in the data, and 'mlp' in the"),
    (lambda: fitted(ATTENTION, ATTENTION), "architecture: branch 1 is of kind 'mlp' in the data, and 'attention'"),
    (lambda: fitted(THREE_HEADS, OF_MLP), "heads: the width 8 is not a multiple of 3"),
    (
        fitted_with({"strength": 1.0}),
        "prior: attention and mlp samples attention.strength, .*got a prior of 'strength'",
    ),
    (fitted_with({"mlp.gain": 0.0}), "prior: mlp.gain: a fixed value must be between 0 and inf, ends excluded, got 0"),
    (
        fitted_with({"attention.temperature": "free"}),
        "prior: attention.temperature: a NumPyro distribution or a number is needed, got 'free'",
    ),
    (
        fitted_with({"mlp.strength": dist.LogNormal(jnp.zeros(2), 1.0)}),
        "prior: mlp.strength: a distribution of one number is needed, got shape",
    ),
    (
        fitted_with({"mlp.gain": dist.Normal(0.0, 1.0)}),
        "prior: mlp.gain must be greater than 0 and finite; Normal is on",
    ),
    (lambda: fitted(change=lambda data: data.drop_vars("increment")), "data: .* takes increments of branches"),
    (lambda: fitted(change=lambda data: data.drop_vars("cross")), "data: no variable `cross`"),
    (
        lambda: fitted(change=lambda data: data.assign(increment=-data["increment"])),
        "increment: network 0, branch 0 .attention.0.: ",
    ),
    (lambda: fitted(draws=0), "draws: "),
    # Dropout.
    (
        lambda: sampled(DROPPING, sample=si.sample_networks),
        "dropout: the chain has none: use method='weights', got 0.3",
    ),
    (lambda: sampled(Parallel((DROPPING,)), sample=si.sample_networks), "dropout: the chain has none: use method="),
    (
        lambda: fitted(ATTENTION, DROPPING),
        "dropout: the density of increments has none: observe networks in evaluat",
    ),
]


@pytest.mark.parametrize(("call", "message"), REFUSED, ids=lambda each: each if isinstance(each, str) else "")
@pytest.mark.usefixtures("unchecked")
def test_one_line_says_what_is_wrong(call, message):
    with pytest.raises(ValueError, match=message) as raised:
        call()
    assert "\n" not in str(raised.value)


def test_dropout_sets_a_share_of_the_increments_of_networks_with_weights_to_zero(key):
    X = jr.normal(key, (30, 200))
    D, kept = (each.increment(X, key=key) for each in (dataclasses.replace(DROPPING, dropout=0.0), DROPPING))
    np.testing.assert_allclose(kept, np.where(kept == 0, 0.0, D / 0.7))
    assert_mean(np.asarray(kept == 0).ravel(), 0.3)
