"""The chain of covariances of blocks against networks with weights."""

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from helpers.budget import assert_estimate, assert_mean, mean_and_error
from helpers.cases import random_covariance
from helpers.internals import NetworkKeys
from helpers.references import packed
from helpers.spending import share
from scipy import stats

import sdeinfer as si
from sdeinfer.blocks import MLP, Block, Experts, LatentAttention, Parallel, SelfAttention
from sdeinfer.layers import OverDepth
from sdeinfer.networks import covariance_chain

BRANCHES = {
    "mlp": MLP(activation="silu", gated=True, expansion=1.0, gain=1.5),
    "attention": SelfAttention(heads=4, key_value_heads=2, rope=10.0, pattern=si.CAUSAL, gain=2.0, bias=0.2),
}
SIZED = {"heads": 4, "head_size": 8, "pattern": si.CAUSAL}
NORMED = SelfAttention(0.5, 2.0, key_value_heads=2, qk_norm="all", rope=10.0, **SIZED)
CAPPED = SelfAttention(0.5, 2.0, rope=10.0, rope_size=4, qk_norm="head", cap=2.0, sink=0.0, gate=2.0, **SIZED)
LATENT = LatentAttention(0.5, 2.0, 2.0, rotated_size=4, key_rank=12, query_rank=16, rope=10.0, **SIZED)
EXPERTS = Experts(2.0, experts=4, router=4.0, expansion=1.0, offset=1.0, shared=0.5)
TODAY = {
    "rms after an MLP": Block(BRANCHES["mlp"], output_norm="rms", output_gain=0.5),
    "layer after attention": Block(BRANCHES["attention"], output_norm="layer", output_gain=0.5),
    "rms before and after an MLP": Block(BRANCHES["mlp"], norm="rms", output_norm="rms", output_gain=0.5),
    "rms before, layer after attention": Block(NORMED, norm="rms", output_norm="layer", output_gain=0.5),
    "attention beside an MLP": Parallel((Block(BRANCHES["attention"], 0.5, "layer"), Block(MLP(), 0.4, "layer"))),
    "caps, sinks, gates": Block(CAPPED, 0.5, "rms"),
    "latent attention": Block(LATENT, 0.5, "rms"),
    "experts": Block(EXPERTS, 0.5, "rms"),
    "latent attention, experts": si.Stack((Block(LATENT, 0.5, "rms"), Block(EXPERTS, 0.5, "rms"))),
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


def sampled(layer, method="chain", dtype=np.float32, *, networks, width, depth, tokens=3, key) -> np.ndarray:
    """V after each layer; the rounding of single precision is far below the Monte Carlo errors."""
    sizes, V0 = {"width": width, "depth": depth, "networks": networks}, random_covariance(tokens).astype(dtype)
    found = si.sample_networks(layer, V0, method=method, **sizes, key=key)["covariance"]
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


def terms_of_moments(V) -> list[np.ndarray]:
    """For each of the first three central moments of the entries of V what has it as its mean, and its error."""
    x = packed(V)
    difference = x - x.mean(0)
    variance = (difference**2).mean(0)
    # Of the cubes, what the mean's own error adds is taken away: its mean is 0.
    return [x, difference**2, difference**3 - 3 * variance * difference]


@pytest.mark.long
def test_chain_has_the_moments_of_the_weights(key):
    assert_same_moments(by_both(LAYER, width=32, depth=3, networks=1_024, key=key))


def assert_same_moments(both) -> None:
    for chain, weights in zip(*map(terms_of_moments, both), strict=True):
        (estimate, error), (expected, other) = mean_and_error(chain), mean_and_error(weights)
        assert_estimate(estimate, expected, np.hypot(error, other))


@pytest.mark.slow
@pytest.mark.parametrize(("width", "tokens", "networks"), [(64, 6, 4_000), (128, 4, 2_000), (256, 2, 1_000)])
@pytest.mark.parametrize("name", TODAY)
def test_blocks_of_today_have_the_law_of_the_weights_closely(name, width, tokens, networks, key):
    """Hotelling's test of each moment of all entries of V at once."""
    both = by_both(TODAY[name], width=width, depth=3, networks=networks, tokens=tokens, key=key)
    tests = [hotelling(*terms) for terms in zip(*map(terms_of_moments, both), strict=True)]
    figures = ", ".join(f"{square:5.1f} (p = {p:.2g})" for square, p in tests)
    print(f"{name:34s} n = {width:3d}, m = {tokens}, df = {tokens * (tokens + 1) // 2:2d}: {figures}")
    assert 3 * min(p for _, p in tests) >= share()


def hotelling(x: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    """T² of the difference of two means, and its p value; its law is χ² with corrections for the covariances."""
    k, freedom = x.shape[1], len(x) + len(y) - 2
    difference, covariance = x.mean(0) - y.mean(0), np.cov(x.T) / len(x) + np.cov(y.T) / len(y)
    square = difference @ np.linalg.solve(covariance, difference)
    return square, stats.f.sf(square * (freedom - k + 1) / (k * freedom), k, freedom - k + 1)


def test_a_layer_norm_takes_one_feature(key):
    """The correlation of independent increments of n features less their mean has the variance 1/(n − 1)."""
    width, units = 6, 384
    block = Block(MLP(activation="identity", expansion=units / width), 1.0, "layer", "post", skip=0.0)
    sizes = {"width": width, "depth": 1, "networks": 4_096}
    found = si.sample_networks(block, np.eye(2), method="chain", **sizes, key=key)["covariance"].values[:, 1]
    np.testing.assert_allclose(np.diagonal(found, axis1=-2, axis2=-1), 1.0, rtol=1e-6)
    mean, error = mean_and_error(found[:, 0, 1] ** 2)
    assert_estimate(mean, 1 / (width - 1), np.hypot(error, 1 / units))


def test_a_norm_after_the_branch_leaves_the_angle_of_an_increment(key):
    """V′_aa is α² + γ² + 2αγ cos θ, with an angle θ of independent vectors: cos² θ has the mean 1/n."""
    width, skip, gain = 6, 0.8, 1.5
    branch = MLP(activation="identity", expansion=1.0)
    block = Block(branch, 3.0, skip=skip, output_norm="rms", output_gain=gain)
    sizes = {"width": width, "depth": 1, "networks": 4_096}
    V = si.sample_networks(block, np.eye(2), method="chain", **sizes, key=key)["covariance"].values[:, 1]
    cosine = (np.diagonal(V, axis1=-2, axis2=-1) - skip**2 - gain**2) / (2 * skip * gain)
    assert_mean(cosine, 0.0)
    assert_mean(cosine**2, 1 / width)


@pytest.mark.one_case("chain")
@pytest.mark.parametrize("method", ["chain", "weights"])
def test_blocks_beside_each_other_read_one_norm_and_add(method, key):
    """Attention at a huge temperature is uniform, and identity units have the covariance that they read."""
    attention, mlp = SelfAttention(1e12, 1.4, head_size=4), MLP(2.0, "identity", 1.0)
    layer = Parallel((Block(attention, 0.7, "rms", skip=0.9), Block(mlp, 0.5, "rms", skip=0.9, bias=0.1)))
    V0, uniform = np.asarray(random_covariance(2)), np.full((2, 2), 0.5)
    V = si.sample_networks(layer, V0, method=method, width=8, depth=1, networks=4_096, key=key)["covariance"].values
    read = V0 / np.sqrt(np.outer(np.diag(V0), np.diag(V0)))
    increment = 0.7**2 * 1.4 * uniform @ read @ uniform + 0.5**2 * 2.0 * read + 0.1
    assert_mean(packed(V[:, 1]), packed(0.9**2 * V0 + increment))


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
