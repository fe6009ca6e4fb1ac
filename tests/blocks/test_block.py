"""The chain of covariances of blocks against networks with weights."""

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from helpers.budget import assert_estimate, mean_and_error
from helpers.cases import random_covariance
from helpers.internals import NetworkKeys
from helpers.references import packed
from helpers.spending import share
from scipy import stats

import sdeinfer as si
from sdeinfer.blocks import MLP, Block, SelfAttention
from sdeinfer.layers import OverDepth
from sdeinfer.networks import covariance_chain

BRANCHES = {
    "mlp": MLP(activation="silu", gated=True, expansion=1.0, gain=1.5),
    "attention": SelfAttention(heads=4, key_value_heads=2, rope=10.0, pattern=si.CAUSAL, gain=2.0, bias=0.2),
}
OFF_DIAGONAL = [(0, 1), (0, 2), (1, 2)]
LAYER = si.Stack(
    [Block(BRANCHES["attention"], 0.5, "rms", "post"), Block(BRANCHES["mlp"], 0.5, "layer", "pre", bias=0.1)]
)
STRENGTHS = "attention.strength", "mlp.strength"
SIZES = {"width": 32, "depth": 4}


def of_strength(strength: float) -> si.Stack:
    return LAYER.with_parameters(dict.fromkeys(STRENGTHS, strength))


def step_up(time):
    """A profile for networks of width 32: a strength of 0.3 in the first two layers, then of 0.6."""
    return jnp.where(time * 32 < 2, 0.3, 0.6)


def sampled(layer, method="chain", dtype=np.float32, *, networks, width, depth, key) -> np.ndarray:
    """V after each layer; the rounding of single precision is far below the Monte Carlo errors."""
    sizes = {"width": width, "depth": depth, "networks": networks}
    found = si.sample_networks(layer, random_covariance(3).astype(dtype), method=method, **sizes, key=key)["covariance"]
    assert found.dtype == dtype
    return found.values.astype(np.float64)


def by_both(layer, *, key, **sizes):
    """V of the last layer, by the chain and by weights."""
    methods = zip(("chain", "weights"), jr.split(key), strict=True)
    return [sampled(layer, method, **sizes, key=own)[:, -1] for method, own in methods]


CASES = [
    (norm, position) for norm in (None, "rms", "layer") for position in ("pre", "post") if norm or position == "pre"
]


@pytest.mark.slow
@pytest.mark.parametrize(("norm", "position"), CASES)
@pytest.mark.parametrize("name", BRANCHES)
def test_chain_has_the_law_of_the_weights_closely(name, norm, position, key):
    # After a norm the diagonal is 1.
    entries = OFF_DIAGONAL if position == "post" else [(0, 0), (1, 1), *OFF_DIAGONAL]
    # Without a norm, gated units of many layers overflow: they are of the third degree.
    branch = MLP(expansion=1.0) if norm is None and name == "mlp" else BRANCHES[name]
    both = by_both(Block(branch, 0.4, norm, position), width=64, depth=24, networks=1_000, key=key)
    values = [[V[:, a, b] for a, b in entries] + [np.linalg.slogdet(V)[1]] for V in both]
    found = [stats.ks_2samp(x, y, method="asymp").pvalue for x, y in zip(*values, strict=True)]
    print(f"{name}, {norm}, {position}: smallest p value of {len(found)}: {min(found):.3g}")
    assert min(found) * len(found) >= share(), f"p values {found}"


@pytest.mark.long
def test_chain_has_the_moments_of_the_weights(key):
    both = [packed(V) for V in by_both(LAYER, width=32, depth=3, networks=1_024, key=key)]
    for of in (lambda x: x, lambda x: (x - x.mean(0)) ** 2):
        (chain, error), (weights, other) = (mean_and_error(of(x)) for x in both)
        assert_estimate(chain, weights, np.hypot(error, other))


def test_a_layer_norm_takes_one_feature(key):
    """The correlation of independent increments of n features less their mean has the variance 1/(n − 1)."""
    width, units = 6, 384
    block = Block(MLP(activation="identity", expansion=units / width), 1.0, "layer", "post", skip=0.0)
    sizes = {"width": width, "depth": 1, "networks": 4_096}
    found = si.sample_networks(block, np.eye(2), method="chain", **sizes, key=key)["covariance"].values[:, 1]
    np.testing.assert_allclose(np.diagonal(found, axis1=-2, axis2=-1), 1.0, rtol=1e-6)
    mean, error = mean_and_error(found[:, 0, 1] ** 2)
    assert_estimate(mean, 1 / (width - 1), np.hypot(error, 1 / units))


@pytest.mark.long
def test_precisions_share_random_numbers_and_strengths_over_depth_are_those_of_each_layer(key):
    same = {"networks": 8, "key": key}
    weak, stepped = of_strength(0.3), OverDepth(LAYER, **dict.fromkeys(STRENGTHS, step_up))
    double = sampled(weak, dtype=np.float64, **SIZES, **same)
    # Random numbers of 24 bits and some operations: 10⁻⁴ of V's size.
    np.testing.assert_allclose(sampled(weak, **SIZES, **same), double, atol=1e-4 * double.max())
    found = sampled(stepped, dtype=np.float64, **SIZES, **same)
    np.testing.assert_allclose(found[:, :3], double[:, :3], rtol=1e-10)
    assert np.abs(found[:, 3] - double[:, 3]).max() > 0.1


def along(of):
    """A function of a number with its derivative, as one program: one without it would be compiled for as long."""
    return jax.jit(lambda value: jax.jvp(of, (value,), (1.0,)))


@pytest.mark.long
@pytest.mark.parametrize("number", [0, 1])
def test_gradients_of_the_chain_are_differences_of_networks(number, key):
    layer, V0 = LAYER.layers[number], random_covariance(3)
    name, keys = ("temperature", "strength")[number], NetworkKeys.numbered(key, jnp.arange(8, dtype=jnp.uint32))

    def last(value):
        return covariance_chain(layer.with_parameters({name: value}), V0, width=32, layers=4, keys=keys)[:, -1]

    with_slope, h = along(last), 1e-5
    slope, (up, down) = with_slope(0.8)[1], (with_slope(0.8 + step)[0] for step in (h, -h))
    # The error of a central difference is of order h² plus rounding over h.
    np.testing.assert_allclose(slope, (up - down) / (2 * h), rtol=1e-6, atol=1e-7)
