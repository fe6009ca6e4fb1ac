"""Bad arguments of blocks, of their networks and of their fits: one line that says what is wrong and where."""

import dataclasses

import jax.numpy as jnp
import jax.random as jr
import numpy as np
import numpyro.distributions as dist
import pytest
from budget import assert_mean
from conftest import random_covariance

import sdeinfer as si
from sdeinfer.blocks import MLP, Block, SelfAttention
from sdeinfer.layers import OverDepth

LAYER = si.Stack((Block(SelfAttention(heads=2), 0.5, "layer"), Block(MLP(), 0.5, "layer")))
"""Whose branches are of kinds attention, mlp."""


def assert_refused(call, match: str, error: type[Exception] = ValueError) -> None:
    """The message is one line, with a part that matches."""
    with pytest.raises(error, match=match) as raised:
        call()
    assert "\n" not in str(raised.value)


BAD_BLOCKS = {
    "norm: one of layer, rms, None is needed, got 'batch'": lambda: Block(MLP(), norm="batch"),
    "position: 'pre' or 'post' is needed, got 'middle'": lambda: Block(MLP(), position="middle"),
    "branch: a branch is needed, as si.blocks.MLP.., got 'mlp'": lambda: Block("mlp"),
    "branch: .* got ShapedMLP": lambda: Block(si.ShapedMLP(0.1, -0.1)),
    "bias: the variance of the biases must not be negative, got -1": lambda: Block(MLP(), bias=-1.0),
    "dropout: a probability below 1 is needed, got 1": lambda: Block(MLP(), dropout=1.0),
    "dropout: .* got -0.1": lambda: Block(MLP(), dropout=-0.1),
    "dropout: .* got 'yes'": lambda: Block(MLP(), dropout="yes"),
    "bias: .* got nan": lambda: MLP(bias=float("nan")),
    "bias: .* got inf": lambda: SelfAttention(bias=float("inf")),
    "bias: .* got 'yes'": lambda: MLP(bias="yes"),
    "activation: one of gelu, .* got 'swish'": lambda: MLP(activation="swish"),
    "activation: .* got 3": lambda: MLP(activation=3),
    "expansion: must be positive, got 0": lambda: MLP(expansion=0),
    "expansion: must be positive, got inf": lambda: MLP(expansion=float("inf")),
    "expansion: must be positive, got '4'": lambda: MLP(expansion="4"),
    "heads: a whole number of at least 1 is needed, got 0": lambda: SelfAttention(heads=0),
    "head_size: a whole number of at least 1 is needed, got 0": lambda: SelfAttention(head_size=0),
    "key_value_heads: a whole number of at least 1 is needed, got 0": lambda: SelfAttention(heads=4, key_value_heads=0),
    "key_value_heads: 6 heads are not a multiple of 4": lambda: SelfAttention(heads=6, key_value_heads=4),
    "key_value_heads: 2 heads are not a multiple of 4": lambda: SelfAttention(heads=2, key_value_heads=4),
    "rope: a base above 1 is needed, got 1": lambda: SelfAttention(rope=1.0),
    "rope: a base above 1 is needed, got 'yes'": lambda: SelfAttention(rope="yes"),
    "strength: .*needed": lambda: Block(MLP(), "large"),
    "gain: .*needed": lambda: MLP(gain="one"),
    "temperature: .*needed": lambda: SelfAttention(temperature="one"),
}


@pytest.mark.parametrize("match", BAD_BLOCKS)
def test_blocks(match, unchecked):
    assert_refused(BAD_BLOCKS[match], match)


BAD_WIDTHS = {
    "heads: the width 16 is not a multiple of 3; or give head_size": (SelfAttention(heads=3), 16),
    "rope: rotations need an even head_size, got 5": (SelfAttention(head_size=5, rope=1e4), 16),
    "rope: rotations need an even head_size, got 3": (SelfAttention(heads=2, rope=1e4), 6),
    "expansion: 0.01 times a width of 16 is less than one hidden unit": (MLP(expansion=0.01), 16),
}


@pytest.mark.parametrize("match", BAD_WIDTHS)
@pytest.mark.parametrize("sample", [si.sample_branches, si.sample_networks])
def test_widths(match, sample):
    branch, width = BAD_WIDTHS[match]
    more = {"networks": 2, "key": jr.key(0)}
    layer, V0 = si.Stack((Block(MLP(), norm="rms"), Block(branch))), random_covariance(2)
    assert_refused(lambda: sample(layer, V0, width=width, depth=1, **more), match)
    over_depth = OverDepth(layer.layers[1], strength=lambda t: 1 + t)
    assert_refused(lambda: sample(over_depth, V0, width=width, depth=1, **more), match)


BAD_NETWORKS = {
    "width: at least 3, the number of tokens, is needed, got 2": {"width": 2},
    "width: a whole number of at least 1 is needed, got 0": {"width": 0},
    "depth: a whole number of at least 1 is needed, got 0": {"depth": 0},
    "depth: a whole number is needed, got 2.5": {"depth": 2.5},
    "layer: a layer, as .* is needed, got 'transformer'": {"layer": "transformer"},
    "architecture: a si.blocks.Block, or a si.Stack of blocks, is needed": {"layer": si.ShapedMLP(0.1, -0.1)},
    "V0: ": {"V0": -np.eye(3)},
}


