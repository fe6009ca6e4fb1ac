"""Mean and covariance of ΔΔᵀ/n of one branch's increments, given what it reads, against networks with weights.

Expectations over nodes have an error as well, by several scramblings.
"""

import equinox as eqx
import jax
import jax.random as jr
import numpy as np
import pytest
from budget import assert_estimate, mean_and_error
from conftest import random_covariance
from references import packed

import sdeinfer as si
from sdeinfer import blocks
from sdeinfer.blocks import Block
from sdeinfer.covariance import vech
from sdeinfer.networks import tokens_with_covariance

BASE_OF_ROPE = 10.0
"""A base at which four tokens turn by angles of order one in most planes."""

BRANCHES = {
    "gelu": blocks.MLP(gain=2.0, expansion=1.0),
    "swiglu with bias": blocks.MLP(activation="silu", gated=True, bias=0.3, expansion=1.5),
    "causal": blocks.SelfAttention(heads=4, pattern=si.CAUSAL, gain=1.5),
    "GQA with RoPE": blocks.SelfAttention(heads=4, key_value_heads=2, rope=BASE_OF_ROPE, pattern=si.CAUSAL, gain=2.0),
    "full mask": blocks.SelfAttention(heads=4, temperature=0.5, bias=0.2),
}
STRENGTH, BIAS = 0.7, 0.2
SCRAMBLINGS, LOG2 = 4, 12


@eqx.filter_jit
def sampled(block, U, keys):
    """Packed ΔΔᵀ/n of networks with these keys."""

    def one(key):
        D = block.increment(U, key=key)
        return vech(D @ D.T / U.shape[1])

    return jax.lax.map(one, keys, batch_size=100)


@eqx.filter_jit
def moments(branch, V, nodes, width):
    return branch.moments(V, nodes, width=width)


def expected(block, V, nodes, width):
    """Mean and covariance of ΔΔᵀ/n ~ Wishart_m(n, g² S + b)/n: C + E[S_ac S_bd + S_ad S_bc]/n for entries ab and cd."""
    found, tokens = moments(block.branch, V, nodes, width), len(V)
    K, C = np.asarray(found.mean) + block.bias / block.strength**2, np.asarray(found.covariance)
    entries = list(zip(*np.triu_indices(tokens), strict=True))
    place = {pair: number for number, (a, b) in enumerate(entries) for pair in ((a, b), (b, a))}

    def product(one, other):
        return C[place[one], place[other]] + K[one] * K[other]

    across = [[product((a, c), (b, d)) + product((a, d), (b, c)) for c, d in entries] for a, b in entries]
    return block.strength**2 * packed(K), block.strength**4 * (C + np.array(across) / width)


def assert_moments(name: str, *, width: int, tokens: int, networks: int, key) -> float:
    """Compare all moments; returns the largest standardised difference."""
    key_tokens, key_networks = jr.split(key)
    U = tokens_with_covariance(random_covariance(tokens, seed=tokens), width=width, key=key_tokens)
    block = Block(BRANCHES[name], STRENGTH, bias=BIAS)
    # In single precision, whose rounding is far below the Monte Carlo errors.
    single = jax.tree.map(lambda x: np.asarray(x, np.float32), (block, U))
    found = np.asarray(sampled(*single, jr.split(key_networks, networks)), np.float64)
    drawn = [block.branch.nodes(tokens, width, log2=LOG2, seed=seed) for seed in range(SCRAMBLINGS)]
    exact = [expected(block, U @ U.T / width, nodes, width) for nodes in drawn]
    (mean, mean_error), (covariance, error) = (mean_and_error(np.stack(x)) for x in zip(*exact, strict=True))
    differences = found - mean
    products = differences[..., :, None] * differences[..., None, :]
    largest = 0.0
    for samples, value, of_nodes in ((differences, 0 * mean, mean_error), (products, covariance, error)):
        estimate, of_networks = mean_and_error(samples)
        of_both = np.hypot(of_networks, of_nodes)
        assert_estimate(estimate, value, of_both)
        largest = max(largest, float(np.abs((estimate - value) / of_both).max()))
    return largest


@pytest.mark.parametrize(
    "name", ["swiglu with bias", "full mask", pytest.param("GQA with RoPE", marks=pytest.mark.long)]
)
def test_increments_have_the_moments_of_their_weights(name, key):
    assert_moments(name, width=32, tokens=3, networks=2_000, key=key)


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [2, 4, 6])
@pytest.mark.parametrize("width", [64, 192])
@pytest.mark.parametrize("name", BRANCHES)
def test_increments_have_the_moments_of_their_weights_closely(name, width, tokens, key):
    z = assert_moments(name, width=width, tokens=tokens, networks=10_000, key=jr.fold_in(key, tokens))
    print(f"{name}, n = {width}, m = {tokens}: largest |z| {z:.2f}")
