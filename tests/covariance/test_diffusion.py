"""Roots, densities and noise of Σ(V), with and without attention patterns, against index sums."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import references
from helpers.cases import CAUSAL, LAYERS, masked_layer_of, matrix_of, random_covariance
from helpers.internals import attention_noise, factor
from helpers.references import assert_agrees, packed
from helpers.sigma import Sigma

import sdeinfer as si
from sdeinfer.covariance import coordinates

MASKED = [*CAUSAL, "causal prompts", "mask"]


def noise(pattern, linear, attention, X, G):
    """X Nᵀ + N Xᵀ for the noise N of a factor of V = XXᵀ."""
    N = jnp.sqrt(linear / 2) * X @ G[:, : len(X)]
    N += jnp.sqrt(attention) * attention_noise(pattern, X, G[:, len(X) :])
    return X @ N.T + N @ X.T


@functools.partial(jax.jit, static_argnums=0)
def of_diffusion(pattern, linear, attention, V, rotation, dV, xi):
    """All that the tests look at, in one program for all layers of one pattern and number of tokens."""
    tokens, sigma = len(V), Sigma(coordinates(V, pattern), linear, attention)
    factors = factor(V), jnp.linalg.cholesky(V) @ rotation
    move = functools.partial(noise, pattern, linear, attention)
    return {
        "root": sigma.root(),
        "roots of factors": [matrix_of(functools.partial(move, X), tokens, 2 * tokens) for X in factors],
        "log det": sigma.log_det(),
        "white": sigma.whiten(dV),
        "returned": sigma.whiten(sigma.sample(xi)),
        "coloured": sigma.at.colour(sigma.at.whiten(dV)),
    }


def coefficients(layer):
    limit = layer.limit()
    return limit.pattern, *(np.asarray(c, float) for c in (limit.linear_noise, limit.attention_noise))


def named(name: str, tokens: int = 5):
    return LAYERS[name]() if name in LAYERS else masked_layer_of(name, tokens)


def symmetric(tokens: int, seed: int = 0) -> np.ndarray:
    S = np.random.default_rng(seed).normal(size=(tokens, tokens))
    return S + S.T


def found_at(layer, V):
    """What was found, with the arguments dV and ξ."""
    rng, tokens = np.random.default_rng(20230630), len(V)
    dV, xi = symmetric(tokens), rng.normal(size=tokens * (tokens + 1) // 2)
    rotation, _ = np.linalg.qr(rng.normal(size=V.shape))
    return jax.tree.map(np.asarray, of_diffusion(*coefficients(layer), V, rotation, dV, xi)) | {"dV": dV, "xi": xi}


@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("name", [*LAYERS, *MASKED])
def test_roots_log_det_and_whitening_are_those_of_sigma(name, tokens):
    layer, V = named(name, tokens), random_covariance(tokens)
    sigma, found = references.diffusion(layer, V), found_at(layer, V)
    for S in (found["root"], *found["roots of factors"]):
        assert_agrees(S @ S.T, sigma)
    np.testing.assert_allclose(found["log det"], np.linalg.slogdet(sigma)[1], rtol=1e-10, atol=1e-10)
    dV = packed(found["dV"])
    np.testing.assert_allclose(found["white"] @ found["white"], dV @ np.linalg.solve(sigma, dV), rtol=1e-10)
    assert_agrees(found["returned"], found["xi"])
    assert_agrees(found["coloured"], found["dV"])


@pytest.mark.parametrize("name", ["transformer", *MASKED])
def test_repeated_eigenvalues_do_no_harm_to_the_values(name):
    layer, V = named(name), si.equicorrelated(tokens=5, correlation=0.2, norm=1.3)
    S = found_at(layer, V)["root"]
    assert_agrees(S @ S.T, references.diffusion(layer, V))


def test_a_singular_covariance_has_no_density():
    V = np.asarray(si.equicorrelated(tokens=5, correlation=1.0)) - 1e-3 * np.diag([0, 0, 0, 0, 1])
    assert np.isnan(found_at(named("transformer"), V)["log det"])