@pytest.mark.parametrize("match", BAD_NETWORKS)
def test_networks(match, unchecked):
    given = {"layer": LAYER, "V0": np.asarray(random_covariance(3)), "width": 16, "depth": 2} | BAD_NETWORKS[match]
    assert_refused(lambda: si.sample_branches(given.pop("layer"), given.pop("V0"), **given, key=jr.key(0)), match)


def test_number_of_networks_and_stacks_with_other_layers(unchecked):
    V0 = random_covariance(3)
    few = "networks: a whole number of at least 1 is needed, got 0"
    assert_refused(lambda: si.sample_branches(LAYER, V0, width=16, depth=1, networks=0, key=jr.key(0)), few)
    mixed = si.Stack((Block(MLP()), si.ShapedMLP(0.1, -0.1)))
    needed = "architecture: a si.blocks.Block, or a si.Stack of blocks"
    assert_refused(lambda: si.sample_branches(mixed, V0, width=16, depth=1, key=jr.key(0)), needed)


def test_dropout_is_of_networks_with_weights(key):
    """A share p of the increments' entries is 0, and neither the chain nor a density has it."""
    V0, without = random_covariance(3), Block(MLP(expansion=1.0), 0.5, bias=0.1)
    dropping = dataclasses.replace(without, dropout=0.3)
    X = jr.normal(key, (3, 2_000))
    D, kept = (block.increment(X, key=key) for block in (without, dropping))
    np.testing.assert_allclose(kept, np.where(kept == 0, 0.0, D / 0.7))
    assert_mean(np.asarray(kept == 0).ravel(), 0.3)
    chain = "dropout: the chain has none: use method='weights', got 0.3"
    assert_refused(lambda: si.sample_networks(dropping, V0, width=16, depth=1, networks=2, key=key), chain)
    density = "dropout: the density of increments has none: observe networks in evaluation mode, got 0.3"
    branches = si.sample_branches(dropping, V0, width=16, depth=1, key=key)
    assert_refused(lambda: si.fit(si.models.branches, branches, architecture=dropping, key=key), density)


@pytest.fixture(scope="module")
def data():
    return si.sample_branches(LAYER, random_covariance(2), width=8, depth=1, key=jr.key(0))


BAD_ARCHITECTURES = {
    "architecture: a si.blocks.Block, or a si.Stack of the blocks of a layer, is needed": (None, "transformer"),
    "architecture: a si.blocks.Block, or a si.Stack of blocks, is needed": (
        si.ShapedMLP(0.1, -0.1),
        si.Stack((LAYER.layers[0], si.ShapedMLP(0.1, -0.1))),
    ),
    "architecture: branch 0 is of kind 'attention' in the data, and 'mlp' in the architecture": (
        LAYER.layers[1],
        si.Stack(LAYER.layers[::-1]),
    ),
    "architecture: branch 1 is of kind 'mlp' in the data, and 'attention'": (
        LAYER.layers[0],
        si.Stack((LAYER.layers[0], LAYER.layers[0])),
    ),
}


@pytest.mark.parametrize("match", BAD_ARCHITECTURES)
def test_architectures(match, data, unchecked):
    for architecture in BAD_ARCHITECTURES[match]:
        assert_refused(lambda a=architecture: si.fit(si.models.branches, data, architecture=a, key=jr.key(0)), match)


def test_an_architecture_that_the_width_of_the_data_does_not_allow(data):
    three = si.Stack((dataclasses.replace(LAYER.layers[0], branch=SelfAttention(heads=3)), LAYER.layers[1]))
    match = "heads: the width 8 is not a multiple of 3"
    assert_refused(lambda: si.fit(si.models.branches, data, architecture=three, key=jr.key(0)), match)


BAD_PRIORS = {
    "prior: attention and mlp samples attention.strength, attention.temperature, mlp.strength, mlp.gain; "
    "got a prior of 'strength'": {"strength": 1.0},
    "got a prior of 'mlp.temperature'": {"mlp.temperature": 1.0},
    "prior: mlp.gain: a fixed value must be between 0 and inf, ends excluded, got 0": {"mlp.gain": 0.0},
    "prior: attention.temperature: a NumPyro distribution or a number is needed, got 'free'": {
        "attention.temperature": "free"
    },
    "prior: mlp.strength: a distribution of one number is needed, got shape": {
        "mlp.strength": dist.LogNormal(jnp.zeros(2), 1.0)
    },
    "prior: mlp.gain must be greater than 0 and finite; Normal is on": {"mlp.gain": dist.Normal(0.0, 1.0)},
}


@pytest.mark.parametrize("match", BAD_PRIORS)
def test_priors(match, data):
    call = lambda: si.fit(si.models.branches, data, architecture=LAYER, prior=BAD_PRIORS[match], key=jr.key(0))  # noqa: E731
    assert_refused(call, match)


def test_data_of_another_kind(data, networks):
    def fitted(data, **more):
        return si.fit(si.models.branches, data, architecture=LAYER, key=jr.key(0), **more)

    assert_refused(
        lambda: fitted(networks), "data: .*branches.* takes increments of branches, as of si.observe_branches"
    )
    assert_refused(lambda: fitted(data.drop_vars("increment")), "takes increments of branches")
    assert_refused(lambda: fitted(data.drop_vars("cross")), "data: no variable `cross`")
    broken = data.assign(increment=-data["increment"])
    assert_refused(lambda: fitted(broken), "increment: network 0, branch 0 .attention.0.: ")
    assert_refused(lambda: fitted(data, draws=0), "draws: ")
