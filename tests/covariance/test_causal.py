"""The noise of attention with a causal mask, against index sums."""

import jax
import jax.numpy as jnp
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
    vech,
)


def centring(tokens: int, seen: int) -> np.ndarray:
    """H_α of the first so many tokens."""
    mask = (np.arange(tokens) < seen).astype(float)
    return np.diag(mask) - np.outer(mask, mask) / seen


@jax.jit
def of_diffusion(limit, V, rotation, dV):
    """All that the tests look at, in one program for all layers of one number of tokens."""
    tokens, diffusion = len(V), limit.diffusion(V)
    white = diffusion.whiten(dV)

    def root(X):
        def move(G):
            N = causal_factor_noise(X, G, limit.linear_noise, limit.attention_noise)
            return vech(X @ N.T + N @ X.T)

        return jax.vmap(move)(jnp.eye(2 * tokens**2).reshape(-1, *limit.normals(tokens))).T

    return {
        "root": diffusion.as_operator().as_matrix(),
        "roots of factors": [root(X) for X in (factor(V), jnp.linalg.cholesky(V) @ rotation)],
        "log det": diffusion.log_det(),
        "white": white,
        "coloured": diffusion.sample(white),
    }


def found_at(layer, V):
    """What was found, with the argument dV."""
    rng, tokens = np.random.default_rng(20230630), len(V)
    dV = rng.normal(size=(tokens, tokens))
    dV, (rotation, _) = dV + dV.T, np.linalg.qr(rng.normal(size=V.shape))
    return jax.tree.map(np.asarray, of_diffusion(layer.limit(), V, rotation, dV)) | {"dV": dV}


@jax.jit
def of_tokens(V):
    return successive_differences(jnp.eye(len(V))), running_mean(V), causal_spectrum(V).mixing


def test_centrings_are_sums_of_successive_differences(V):
    tokens = len(V)
    R, means, _ = (np.asarray(x) for x in of_tokens(V))
    for seen in range(1, tokens + 1):
        np.testing.assert_allclose(R[:seen].T @ R[:seen], centring(tokens, seen), atol=1e-14)
        np.testing.assert_allclose(means[seen - 1], np.asarray(V)[:seen].mean(axis=0), rtol=1e-13)


def test_spectral_root_is_a_root_of_sigma(causal_layer, V):
    S = found_at(causal_layer, V)["root"]
    assert_agrees(S @ S.T, references.diffusion(causal_layer, V))


def test_noise_of_a_factor_is_a_root_of_sigma_for_any_factor(causal_layer, V):
    for S in found_at(causal_layer, V)["roots of factors"]:
        assert_agrees(S @ S.T, references.diffusion(causal_layer, V))


@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 5, 6])
def test_as_many_coordinates_as_tokens_are_free_of_attention(tokens):
    e = np.asarray(of_tokens(random_covariance(tokens))[2])
    assert (e[:tokens] == 0).all()
    assert (e[tokens:] > 0).all()
    # The eigenvalues of 𝒜 against Σ_lin.
    V = np.asarray(random_covariance(tokens))
    linear, attention = (
        references.packed_tensor(tensor(V)) for tensor in (references.linear_tensor, references.causal_attention_tensor)
    )
    expected = np.sort(np.linalg.eigvals(np.linalg.solve(linear, attention)).real)
    # Of the eigenvalues of Σ_lin⁻¹𝒜: as many roundings as Σ_lin's condition number, for each of the p entries.
    allowed = len(e) * np.finfo(float).eps * np.linalg.cond(linear) * np.abs(expected).max()
    np.testing.assert_allclose(e, expected, rtol=0, atol=allowed)


def test_log_det_and_whitening(causal_layer, V):
    sigma, found = references.diffusion(causal_layer, V), found_at(causal_layer, V)
    np.testing.assert_allclose(found["log det"], np.linalg.slogdet(sigma)[1], rtol=1e-10, atol=1e-10)
    dV, white = packed(found["dV"]), found["white"]
    np.testing.assert_allclose(white @ white, dV @ np.linalg.solve(sigma, dV), rtol=1e-10)
    assert_agrees(found["coloured"], found["dV"])


def test_repeated_eigenvalues_do_no_harm_to_the_values(causal_layer):
    V = si.equicorrelated(tokens=5, correlation=0.2, norm=1.3)
    S = found_at(causal_layer, V)["root"]
    assert_agrees(S @ S.T, references.diffusion(causal_layer, V))
