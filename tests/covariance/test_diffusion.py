"""Roots, densities and noise of Σ(V), with and without attention patterns, against index sums."""

import functools

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
import references
from budget import assert_mean
from conftest import CAUSAL, LAYERS, PATTERNS, masked_layer_of, matrix_of, random_covariance, root_of
from references import assert_agrees, packed

import sdeinfer as si
from sdeinfer.covariance import factor
from sdeinfer.terms._attention_noise import attention_noise


@pytest.fixture(params=[*LAYERS, *CAUSAL, *list(PATTERNS)[1:]])
def layer_of(request):
    """Maps a number of tokens to a layer, with or without an attention pattern."""
    name = request.param
    return (lambda tokens: LAYERS[name]()) if name in LAYERS else functools.partial(masked_layer_of, name)


def noise(limit, X, G):
    """X Nᵀ + N Xᵀ for the noise N of a factor of V = XXᵀ."""
    linear, attention = X @ G[:, : len(X)], attention_noise(limit.pattern, X, G[:, len(X) :])
    N = jnp.sqrt(limit.linear_noise / 2) * linear + jnp.sqrt(limit.attention_noise) * attention
    return X @ N.T + N @ X.T


@jax.jit
def of_diffusion(limit, V, rotation, dV, xi):
    """All that the tests look at, in one program for all layers of one number of tokens."""
    tokens, diffusion = len(V), limit.diffusion(V)
    factors = factor(V), jnp.linalg.cholesky(V) @ rotation
    return {
        "root": root_of(diffusion),
        "roots of factors": [matrix_of(functools.partial(noise, limit, X), tokens, 2 * tokens) for X in factors],
        "log det": diffusion.log_det(),
        "white": diffusion.whiten(dV),
        "returned": diffusion.whiten(diffusion.sample(xi)),
        "coloured": diffusion.spectrum.colour(diffusion.spectrum.whiten(dV)),
    }


def symmetric(tokens: int, seed: int = 0) -> np.ndarray:
    S = np.random.default_rng(seed).normal(size=(tokens, tokens))
    return S + S.T


def found_at(layer, V):
    """What was found, with the arguments dV and ξ."""
    rng, tokens = np.random.default_rng(20230630), len(V)
    dV, xi = symmetric(tokens), rng.normal(size=tokens * (tokens + 1) // 2)
    rotation, _ = np.linalg.qr(rng.normal(size=V.shape))
    return jax.tree.map(np.asarray, of_diffusion(layer.limit(), V, rotation, dV, xi)) | {"dV": dV, "xi": xi}


def test_spectral_root_and_noise_of_any_factor_are_roots_of_sigma(layer_of, V):
    layer = layer_of(len(V))
    found = found_at(layer, V)
    for S in (found["root"], *found["roots of factors"]):
        assert_agrees(S @ S.T, references.diffusion(layer, V))


def test_log_det_and_whitening(layer_of, V):
    layer = layer_of(len(V))
    sigma, found = references.diffusion(layer, V), found_at(layer, V)
    np.testing.assert_allclose(found["log det"], np.linalg.slogdet(sigma)[1], rtol=1e-10, atol=1e-10)
    dV = packed(found["dV"])
    np.testing.assert_allclose(found["white"] @ found["white"], dV @ np.linalg.solve(sigma, dV), rtol=1e-10)
    assert_agrees(found["returned"], found["xi"])
    assert_agrees(found["coloured"], found["dV"])


def test_repeated_eigenvalues_do_no_harm_to_the_values(layer_of):
    V, layer = si.equicorrelated(tokens=5, correlation=0.2, norm=1.3), layer_of(5)
    S = found_at(layer, V)["root"]
    assert_agrees(S @ S.T, references.diffusion(layer, V))


@jax.jit
@jax.value_and_grad
def size_of_noise(V, limit, G):
    return jnp.sum(noise(limit, jnp.linalg.cholesky(V), G) ** 2)


def test_noise_of_a_factor_has_a_gradient_where_eigenvalues_repeat(layer):
    V = np.asarray(si.equicorrelated(tokens=4, correlation=0.2))
    limit, G = layer.limit(), np.random.default_rng(20230630).normal(size=(4, 8))
    direction, step = symmetric(4, seed=1), 1e-5
    slope = np.vdot(size_of_noise(V, limit, G)[1], direction)
    up, down = (size_of_noise(V + sign * step * direction, limit, G)[0] for sign in (1, -1))
    np.testing.assert_allclose(slope, (up - down) / (2 * step), rtol=1e-7)


def test_a_singular_covariance_has_no_density(layer):
    V = np.asarray(si.equicorrelated(tokens=3, correlation=1.0)) - 1e-3 * np.diag([0, 0, 1])
    assert np.isnan(found_at(layer, V)["log det"])


@jax.jit
def root_of_diffusion(limit, V):
    return root_of(limit.diffusion(V))


def test_single_precision_stays_single_and_close(layer):
    V = random_covariance(4)
    single = jax.tree.map(lambda x: np.asarray(x, np.float32), layer.limit())
    sample = np.asarray(root_of_diffusion(single, np.asarray(V, np.float32)))
    assert sample.dtype == np.float32
    # The condition number of V is the amplification of the Cholesky factor's rounding.
    tolerance = 100 * float(jnp.finfo(jnp.float32).eps) * float(np.linalg.cond(V))
    assert_agrees(sample @ sample.T, references.diffusion(layer, V), rtol=tolerance)


def test_samples_have_covariance_sigma(key):
    layer = si.ShapedTransformer(gamma=0.8, tau0=0.5, c_plus=0.0, c_minus=-1.0)
    V = si.equicorrelated(tokens=2, correlation=0.3)
    samples = packed(jax.jit(jax.vmap(layer.limit().diffusion(V).sample))(jr.normal(key, (20_000, 3))))
    assert_mean(samples, 0)
    assert_mean(samples[:, :, None] * samples[:, None, :], references.diffusion(layer, V))
