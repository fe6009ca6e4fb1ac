"""Moments of one block against weights: mean and covariance of ΔΔᵀ/n and of V′, given the tokens.

Every branch of one width and number of tokens is sampled once, and reads the tokens by every norm: their errors are
dependent, which the thresholds allow. Expectations over nodes have an error as well, by several scramblings. Some
branches have dropout.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from budget import assert_estimate, mean_and_error
from conftest import random_covariance

import sdeinfer as si
from sdeinfer import blocks
from sdeinfer.blocks import Block
from sdeinfer.covariance import vech
from sdeinfer.networks import tokens_with_covariance

NORMS = (None, "rms", "layer")
BASE_OF_ROPE = 10.0
"""A base at which four tokens turn by angles of order one in most planes."""

BRANCHES = {
    "gelu": blocks.MLP(gain=2.0, expansion=1.0),
    "swiglu with bias": blocks.MLP(activation="silu", gated=True, bias=0.3, expansion=1.5),
    "causal": blocks.SelfAttention(heads=4, pattern=si.CAUSAL, gain=1.5),
    "GQA with RoPE": blocks.SelfAttention(heads=4, key_value_heads=2, rope=BASE_OF_ROPE, pattern=si.CAUSAL, gain=2.0),
    "full mask": blocks.SelfAttention(heads=4, temperature=0.5, bias=0.2),
}
DROPOUT = dict.fromkeys(("swiglu with bias", "GQA with RoPE"), 0.3)
STRENGTH, SKIP, BIAS = 0.7, 0.9, 0.2
SCRAMBLINGS, LOG2 = 4, 12


@eqx.filter_jit
def sampled(block, read, X, keys):
    """Packed ΔΔᵀ/n and V′ of networks with these keys, for each of several readings of the tokens."""
    width = X.shape[1]

    def one(key):
        D = jax.vmap(lambda U: block.increment(U, key=key))(read)
        return jax.vmap(lambda Y: vech(Y @ Y.T / width))(
            jnp.stack([D, block.skip * X + D], axis=1).reshape(-1, *X.shape)
        )

    found = jax.lax.map(one, keys, batch_size=100)
    return found.reshape(len(keys), len(read), 2, -1)


@eqx.filter_jit
def expected(block, V, U, nodes, width):
    """The same in expectation, and the covariances, by one set of nodes."""
    read = block.branch.moments(U @ U.T / width, nodes, width=width)
    hidden = blocks.MatrixMoments(read.mean + block.bias / block.strength**2, read.covariance)
    increment = blocks.increment_moments(hidden, width=width, dropout=block.dropout)
    output = blocks.output_moments(V, increment, strength=block.strength, skip=block.skip, width=width)
    squared = block.strength**2
    means = jnp.stack([squared * vech(increment.mean), vech(output.mean)])
    return means, jnp.stack([squared**2 * increment.covariance, output.covariance])


def assert_moments(name: str, norms, *, width: int, tokens: int, networks: int, key) -> float:
    """Compare all moments; returns the largest standardised difference."""
    V = random_covariance(tokens, seed=tokens)
    key_tokens, key_networks = jr.split(key)
    X = tokens_with_covariance(V, width=width, key=key_tokens)
    each = [
        Block(BRANCHES[name], STRENGTH, norm, skip=SKIP, bias=BIAS, dropout=DROPOUT.get(name, 0.0)) for norm in norms
    ]
    read = jnp.stack([block.read(X) for block in each])
    # In single precision, whose rounding is far below the Monte Carlo errors.
    single = jax.tree.map(lambda x: np.asarray(x, np.float32), (each[0], read, X))
    found = np.asarray(sampled(*single, jr.split(key_networks, networks)), np.float64)
    drawn = [BRANCHES[name].nodes(tokens, width, log2=LOG2, seed=seed) for seed in range(SCRAMBLINGS)]
    largest = 0.0
    for place, block in enumerate(each):
        exact = [expected(block, V, read[place], nodes, width) for nodes in drawn]
        (mean, mean_error), (covariance, error) = (mean_and_error(np.stack(x)) for x in zip(*exact, strict=True))
        differences = found[:, place] - mean
        products = differences[..., :, None] * differences[..., None, :]
        for samples, value, of_nodes in ((differences, 0 * mean, mean_error), (products, covariance, error)):
            estimate, of_networks = mean_and_error(samples)
            of_both = np.hypot(of_networks, of_nodes)
            assert_estimate(estimate, value, of_both)
            largest = max(largest, float(np.abs((estimate - value) / of_both).max()))
    return largest


@pytest.mark.parametrize(
    "name", ["swiglu with bias", "full mask", pytest.param("GQA with RoPE", marks=pytest.mark.long)]
)
def test_one_block_has_the_moments_of_its_weights(name, key):
    assert_moments(name, ("layer",), width=32, tokens=3, networks=2_000, key=key)


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [2, 4, 6])
@pytest.mark.parametrize("width", [64, 192])
@pytest.mark.parametrize("name", BRANCHES)
def test_one_block_has_the_moments_of_its_weights_closely(name, width, tokens, key):
    z = assert_moments(name, NORMS, width=width, tokens=tokens, networks=10_000, key=jr.fold_in(key, tokens))
    print(f"{name}, n = {width}, m = {tokens}: largest |z| of each norm's moments {z:.2f}")
