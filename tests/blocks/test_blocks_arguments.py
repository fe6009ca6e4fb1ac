"""Blocks that cannot be, and data or priors that do not fit them: one line that names the argument."""

from functools import partial

import jax.random as jr
import numpy as np
import numpyro.distributions as dist
import pytest

import sdeinfer as si
from sdeinfer import blocks

KEY = jr.key(0)
V0 = np.eye(2)
MLP = blocks.Block(blocks.MLP(expansion=0.5), strength=0.5)
ATTENTION = blocks.Block(blocks.SelfAttention(heads=2), strength=0.5, norm="rms")
BOTH = si.Stack((ATTENTION, MLP))
SHAPED = si.ShapedMLP(c_plus=0.2, c_minus=-1.2)


@pytest.fixture(scope="module")
def data():
    """Four branches of one network."""
    return si.sample_branches(BOTH, V0, width=8, depth=2, key=jr.key(1))


attention, mlp, block = blocks.SelfAttention, blocks.MLP, partial(blocks.Block, blocks.MLP())
REFUSED_BLOCKS = [
    (lambda: blocks.Block("mlp"), "branch: a branch is needed, as si.blocks.MLP.., got 'mlp'"),
    (lambda: blocks.Block(MLP), "branch: a branch is needed, as si.blocks.MLP.., got a Block"),
    (lambda: block(norm="batch"), "norm: one of layer, rms, None is needed, got 'batch'"),
    (lambda: block(position="middle"), "position: 'pre' or 'post' is needed, got 'middle'"),
    (lambda: block(bias=-0.1), "bias: the variance of the biases must not be negative, got -0.1"),
    (lambda: block(bias=np.inf), "bias: the variance of the biases must not be negative, got inf"),
    (lambda: block(bias="no"), "bias: the variance of the biases must not be negative, got 'no'"),
    (lambda: block(strength=0.0), "strength: "),
    (lambda: block(strength="strong"), "strength: a real scalar is needed, got 'strong'"),
    (lambda: mlp(activation="swish"), "activation: one of gelu, .* or a function is needed, got 'swish'"),
    (lambda: mlp(activation=3), "activation: one of gelu, .* or a function is needed, got 3"),
    (lambda: mlp(gain=-1.0), "gain: "),
    (lambda: mlp(expansion=0.0), "expansion: "),
    (lambda: mlp(expansion="four"), "expansion: .* got 'four'"),
    (lambda: mlp(bias=-1.0), "bias: "),
    (lambda: attention(temperature=0.0), "temperature: "),
    (lambda: attention(gain=0.0), "gain: "),
    (lambda: attention(heads=0), "heads: a whole number of at least 1 is needed, got 0"),
    (lambda: attention(heads=2.5), "heads: a whole number of at least 1 is needed, got 2.5"),
    (lambda: attention(head_size=0), "head_size: a whole number of at least 1 is needed, got 0"),
    (lambda: attention(heads=4, key_value_heads=3), "key_value_heads: 4 heads are not a multiple of 3"),
    (lambda: attention(key_value_heads=0), "key_value_heads: a whole number of at least 1 is needed, got 0"),
    (lambda: attention(rope=1.0), "rope: a base above 1 is needed, got 1.0"),
    (lambda: attention(rope="yes"), "rope: a base above 1 is needed, got 'yes'"),
    (lambda: attention(bias=-1.0), "bias: "),
]

networks = partial(si.sample_branches, V0=V0, width=8, depth=2, key=KEY)
chain = partial(si.sample_networks, V0=V0, width=8, depth=2, networks=2, key=KEY)
REFUSED_NETWORKS = [
    (lambda: networks(SHAPED), "architecture: a si.blocks.Block, or a si.Stack of blocks, is needed"),
    (lambda: networks(si.Stack((MLP, SHAPED))), "architecture: a si.blocks.Block, or a si.Stack of blocks"),
    (lambda: networks("mlp"), "layer: a layer"),
    (lambda: networks(MLP, depth=0), "depth: at least 1"),
    (lambda: networks(MLP, networks=0), "networks: at least 1"),
    (lambda: networks(ATTENTION, V0=np.eye(3), width=2), "width: at least 3, the number of tokens, is needed, got 2"),
    (lambda: networks(MLP, V0=-np.eye(2)), "V0: "),
    (lambda: networks(blocks.Block(attention(heads=3))), "heads: the width 8 is not a multiple of 3"),
    (lambda: chain(blocks.Block(attention(heads=3))), "heads: the width 8 is not a multiple of 3"),
    (
        lambda: networks(blocks.Block(attention(head_size=3, rope=10.0))),
        "rope: rotations need an even head_size, got 3",
    ),
    (lambda: chain(blocks.Block(attention(head_size=3, rope=10.0))), "rope: rotations need an even head_size, got 3"),
]

