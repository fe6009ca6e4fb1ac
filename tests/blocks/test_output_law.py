"""The laws of an increment and of V′ after one block, against networks with weights and an exact law for one token."""

import dataclasses
import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from budget import assert_distribution, assert_mean, assert_variance
from conftest import random_covariance
from references import assert_agrees
from scipy import special, stats

import sdeinfer as si
from sdeinfer.blocks import MLP, Block, SelfAttention, law_of_increment, nodes_of, output_law
from sdeinfer.networks import tokens_with_covariance

V3 = random_covariance(3)
BLOCKS = {
    "gelu": Block(MLP(expansion=2.0), norm="rms", skip=0.9, bias=0.1),
    "causal attention, 4 heads": Block(SelfAttention(heads=4, pattern=si.CAUSAL), norm="layer"),
}


WIDTH = 48
GRID = np.linspace(-4.0, 4.0, 65)
"""Standardised values of a log strength."""

PRIOR = stats.norm(np.log(0.4), 0.7)


@eqx.filter_jit
def outputs(block, X, strengths, keys):
    """ΔΔᵀ/n and V′ of networks with weights; the rounding of single precision is far below the Monte Carlo errors."""
    single = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), block)
    X = X.astype(jnp.float32)

    def one(each):
        key, strength = each
        D = dataclasses.replace(single, strength=strength).increment(single.read(X), key=key)
        return [Y @ Y.T / X.shape[1] for Y in (D, single.with_increment(X, D))]

    found = jax.lax.map(one, (keys, strengths.astype(jnp.float32)), batch_size=100)
    return [V.astype(float) for V in found]


@functools.cache
def sampled(name, ones: int, of_prior: int):
    """The covariance of what the branch reads; log strengths, 0 and then those of the prior; and `outputs`."""
    block, keys = BLOCKS[name], jr.split(jr.key(1))
    X = tokens_with_covariance(V3, width=WIDTH, key=keys[0])
    U = block.read(X)
    log_strengths = np.append(np.zeros(ones), PRIOR.ppf(np.random.default_rng(0).random(of_prior)))
    drawn = outputs(block, X, jnp.exp(log_strengths), jr.split(keys[1], ones + of_prior))
    return U @ U.T / WIDTH, log_strengths, *drawn


@eqx.filter_jit
def standardised(block, read, increments, after, nodes):
    def both(D, V):
        increment = law_of_increment(block, read, D, nodes, width=WIDTH)
        return increment.standardised(0.0), output_law(block, V3, V, nodes, width=WIDTH).standardised(0.0)

    return jax.vmap(both)(increments, after)


ONES, OF_PRIOR = 1_800, 200


@pytest.mark.parametrize("name", BLOCKS)
def test_standardised_increments_and_outputs_of_networks_are_standard(name):
    read, _, increments, after = sampled(name, ONES, OF_PRIOR)
    for z in standardised(BLOCKS[name], read, increments[:ONES], after[:ONES], nodes_of(BLOCKS[name], 3, WIDTH)):
        assert_mean(z, 0.0)
        assert_variance(z, 1.0)


@eqx.filter_jit
def log_densities(block, after, nodes, strengths):
    def at(strength):
        own = dataclasses.replace(block, strength=strength)
        return jax.vmap(lambda V: output_law(own, V3, V, nodes, width=WIDTH).log_density())(after)

    return jax.lax.map(at, strengths).T


def ranks(name, ones: int, of_prior: int) -> np.ndarray:
    """Posterior probabilities below the true strengths, which are drawn from the prior."""
    _, log_strengths, _, after = sampled(name, ones, of_prior)
    at, block = PRIOR.mean() + PRIOR.std() * GRID, BLOCKS[name]
    log_weight = np.asarray(log_densities(block, after[ones:], nodes_of(block, 3, WIDTH), jnp.exp(at)))
    weight = np.exp(log_weight + PRIOR.logpdf(at) - log_weight.max(1, keepdims=True))
    # Each point has the weight of its cell; within a cell the distribution function is linear.
    below = np.concatenate([np.zeros((of_prior, 1)), weight.cumsum(1)], axis=1) / weight.sum(1, keepdims=True)
    edges = np.append(at, 2 * at[-1] - at[-2]) - (at[1] - at[0]) / 2
    return np.array([np.interp(true, edges, each) for true, each in zip(log_strengths[ones:], below, strict=True)])


@pytest.mark.parametrize("name", BLOCKS)
def test_posteriors_of_the_strength_are_calibrated(name):
    """200 networks: the error of a mean score is .07, that of their variance .1."""
    found = ranks(name, ONES, OF_PRIOR)
    scores = stats.norm.ppf(found)
    assert_distribution(found, stats.uniform.cdf)
    assert_mean(scores, 0.0)
    assert_variance(scores, 1.0)


