"""The density of V′ after one block, against networks with weights and against its exact law for one token."""

import dataclasses

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


@eqx.filter_jit
def outputs(block, X, strengths, keys):
    """V′ of networks with weights, in single precision, whose rounding is far below the Monte Carlo errors."""

    def one(each):
        key, strength = each
        after = dataclasses.replace(single, strength=strength).forward(X, key=key)
        return after @ after.T / X.shape[1]

    single = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), block)
    X = X.astype(jnp.float32)
    return jax.lax.map(one, (keys, strengths.astype(jnp.float32)), batch_size=100).astype(float)


@eqx.filter_jit
def standardised(block, V, after, nodes, width):
    return jax.vmap(lambda D: output_law(block, V, D, nodes, width=width).standardised(0.0))(after)


@pytest.mark.parametrize("strength", [pytest.param(0.1, marks=pytest.mark.long), 1.0])
@pytest.mark.parametrize("name", BLOCKS)
def test_standardised_outputs_of_networks_are_standard(name, strength, key):
    block, width, networks = dataclasses.replace(BLOCKS[name], strength=strength), 64, 2_000
    X = tokens_with_covariance(V3, width=width, key=key)
    after = outputs(block, X, jnp.full(networks, strength), jr.split(key, networks))
    z = np.asarray(standardised(block, V3, after, nodes_of(block, 3, width), width))
    assert_mean(z, 0.0)
    assert_variance(z, 1.0)


GRID = np.linspace(-4.0, 4.0, 65)
"""Standardised values of a log strength."""

PRIOR = stats.norm(np.log(0.4), 0.7)


@eqx.filter_jit
def log_densities(block, V, after, nodes, strengths, width):
    def at(strength, after):
        own = dataclasses.replace(block, strength=strength)
        return output_law(own, V, after, nodes, width=width).log_density()

    return jax.lax.map(lambda D: jax.vmap(lambda g: at(g, D))(strengths), after)


def ranks(block, *, width: int, networks: int, key) -> np.ndarray:
    """Posterior probabilities below the true strengths, which are drawn from the prior."""
    log_strengths = PRIOR.ppf(np.random.default_rng(0).random(networks))
    V = random_covariance(2)
    X = tokens_with_covariance(V, width=width, key=key)
    after = outputs(block, X, jnp.exp(log_strengths), jr.split(key, networks))
    at = PRIOR.mean() + PRIOR.std() * GRID
    log_weight = np.asarray(log_densities(block, V, after, nodes_of(block, 2, width), jnp.exp(at), width))
    weight = np.exp(log_weight + PRIOR.logpdf(at) - log_weight.max(1, keepdims=True))
    # Each point has the weight of its cell; within a cell the distribution function is linear.
    below = np.concatenate([np.zeros((networks, 1)), weight.cumsum(1)], axis=1) / weight.sum(1, keepdims=True)
    edges = np.append(at, 2 * at[-1] - at[-2]) - (at[1] - at[0]) / 2
    return np.array([np.interp(true, edges, each) for true, each in zip(log_strengths, below, strict=True)])


@pytest.mark.parametrize("name", BLOCKS)
def test_posteriors_of_the_strength_are_calibrated(name, key):
    """200 networks: the error of a mean score is .07, that of their variance .1."""
    found = ranks(BLOCKS[name], width=48, networks=200, key=key)
    scores = stats.norm.ppf(found)
    assert_distribution(found, stats.uniform.cdf)
    assert_mean(scores, 0.0)
    assert_variance(scores, 1.0)


@pytest.mark.slow
@pytest.mark.parametrize("name", BLOCKS)
def test_posteriors_of_the_strength_are_calibrated_closely(name, key):
    found = ranks(BLOCKS[name], width=64, networks=3_000, key=key)
    scores = stats.norm.ppf(found)
    print(f"{name}: scores {scores.mean():.3f} ± {len(scores) ** -0.5:.3f}, variance {scores.var():.3f} ± .026")
    assert_distribution(found, stats.uniform.cdf)


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
    one, sizes = jnp.full((1, 1), V), nodes_of(block, 1, width)
    law = jax.jit(jax.vmap(lambda v: output_law(block, one, v[None, None], sizes, width=width).log_density()))
    step = at[1] - at[0]
    np.testing.assert_allclose(exact.sum() * step, 1.0, atol=1e-6)
    return float(special.rel_entr(exact, np.exp(law(jnp.asarray(at)))).sum() * step)


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


@pytest.mark.parametrize("name", BLOCKS)
def test_density_is_differentiable(name):
    block, width = BLOCKS[name], 16
    nodes, shape = nodes_of(block, 3, width, log2=6), block.branch.shape.name
    change = np.random.default_rng(1).standard_normal((2, 3, 3))
    in_V, in_after = (each + each.T for each in change / 9)

    @jax.jit
    def at(h):
        own = block.with_parameters({"strength": 0.5 + h, shape: 1.3 - h})
        return output_law(own, V3 + h * in_V, 1.5 * V3 + h * in_after, nodes, width=width).log_density()

    slope, h = jax.jvp(at, (0.0,), (1.0,))[1], 1e-5
    # The error of a central difference is of order h² plus rounding over h.
    np.testing.assert_allclose(slope, (at(h) - at(-h)) / (2 * h), rtol=1e-6, atol=1e-7)


def test_densities_that_do_not_exist():
    nodes = nodes_of(BLOCKS["gelu"], 3, 16, log2=4)
    for match, change in {
        "position: V′ after a Post-LN block is normalised": {"position": "post"},
        "dropout: the density of V′ has none: observe networks in evaluation mode, got 0.1": {"dropout": 0.1},
    }.items():
        block = dataclasses.replace(BLOCKS["gelu"], **change)
        with pytest.raises(si.InputError, match=match):
            output_law(block, V3, V3, nodes, width=16)