fit = partial(si.fit, si.models.branches, key=KEY)
REFUSED_FITS = [
    (lambda data: fit(data), "architecture: a si.blocks.Block, or a si.Stack of the blocks of a layer, is needed"),
    (lambda data: fit(data, architecture="transformer"), "architecture: a si.blocks.Block, or a si.Stack"),
    (lambda data: fit(data, architecture=blocks.Block), "architecture: a si.blocks.Block, or a si.Stack"),
    (lambda data: fit(data, architecture=SHAPED), "architecture: a si.blocks.Block, or a si.Stack of blocks"),
    (lambda data: fit(data, architecture=MLP), "architecture: branch 0 is of kind 'attention' in the data, and 'mlp'"),
    (
        lambda data: fit(data, architecture=si.Stack((ATTENTION, ATTENTION, MLP))),
        "architecture: branch 1 is of kind 'mlp' in the data, and 'attention' in the architecture: give the blocks in "
        "the order of the branches",
    ),
    (lambda data: fit(data.drop_vars("increment"), architecture=BOTH), "data: branches takes increments of branches"),
    (
        lambda data: fit(si.covariance_dataset(np.arange(1.0, 7).reshape(2, 3, 1, 1) * V0, width=8), architecture=BOTH),
        "data: branches takes increments of branches, as of si.observe_branches",
    ),
    (lambda data: fit(data.drop_vars("kind"), architecture=BOTH), "kind: a coordinate on branch is needed"),
    (
        lambda data: fit(data, architecture=BOTH, prior={"gamma": 0.5}),
        "prior: attention and mlp samples attention.strength, .*; got a prior of 'gamma'",
    ),
    (lambda data: fit(data, architecture=BOTH, prior={"mlp.temperature": 1.0}), "got a prior of 'mlp.temperature'"),
    (lambda data: fit(data, architecture=BOTH, prior={"mlp.strength": -1.0}), "prior: mlp.strength: a fixed value"),
    (lambda data: fit(data, architecture=BOTH, prior={"mlp.strength": "some"}), "prior: mlp.strength: a NumPyro"),
    (
        lambda data: fit(data, architecture=BOTH, prior={"mlp.gain": dist.Normal()}),
        "prior: mlp.gain must be greater than 0",
    ),
    (
        lambda data: fit(data, architecture=BOTH, prior={"mlp.gain": 100.0}),
        "prior: mlp.gain: a fixed value must be within a factor of 32 of the architecture's 1, got 100",
    ),
    (lambda data: fit(data, architecture=BOTH, draws=0), "draws: "),
    (lambda data: fit(data, architecture=BOTH, sampler=si.NUTS), "sampler: a sampler"),
]


def assert_refused(call, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}|{message}") as caught:
        call()
    assert "\n" not in str(caught.value)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(("call", "message"), REFUSED_BLOCKS, ids=[message[:40] for _, message in REFUSED_BLOCKS])
def test_blocks_that_cannot_be(call, message):
    assert_refused(call, message)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(("call", "message"), REFUSED_NETWORKS, ids=[message[:40] for _, message in REFUSED_NETWORKS])
def test_networks_that_cannot_be(call, message):
    assert_refused(call, message)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(("call", "message"), REFUSED_FITS, ids=[message[:40] for _, message in REFUSED_FITS])
def test_fits_that_cannot_be(call, message, data):
    assert_refused(lambda: call(data), message)


def test_functions_are_activations_and_width_may_be_free_of_heads():
    assert blocks.MLP(activation=np.cos).activation is np.cos
    blocks.Block(blocks.SelfAttention(heads=3, head_size=2)).check_width(8)
