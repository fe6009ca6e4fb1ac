"""The noise of attention with a causal mask, against index sums."""

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
import references
from conftest import random_covariance
from references import assert_agrees, packed

import sdeinfer as si
from sdeinfer.covariance import (
    causal_factor_noise,
    causal_spectrum,
    factor,
    running_mean,
    successive_differences,
    unvech,
    vech,
)


def centring(tokens: int, seen: int) -> np.ndarray:
    """H_α of the first so many tokens."""
    mask = (np.arange(tokens) < seen).astype(float)
    return np.diag(mask) - np.outer(mask, mask) / seen


def test_centrings_are_sums_of_successive_differences(V):
    tokens = len(V)
    R = np.asarray(successive_differences(jnp.eye(tokens)))
    for seen in range(1, tokens + 1):
        np.testing.assert_allclose(R[:seen].T @ R[:seen], centring(tokens, seen), atol=1e-14)
        np.testing.assert_allclose(running_mean(V)[seen - 1], V[:seen].mean(axis=0), rtol=1e-13)


def test_spectral_root_is_a_root_of_sigma(causal_layer, V):
    S = causal_layer.limit().diffusion(V).as_operator().as_matrix()
    assert_agrees(S @ S.T, references.diffusion(causal_layer, V))


def test_noise_of_a_factor_is_a_root_of_sigma_for_any_factor(causal_layer, V, key):
    limit, tokens = causal_layer.limit(), len(V)
    rotation, _ = jnp.linalg.qr(jr.normal(key, V.shape))
    for X in (factor(V), jnp.linalg.cholesky(V) @ rotation):

        def move(G, X=X):
            N = causal_factor_noise(X, G, limit.linear_noise, limit.attention_noise)
            return vech(X @ N.T + N @ X.T)

        units = jnp.eye(2 * tokens**2).reshape(-1, *limit.normals(tokens))
        S = jax.vmap(move)(units)
        assert_agrees(S.T @ S, references.diffusion(causal_layer, V))


@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 5, 6])
def test_as_many_coordinates_as_tokens_are_free_of_attention(tokens):
    e = np.asarray(causal_spectrum(random_covariance(tokens)).mixing)
    assert (e[:tokens] == 0).all()
    assert (e[tokens:] > 0).all()
    # The eigenvalues of 𝒜 against Σ_lin.
    V = np.asarray(random_covariance(tokens))
    linear, attention = (
        references.packed_tensor(tensor(V)) for tensor in (references.linear_tensor, references.causal_attention_tensor)
    )
    expected = np.sort(np.linalg.eigvals(np.linalg.solve(linear, attention)).real)
    np.testing.assert_allclose(e, expected, atol=1e-12 * max(1.0, expected.max()))


def test_log_det_and_whitening(causal_layer, V, key):
    sigma, diffusion = references.diffusion(causal_layer, V), causal_layer.limit().diffusion(V)
    np.testing.assert_allclose(diffusion.log_det(), np.linalg.slogdet(sigma)[1], rtol=1e-10, atol=1e-10)
    dV = unvech(jr.normal(key, (len(V) * (len(V) + 1) // 2,)))
    white = diffusion.whiten(dV)
    np.testing.assert_allclose(white @ white, packed(dV) @ np.linalg.solve(sigma, packed(dV)), rtol=1e-10)
    assert_agrees(diffusion.sample(white), dV)


def test_repeated_eigenvalues_do_no_harm_to_the_values(causal_layer):
    V = si.equicorrelated(tokens=5, correlation=0.2, norm=1.3)
    S = causal_layer.limit().diffusion(V).as_operator().as_matrix()
    assert_agrees(S @ S.T, references.diffusion(causal_layer, V))
