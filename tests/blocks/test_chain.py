"""The covariance chain of blocks against their weights, its derivatives, and strengths that change with depth."""

import itertools

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from blocks.test_moments import BRANCHES
from budget import assert_estimate, assert_same_distribution, mean_and_error
from conftest import random_covariance
from references import packed
from scipy import stats

import sdeinfer as si
from sdeinfer import blocks
from sdeinfer.layers import NetworkKeys
from sdeinfer.networks import covariance_chain

PLACES = (("none", None, "pre"), ("pre rms", "rms", "pre"), ("pre layer", "layer", "pre"))
PLACES += (("post rms", "rms", "post"), ("post layer", "layer", "post"))


def transformer(norm="rms", position="pre", strength=0.4) -> si.Stack:
    of_block = {"strength": strength, "norm": norm, "position": position}
    return si.Stack(
        (
            blocks.Block(blocks.SelfAttention(heads=2, pattern=si.CAUSAL, gain=2.0), **of_block),
            blocks.Block(blocks.MLP(expansion=0.5, gain=2.0), **of_block),
        )
    )


def last(layer, V0, *, method, key, **sizes) -> np.ndarray:
    """V after the last layer, in single precision, whose rounding is far below the Monte Carlo errors here."""
    sizes |= {"observe_every": sizes["depth"]}
    data = si.sample_networks(layer, V0.astype(jnp.float32), method=method, **sizes, key=key)
    return data["covariance"].values[:, -1].astype(np.float64)


def both(layer, V0, *, key, **sizes):
    keys = jr.split(key)
    return [
        last(layer, V0, method=method, key=own, **sizes) for method, own in zip(("chain", "weights"), keys, strict=True)
    ]


@pytest.mark.parametrize(
    ("norm", "position"),
    [("rms", "pre"), ("layer", "post"), pytest.param(None, "pre", marks=pytest.mark.long)],
)
def test_chain_has_the_moments_of_the_weights(norm, position, key):
    """Three tokens, two layers; the diagonal after a norm is 1."""
    layer = transformer(norm, position)
    drawn = [packed(V) for V in both(layer, random_covariance(3), width=16, depth=2, networks=1_000, key=key)]
    if position == "post":
        off_diagonal = packed(np.eye(3)) == 0
        for V in drawn:
            np.testing.assert_allclose(V[:, ~off_diagonal], 1, rtol=1e-6)
        drawn = [V[:, off_diagonal] for V in drawn]
    products = [(V[:, :, None] - drawn[0].mean(0)[:, None]) * (V[:, None] - drawn[0].mean(0)) for V in drawn]
    for chain, weights in (drawn, products):
        (one, error), (other, other_error) = mean_and_error(chain), mean_and_error(weights)
        assert_estimate(one, other, np.hypot(error, other_error))


@pytest.mark.slow
@pytest.mark.parametrize("branch", BRANCHES)
@pytest.mark.parametrize(("name", "norm", "position"), PLACES, ids=[place[0] for place in PLACES])
def test_chain_has_the_law_of_the_weights(name, norm, position, branch, key):
    """Kolmogorov–Smirnov after 24 layers."""
    block = blocks.Block(BRANCHES[branch], strength=0.4, norm=norm, position=position)
    chain, weights = both(block, random_covariance(3), width=64, depth=24, networks=1_000, key=key)
    compared = {
        f"V_{a}{b}": [V[:, a, b] for V in (chain, weights)]
        for a, b in itertools.combinations_with_replacement(range(3), 2)
        if a != b or position == "pre"
    }
    compared["log det"] = [np.linalg.slogdet(V)[1] for V in (chain, weights)]
    p = {name: stats.ks_2samp(*pair, method="asymp").pvalue for name, pair in compared.items()}
    print(f"{branch}, {name}: p " + ", ".join(f"{each} {value:.2g}" for each, value in p.items()))
    for pair in compared.values():
        assert_same_distribution(*pair)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
def test_equal_tokens_stay_equal(dtype, key):
    V0 = random_covariance(2)[jnp.array([0, 1, 0])][:, jnp.array([0, 1, 0])].astype(dtype)
    block = blocks.Block(blocks.MLP(expansion=0.5), strength=0.5, norm="rms")
    V = si.sample_networks(block, V0, width=16, depth=6, networks=5, key=key)["covariance"].values
    assert V.dtype == dtype
    np.testing.assert_allclose(V[..., 2, :], V[..., 0, :], rtol=20 * np.finfo(dtype).eps)
    assert (V[:, 1:, 0, 0].std(axis=0) > 0).all()
    assert (np.linalg.eigvalsh(V)[..., 1] > 0).all()  # the two that are left are as independent as ever


def test_single_precision_draws_the_same_networks(key):
    layer, sizes = transformer("layer", "pre"), {"width": 16, "depth": 3, "networks": 20, "key": key}
    double, single = (
        si.sample_networks(layer, random_covariance(3).astype(dtype), **sizes)["covariance"].values
        for dtype in (jnp.float64, jnp.float32)
    )
    assert single.dtype == np.float32
    np.testing.assert_allclose(single, double, rtol=1e-3, atol=1e-3)


def test_strengths_change_with_depth(key):
    """Layers whose strengths are negligible leave the tokens as they are, by the chain and by weights."""
    width, V0 = 16, random_covariance(3)
    layer = si.OverDepth(transformer(strength=1e-9), **{"mlp.strength": lambda t: jnp.where(t < 1 / width, 0.4, 1e-9)})
    for method in ("chain", "weights"):
        data = si.sample_networks(layer, V0, width=width, depth=3, networks=6, method=method, key=key)
        V = data["covariance"].values
        np.testing.assert_allclose(V[:, 2:], np.broadcast_to(V[:, 1:2], V[:, 2:].shape), atol=1e-6)
        assert np.abs(V[:, 1] - V[:, 0]).max() > 0.01


@pytest.mark.parametrize(("norm", "position"), [("rms", "pre"), pytest.param("layer", "post", marks=pytest.mark.long)])
def test_derivatives_of_the_chain_are_those_of_differences(norm, position, key):
    """With common random numbers, in both strengths."""
    layer, V0 = transformer(norm, position), random_covariance(3)
    keys = NetworkKeys.numbered(key, jnp.arange(4, dtype=jnp.uint32))

    @eqx.filter_jit
    def after(strengths):
        values = {"attention.strength": strengths, "mlp.strength": 1.5 * strengths}
        return covariance_chain(layer.with_parameters(values), V0, width=16, layers=3, keys=keys)[:, -1]

    step = 1e-5
    value, derivative = jax.jvp(after, (jnp.asarray(0.4),), (jnp.asarray(1.0),))
    differences = (after(jnp.asarray(0.4 + step)) - after(jnp.asarray(0.4 - step))) / (2 * step)
    assert np.isfinite(value).all()
    np.testing.assert_allclose(derivative, differences, rtol=1e-6, atol=1e-7)
