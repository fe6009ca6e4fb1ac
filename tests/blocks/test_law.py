"""The law of one branch: moments of S by other means, and the density of an increment."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from helpers.attention_references import attention_gram
from helpers.block_moments import V3, WIDTH, assert_differentiable, assert_moments_agree, moments, scrambled
from helpers.block_references import mlp_gram
from helpers.budget import assert_mean, assert_variance, assert_within
from helpers.cases import random_covariance
from helpers.internals import (
    LARGEST_FACTOR,
    LOG_FACTORS,
    BlockOrder,
    branch_coefficients,
    interpolated,
    unvech,
)
from helpers.references import arc_cosine_kernel, assert_agrees, linear_tensor, packed, packed_tensor
from scipy import linalg, special, stats

import sdeinfer as si
from sdeinfer import blocks
from sdeinfer.blocks import MLP, Block, LogMatrixNormal, SelfAttention, law_of_increment, log_moments
from sdeinfer.networks import tokens_with_covariance

BASE = 10.0

TWINS = {
    "gelu with bias": (
        MLP(gain=2.0, bias=0.3, expansion=0.5),
        lambda draws, rng: mlp_gram(2 * V3 + 0.3, lambda z: z * special.ndtr(z), 4, draws=draws, rng=rng),
    ),
    "swiglu": (
        MLP(gain=1.5, activation="silu", gated=True, expansion=0.5),
        lambda draws, rng: mlp_gram(1.5 * V3, lambda z: z * special.expit(z), 4, gated=True, draws=draws, rng=rng),
    ),
    "causal attention with bias": (
        SelfAttention(temperature=0.7, gain=2.0, heads=2, bias=0.1, pattern=si.CAUSAL),
        lambda draws, rng: attention_gram(
            2 * V3 + 0.1, np.tri(3), heads=2, groups=2, size=4, temperature=0.7, draws=draws, rng=rng
        ),
    ),
    "GQA with RoPE": (
        SelfAttention(gain=2.0, heads=4, key_value_heads=2, head_size=4, rope=BASE),
        lambda draws, rng: attention_gram(
            2 * V3, np.ones((3, 3)), heads=4, groups=2, size=4, temperature=1.0, base=BASE, draws=draws, rng=rng
        ),
    ),
}


def isserlis(P) -> np.ndarray:
    """Covariances of products of normals: P_ac P_bd + P_ad P_bc."""
    return packed_tensor(linear_tensor(P))


def assert_by_nodes(values: np.ndarray, expected: np.ndarray) -> None:
    """Means over few scramblings: t-distributed."""
    error = np.maximum(values.std(0, ddof=1) / np.sqrt(len(values)), 1e-12 * np.abs(expected).max())
    t = (values.mean(0) - expected) / error
    z = stats.norm.isf(stats.t.sf(np.abs(t), len(values) - 1))
    assert_within(z, "means over scramblings, as normal scores")


@pytest.mark.one_case("GQA with RoPE")
@pytest.mark.parametrize("name", TWINS)
def test_moments_are_those_of_plain_sampling_and_of_the_chain(name, key):
    branch, draw = TWINS[name]
    assert_moments_agree(branch, draw, key, draws=40_000)


def test_relu_has_the_arc_cosine_kernel():
    mean, _ = scrambled(MLP(gain=1.7, activation="relu", bias=0.2), V3)
    assert_by_nodes(mean, packed(arc_cosine_kernel(1.7 * V3 + 0.2)) / 2)


@pytest.mark.parametrize("gated", [False, True])
def test_identity_has_the_moments_of_normals(gated):
    G, units = 1.3 * V3 + 0.1, 4
    mean, covariance = scrambled(MLP(gain=1.3, activation="identity", bias=0.1, gated=gated, expansion=0.5), V3)
    of_products = isserlis(G)
    second = of_products + np.outer(packed(G), packed(G))
    assert_by_nodes(mean, packed(G) ** (1 + gated))
    if gated:
        of_products = second**2 - np.outer(packed(G), packed(G)) ** 2
    assert_by_nodes(covariance, of_products / units)


@pytest.mark.parametrize("rope", [None, BASE])
@pytest.mark.parametrize(("heads", "groups"), [(4, 4), (4, 2)])
def test_attention_is_uniform_at_a_huge_temperature(heads, groups, rope):
    branch = SelfAttention(1e12, 1.4, heads, groups, 2, pattern=si.CAUSAL, rope=rope, bias=0.1)
    nodes = branch.nodes(3, WIDTH, log2=4)
    A = np.tri(3) / np.arange(1, 4)[:, None]
    P = A @ (1.4 * V3 + 0.1) @ A.T
    found = moments(branch, jnp.asarray(V3), nodes, WIDTH)
    np.testing.assert_allclose(found.mean, P, rtol=1e-9)
    np.testing.assert_allclose(found.covariance, isserlis(P) / (groups * 2), rtol=1e-9)


@pytest.mark.one_case("GQA with RoPE")
@pytest.mark.parametrize("name", TWINS)
def test_moments_are_differentiable(name):
    assert_differentiable(TWINS[name][0])


@jax.jit
def wishart_density(D, mean, covariance):
    return LogMatrixNormal.about(D, mean, log_moments(mean, covariance)).log_density()


def wishart_gap(E: np.ndarray, width: float) -> float:
    """Log density by `LogMatrixNormal` less that of the Wishart law, at D = L e^{E/√n} Lᵀ with L Lᵀ its mean."""
    L = np.linalg.cholesky(V3)
    values, vectors = np.linalg.eigh(E / np.sqrt(width))
    D = L @ (vectors * np.exp(values)) @ vectors.T @ L.T
    density = wishart_density(D, V3, isserlis(V3) / width)
    # W = nD has a density n^p times smaller.
    exact = stats.wishart.logpdf(width * D, width, V3) + len(packed(D)) * np.log(width)
    return float(density) - exact


def test_density_of_a_wishart_matrix():
    """The difference is of order 1/n at the mean, and one of order 1/√n, odd in E, is added away from it."""
    E = np.random.default_rng(2).standard_normal((3, 3))
    E = (E + E.T) / np.sqrt(2)
    gaps = np.array([[wishart_gap(sign * E, n) for sign in (0, 1, -1)] for n in (4e3, 16e3)])
    at_mean, odd, even = gaps[:, 0], gaps[:, 1] - gaps[:, 2], gaps[:, 1] + gaps[:, 2] - 2 * gaps[:, 0]
    assert np.abs(gaps).max() < 0.1
    # Next terms are smaller by 1/n.
    np.testing.assert_allclose([at_mean[0] / at_mean[1], odd[0] / odd[1], even[0] / even[1]], [4, 2, 4], rtol=30 / 4e3)


def test_volume_is_that_of_the_matrix_exponential():
    """det of log D ↦ D, by differences; the next term is a sum of δ⁴/2880 over differences δ of eigenvalues."""
    L, E = np.linalg.cholesky(V3), unvech(0.2 * np.random.default_rng(7).standard_normal(6))

    def exponential(packed_logarithm):
        return packed(L @ linalg.expm(unvech(packed_logarithm)) @ L.T)

    h, at = 1e-5, packed(E)
    jacobian = np.stack([exponential(at + step) - exponential(at - step) for step in h * np.eye(6)]) / (2 * h)
    logarithm = log_moments(jnp.asarray(V3), jnp.asarray(isserlis(V3)))
    law = LogMatrixNormal.about(jnp.asarray(unvech(exponential(at))), jnp.asarray(V3), logarithm)
    assert_agrees(law.logarithm, at)
    delta = np.subtract.outer(*[np.linalg.eigvalsh(E)] * 2)
    exact = -np.linalg.slogdet(jacobian)[1] - 3 * np.log(2 * np.pi)
    np.testing.assert_allclose(law.log_volume, exact, atol=(delta**4).sum() / 2 / 2880 + 1e-8)


def test_density_is_a_polynomial_in_the_log_factor():
    branch, _ = TWINS["gelu with bias"]
    root = np.linalg.cholesky(V3) @ np.random.default_rng(3).standard_normal((3, 12))
    block, nodes = Block(branch, strength=0.7, bias=0.1), branch.nodes(3, WIDTH, log2=8)
    D = jnp.asarray(root @ root.T / 12)
    law = eqx.filter_jit(law_of_increment)(block, jnp.asarray(V3), D, nodes, width=WIDTH)
    c = np.asarray(law.in_factor())
    for log_factor in (-3.0, 0.0, 0.4):
        assert_agrees(c[0] + c[1] * log_factor + c[2] * log_factor**2 + c[3], law.log_density(log_factor))
        residual = law.standardised(log_factor)
        assert_agrees(c[0] + c[1] * log_factor + c[2] * log_factor**2, -residual @ residual / 2)


def test_interpolation_of_polynomials_is_exact():
    coefficients = np.random.default_rng(4).standard_normal((2, 33, 4))
    scaled = LOG_FACTORS / np.log(LARGEST_FACTOR)
    table = np.moveaxis(np.polynomial.chebyshev.chebval(scaled, np.moveaxis(coefficients, 1, 0)), -1, 1)
    for number in (0, 5, len(LOG_FACTORS) // 2, len(LOG_FACTORS) - 1):
        np.testing.assert_array_equal(interpolated(table, LOG_FACTORS[number]), table[:, number])
    for between in (-3.1, -0.01, 1e-9, 2.2):
        expected = np.polynomial.chebyshev.chebval(between / np.log(LARGEST_FACTOR), np.moveaxis(coefficients, 1, 0))
        np.testing.assert_allclose(interpolated(table, between), expected, rtol=1e-9, atol=1e-9)
        single = interpolated(table.astype(np.float32), np.float32(between))
        assert single.dtype == np.float32
        # Between the points the rounding of log_factor is multiplied by the slope, of degree 32.
        np.testing.assert_allclose(single, expected, atol=32**2 * 1e-6)


@pytest.mark.long
@pytest.mark.parametrize("branch", [MLP(), MLP(gated=True), SelfAttention(heads=4)], ids=["gelu", "gated", "attention"])
def test_interpolation_of_densities_between_the_points(branch):
    """Up to a hundredth, where a likelihood is a matter of ones."""
    layer, width = Block(branch, strength=0.5, norm="rms"), 32
    data = si.sample_branches(layer, random_covariance(3), width=width, depth=1, key=jr.key(1))
    order = BlockOrder.of_data(layer, data)
    table = branch_coefficients(data, order)
    for log_factor in (-1.31, 0.37, 2.05):
        moved = dataclasses.replace(layer, branch=branch.reshaped(np.exp(log_factor)))
        exact = branch_coefficients(data, BlockOrder.of_data(moved, data))
        exact = exact[:, :, len(LOG_FACTORS) // 2]
        found = np.asarray(interpolated(table, log_factor))
        density = [c[..., 0] + c[..., 1] * x + c[..., 2] * x**2 + c[..., 3] for c in (exact, found) for x in (-2, 0)]
        np.testing.assert_allclose(density[2:], density[:2], atol=0.01)


def test_moments_of_the_logarithm_by_draws_are_the_leading_order_for_small_fluctuations():
    rng, sampled_log_moments = np.random.default_rng(5), jax.jit(blocks.sampled_log_moments)
    X = rng.standard_normal((200, 3, 3))
    X = np.concatenate([X + X.transpose(0, 2, 1), -X - X.transpose(0, 2, 1)])

    def gaps(size):
        draws = V3 + size * X
        flat = np.stack([packed(each) for each in draws])
        found = sampled_log_moments(jnp.asarray(V3), jnp.asarray(draws))
        leading = log_moments(jnp.asarray(V3), jnp.asarray(np.cov(flat.T, ddof=0)))
        of_sample = 1 - 1 / len(draws)
        covariance = np.asarray(found.covariance) * of_sample - np.asarray(leading.covariance)
        scale = np.abs(leading.covariance).max()
        return np.abs(found.mean - leading.mean).max() / scale, np.abs(covariance).max() / scale

    # Of these draws, which are symmetric, the next order is that of the fluctuations squared.
    one, half = gaps(1e-3), gaps(5e-4)
    assert max(one) < 0.01
    np.testing.assert_allclose(np.divide(one, half), 4, rtol=0.02)


@eqx.filter_jit
def standardised_increments(block, X, keys, nodes):
    """Of networks with weights, in single precision, whose rounding is far below the Monte Carlo errors."""
    single, U = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), (block, block.read(X)))
    drawn = jax.lax.map(lambda key: single.increment(U, key=key), keys, batch_size=100)
    read, increments = (Y @ Y.mT / X.shape[1] for Y in (block.read(X), drawn.astype(float)))
    return jax.vmap(lambda D: law_of_increment(block, read, D, nodes, width=X.shape[1]).standardised(0.0))(increments)


@pytest.mark.one_case
@pytest.mark.parametrize(
    "block",
    [
        Block(MLP(expansion=2.0), norm="rms", skip=0.9, bias=0.1),
        Block(SelfAttention(heads=4, pattern=si.CAUSAL), norm="layer"),
    ],
    ids=["gelu", "causal attention"],
)
def test_standardised_increments_of_networks_are_standard(block, key):
    tokens, networks = jr.split(key)
    X = tokens_with_covariance(jnp.asarray(V3), width=48, key=tokens)
    nodes = block.branch.nodes(3, 48, log2=block.branch.log2_nodes)
    z = standardised_increments(block, X, jr.split(networks, 1_800), nodes)
    assert_mean(z, 0.0)
    assert_variance(z, 1.0)
