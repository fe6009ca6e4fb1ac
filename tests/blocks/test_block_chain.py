"""The chain of covariances of blocks against networks with weights, and its moments over depth."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from budget import assert_estimate, mean_and_error, share
from conftest import random_covariance
from references import packed
from scipy import stats

import sdeinfer as si
from sdeinfer.blocks import MLP, Block, SelfAttention, moments_over_depth
from sdeinfer.layers import OverDepth
from sdeinfer.layers._keys import NetworkKeys
from sdeinfer.networks import covariance_chain

BRANCHES = {
    "mlp": MLP(activation="silu", gated=True, expansion=1.0, gain=1.5),
    "attention": SelfAttention(heads=4, key_value_heads=2, rope=10.0, pattern=si.CAUSAL, gain=2.0),
}
OFF_DIAGONAL = [(0, 1), (0, 2), (1, 2)]
ENTRIES = [(0, 0), (1, 1), *OFF_DIAGONAL]


def transformer(strength: float = 0.5, norm="layer", position="pre") -> si.Stack:
    return si.Stack([Block(branch, strength, norm, position) for branch in BRANCHES.values()])


def step_up(time):
    """A profile for networks of width 32: a strength of 0.3 in the first two layers, then of 0.6."""
    return jnp.where(time * 32 < 2, 0.3, 0.6)


def sampled(layer, method, *, key, **sizes) -> np.ndarray:
    """V of the last layer, in single precision, whose rounding is far below the Monte Carlo errors."""
    V0 = random_covariance(3).astype(jnp.float32)
    data = si.sample_networks(layer, V0, method=method, **sizes, observe_every=sizes["depth"], key=key)
    return data["covariance"].values[:, -1].astype(np.float64)


def ks(layer, entries, *, key, **sizes) -> float:
    """Smallest p value of the entries and of the log determinant, by chain and by weights."""
    chain, weights = (sampled(layer, each, key=k, **sizes) for each, k in zip(METHODS, jr.split(key), strict=True))
    pairs = [(chain[:, a, b], weights[:, a, b]) for a, b in entries]
    pairs.append((np.linalg.slogdet(chain)[1], np.linalg.slogdet(weights)[1]))
    found = [stats.ks_2samp(x, y, method="asymp").pvalue for x, y in pairs]
    assert min(found) * len(found) >= share(), f"p values {found}"
    return float(min(found))


METHODS = ("chain", "weights")
CASES = [
    (norm, position) for norm in (None, "rms", "layer") for position in ("pre", "post") if norm or position == "pre"
]


@pytest.mark.slow
@pytest.mark.parametrize(("norm", "position"), CASES)
@pytest.mark.parametrize("name", BRANCHES)
def test_chain_has_the_law_of_the_weights_closely(name, norm, position, key):
    # After a norm the diagonal is 1.
    entries = OFF_DIAGONAL if position == "post" else ENTRIES
    # Without a norm, gated units of many layers overflow: they are of the third degree.
    branch = MLP(expansion=1.0) if norm is None and name == "mlp" else BRANCHES[name]
    layer = Block(branch, 0.4, norm, position)
    p = ks(layer, entries, width=64, depth=24, networks=1_000, key=key)
    print(f"{name}, {norm}, {position}: smallest p value of {len(entries) + 1}: {p:.3g}")


LAYERS = {
    "pre": lambda: OverDepth(transformer(), **{"mlp.strength": step_up}),
    "post": lambda: transformer(norm="rms", position="post"),
}


@pytest.mark.parametrize("name", [pytest.param("pre", marks=pytest.mark.long), "post"])
def test_chain_has_the_moments_of_the_weights(name, key):
    sizes = {"width": 32, "depth": 4, "networks": 1_500}
    both = [sampled(LAYERS[name](), each, key=k, **sizes) for each, k in zip(METHODS, jr.split(key), strict=True)]
    both = [np.stack([V[:, a, b] for a, b in (OFF_DIAGONAL if name == "post" else ENTRIES)], axis=1) for V in both]
    for of in (lambda x: x, lambda x: (x - x.mean(0)) ** 2):
        (chain, error), (weights, other) = (mean_and_error(of(x)) for x in both)
        assert_estimate(chain, weights, np.hypot(error, other))


@eqx.filter_jit
def chain(layer, V0, *, width=32, layers=4, networks=8, key):
    keys = NetworkKeys.numbered(key, jnp.arange(networks, dtype=jnp.uint32))
    return covariance_chain(layer, V0, width=width, layers=layers, keys=keys)


def along(of):
    """A function of a number with its derivative, as one program: one without it would be compiled for as long."""
    return jax.jit(lambda value: jax.jvp(of, (value,), (1.0,)))


def test_single_precision_has_the_random_numbers_of_double(key):
    V0 = random_covariance(3)
    double = chain(transformer(), V0, key=key)
    layer = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), transformer())
    single = chain(layer, V0.astype(jnp.float32), key=key)
    assert single.dtype == jnp.float32
    # Random numbers of 24 bits and some operations: 10⁻⁴ of V's size.
    np.testing.assert_allclose(single, double, atol=1e-4 * float(jnp.abs(double).max()))


def test_strengths_over_depth_are_those_of_each_layer(key):
    V0, width = random_covariance(3), 32
    stepped = OverDepth(transformer(), **{"attention.strength": step_up, "mlp.strength": step_up})
    found = chain(stepped, V0, key=key)
    np.testing.assert_allclose(found[:, :3], chain(transformer(0.3), V0, key=key)[:, :3], rtol=1e-10)
    # Moments have no keys: the first two layers, and then two of a network that starts there.
    whole = moments_over_depth(stepped, V0, width=width, depth=4, log2=8)
    first = moments_over_depth(transformer(0.3), V0, width=width, depth=2, log2=8)
    second = moments_over_depth(transformer(0.6), first.mean[-1], width=width, depth=2, log2=8)
    np.testing.assert_allclose(whole.mean, np.concatenate([first.mean, second.mean[1:]]), rtol=1e-9)
    np.testing.assert_allclose(whole.covariance[:3], first.covariance, rtol=1e-9, atol=1e-15)


@pytest.mark.parametrize("name", [pytest.param("mlp.strength", marks=pytest.mark.long), "attention.temperature"])
def test_gradients_of_the_chain_are_differences_of_networks(name, key):
    V0 = random_covariance(3)

    def last(value):
        return chain(transformer().with_parameters({name: value}), V0, key=key)[:, -1]

    with_slope, h = along(last), 1e-5
    slope, (up, down) = with_slope(0.8)[1], (with_slope(0.8 + step)[0] for step in (h, -h))
    # The error of a central difference is of order h² plus rounding over h.
    np.testing.assert_allclose(slope, (up - down) / (2 * h), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("position", ["pre", pytest.param("post", marks=pytest.mark.long)])
def test_moments_over_depth_are_those_of_networks(position, key):
    """Up to the next order in 1/n, which is allowed as an error bar of 1/n, of variances as one of 1/√n of them."""
    width, depth = 256, 4
    # Without rotations the nodes of attention have an error that is smaller still.
    branches = SelfAttention(heads=4, key_value_heads=2, pattern=si.CAUSAL, gain=2.0), BRANCHES["mlp"]
    layer = si.Stack([Block(branch, 0.4, "rms", position) for branch in branches])
    found = moments_over_depth(layer, random_covariance(3), width=width, depth=depth)
    V = sampled(layer, "chain", width=width, depth=depth, networks=2_000, key=key)
    a, b = np.triu_indices(3, k=int(position == "post"))
    own = [k for k, (i, j) in enumerate(zip(*np.triu_indices(3), strict=True)) if position == "pre" or i < j]
    estimate, error = mean_and_error(V[:, a, b])
    expected = packed(found.mean[-1])[own]
    assert_estimate(estimate, expected, np.hypot(error, 1 / width))
    variance, error = mean_and_error((V[:, a, b] - estimate) ** 2)
    ratio, error = np.array([variance, error]) / np.diagonal(found.covariance[-1])[own]
    assert_estimate(ratio, 1.0, np.hypot(error, 1 / np.sqrt(width)))


def test_moments_over_depth_are_differentiable_and_start_at_their_start():
    V0 = random_covariance(2)

    of = along(lambda strength: moments_over_depth(Block(MLP(), strength, "layer"), V0, width=32, depth=3, log2=6))
    found, slope = of(0.5)
    np.testing.assert_allclose(found.mean[0], V0)
    np.testing.assert_array_equal(found.covariance[0], 0.0)
    h = 1e-5
    up, down = (of(0.5 + step)[0] for step in (h, -h))
    for exact, one, other in zip(slope, up, down, strict=True):
        np.testing.assert_allclose(exact, (one - other) / (2 * h), rtol=1e-6, atol=1e-9)