@pytest.mark.slow
@pytest.mark.parametrize("name", BLOCKS)
def test_posteriors_of_the_strength_are_calibrated_closely(name):
    found = ranks(name, 0, 3_000)
    scores = stats.norm.ppf(found)
    print(f"{name}: scores {scores.mean():.3f} ± {len(scores) ** -0.5:.3f}, variance {scores.var():.3f} ± .026")
    assert_distribution(found, stats.uniform.cdf)


@eqx.filter_jit
def log_densities_of_one_token(block, V, after, nodes, width):
    return jax.vmap(lambda v: output_law(block, V, v[None, None], nodes, width=width).log_density())(after)


def divergence(width: int, strength: float) -> float:
    """Kullback–Leibler divergence from the law to the exact one, of one token and a linear branch of n/2 units.

    Then S is V times a χ² variable over its degrees of freedom, and V′ given S a noncentral one.
    """
    V, skip = 1.3, 0.8
    block = Block(MLP(activation="identity", expansion=0.5), strength=strength, skip=skip)
    nodes, weights = np.polynomial.legendre.leggauss(60)
    S = V * stats.chi2.ppf((nodes + 1) / 2, width // 2) / (width // 2)
    mean = skip**2 * V + strength**2 * V
    sd = np.sqrt((4 * skip**2 * strength**2 * V**2 + 6 * strength**4 * V**2) / width)
    at = np.linspace(max(mean - 7 * sd, mean / 100), mean + 9 * sd, 400)
    scale = strength**2 * S / width
    exact = stats.ncx2.pdf(at[:, None] / scale, width, skip**2 * V / scale) / scale @ weights / 2
    arrays = jnp.full((1, 1), V), jnp.asarray(at), nodes_of(block, 1, width), jnp.asarray(width)
    law = np.exp(log_densities_of_one_token(block, *arrays))
    step = at[1] - at[0]
    np.testing.assert_allclose(exact.sum() * step, 1.0, atol=1e-6)
    return float(special.rel_entr(exact, law).sum() * step)


@pytest.mark.parametrize("strength", [0.1, 1.0, 5.0])
def test_density_of_one_token(strength):
    """The skewness counts with its square, of order 1/n, and next orders of mean and variance with theirs, 1/n²."""
    narrow, wide = (divergence(width, strength) for width in (64, 256))
    assert 0 < 3 * wide < narrow < 0.01


@pytest.mark.parametrize("name", BLOCKS)
def test_without_a_skip_it_is_the_law_of_the_increment(name):
    block, width = dataclasses.replace(BLOCKS[name], skip=0.0, norm="rms", strength=0.7), 16
    read, nodes = V3 / jnp.sqrt(jnp.outer(jnp.diagonal(V3), jnp.diagonal(V3))), nodes_of(block, 3, width, log2=6)
    shift = 2 * np.log(0.7)

    @jax.jit
    def both(after):
        increment = law_of_increment(block, read, after, nodes, width=width)
        output = output_law(block, V3, after, nodes, width=width)
        return [
            (increment.standardised(shift), output.standardised(0.0)),
            (increment.log_density(shift), output.log_density()),
        ]

    for of_increment, of_output in both(1.2 * V3):
        assert_agrees(of_output, of_increment)


@pytest.mark.parametrize("name", [pytest.param("gelu", marks=pytest.mark.long), "causal attention, 4 heads"])
def test_density_is_differentiable(name):
    block, width = BLOCKS[name], 16
    nodes, shape = nodes_of(block, 3, width, log2=6), block.branch.shape.name
    change = np.random.default_rng(1).standard_normal((2, 3, 3))
    in_V, in_after = (each + each.T for each in change / 9)

    def at(h):
        own = block.with_parameters({"strength": 0.5 + h, shape: 1.3 - h})
        return output_law(own, V3 + h * in_V, 1.5 * V3 + h * in_after, nodes, width=width).log_density()

    h, along = 1e-5, jax.jit(lambda h: jax.jvp(at, (h,), (1.0,)))
    (_, slope), (up, _), (down, _) = along(0.0), along(h), along(-h)
    # The error of a central difference is of order h² plus rounding over h.
    np.testing.assert_allclose(slope, (up - down) / (2 * h), rtol=1e-6, atol=1e-7)


def test_densities_that_do_not_exist():
    nodes = nodes_of(BLOCKS["gelu"], 3, 16, log2=4)
    for match, change in {
        "position: V′ after a Post-LN block is normalised": {"position": "post"},
        "dropout: the density of V′ has none: observe networks in evaluation mode, got 0.1": {"dropout": 0.1},
    }.items():
        block = dataclasses.replace(BLOCKS["gelu"], **change)
        with pytest.raises(si.InputError, match=match):
            output_law(block, V3, V3, nodes, width=16)
