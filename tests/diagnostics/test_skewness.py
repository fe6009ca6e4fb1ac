"""The third cumulant of layers tells orthogonal weights from independent ones, whose variances γ absorbs."""

import jax.random as jr
import numpy as np
import pytest
from helpers.budget import assert_mean
from helpers.cases import random_covariance
from helpers.fits import AtTheMode
from helpers.internals import Path, Residuals, check_skewness, third_moments

import sdeinfer as si
from sdeinfer.infer import innovations, law_at
from sdeinfer.layers import template

GAMMA, WIDTH, TOKENS = 0.6, 48, 4


def weights(kind: str, rng: np.random.Generator) -> np.ndarray:
    W = rng.normal(size=(WIDTH, WIDTH))
    if kind == "sparse":
        W = np.sqrt(2) * W * rng.integers(2, size=W.shape)
    return np.sqrt(WIDTH) * np.linalg.qr(W)[0] if kind == "orthogonal" else W


def attention(X: np.ndarray, kind: str, rng: np.random.Generator) -> np.ndarray:
    """Eq. 1 and 9 of one head, τ0 = 1."""
    Q, K, V = (X @ weights(kind, rng) / np.sqrt(WIDTH) for _ in range(3))
    softmax = np.exp(Q @ K.T / WIDTH)
    A = np.eye(TOKENS) + softmax / softmax.sum(axis=1, keepdims=True) - 1 / TOKENS
    return np.sqrt(1 - GAMMA**2) * X + GAMMA * A @ V


def posterior_of(kind: str) -> Residuals:
    """A fit to covariances, without hidden states."""
    rng, networks = np.random.default_rng(0), []
    for _ in range(60):
        states = [np.sqrt(WIDTH) * np.linalg.qr(rng.normal(size=(WIDTH, TOKENS)))[0].T]
        for _ in range(12):
            states.append(attention(states[-1], kind, rng))
        networks.append([X @ X.T / WIDTH for X in states])
    data = si.covariance_dataset(networks, width=WIDTH)
    sampler = AtTheMode(chains=2, draws=50)
    post = si.fit(si.models.full_path, data, architecture="attention", sampler=sampler, predictions=1, key=jr.key(0))
    return Residuals.of(post)


@pytest.mark.parametrize("kind", ["normal", pytest.param("sparse", marks=pytest.mark.long), "orthogonal"])
def test_orthogonal_weights_are_found_and_others_are_not(kind):
    residuals = posterior_of(kind)
    (verdict,) = check_skewness(residuals).verdicts
    assert verdict.passed == (kind != "orthogonal")
    if kind == "orthogonal":
        draws = residuals.draws["gamma"].values
        assert draws.mean() + 4 * draws.std() < GAMMA  # γ absorbs what they lack
        assert "weights that are orthogonal" in verdict.advice


def path_of(V0: np.ndarray, pattern: si.Pattern, networks: int) -> tuple[Path, si.ShapedAttention]:
    layer = si.ShapedAttention(gamma=0.5, tau0=1.0, pattern=pattern)
    data = si.sample_networks(layer, V0, width=64, depth=1, networks=networks, key=jr.key(0))
    number = np.arange(networks)
    V = data["covariance"].values
    return Path(V, np.full(networks, 64.0), number, 0 * number, np.ones(1, int), pattern), layer


def law_of(layer: si.ShapedAttention):
    u = layer.coordinates.unconstrained(layer.parameters())
    return law_at(template("attention", pattern=layer.pattern), np.asarray(u), widths=np.array([64.0]))


def test_one_token_by_hand():
    """Z = √2 y, and the third Hermite polynomial of y."""
    path, layer = path_of(np.eye(1), si.Pattern(), 5)
    (here,) = innovations(path, law_of(layer))
    y = here.y[:, 0]
    np.testing.assert_allclose(third_moments(path, law_of(layer)), 2**1.5 * (y**3 - 3 * y), rtol=1e-10)


def test_several_tokens_by_sums_over_tokens_in_any_order():
    path, layer = path_of(np.asarray(random_covariance(3)), si.Pattern(), 40)
    law, (rows, columns) = law_of(layer), np.triu_indices(3)
    found, Z = third_moments(path, law), np.empty((40, 3, 3))
    y = np.concatenate([here.y for here in innovations(path, law)])
    Z[:, rows, columns] = Z[:, columns, rows] = y * np.where(rows == columns, np.sqrt(2), 1.0)
    np.testing.assert_allclose(found, np.einsum("sij,sjk,ski->s", Z, Z, Z) - 12 * np.einsum("sii->s", Z), rtol=1e-9)
    order = [2, 0, 1]
    other = Path(path.covariance[:, :, order][..., order], path.width, path.network, path.layer, path.gap, path.pattern)
    np.testing.assert_allclose(third_moments(other, law), found, rtol=1e-6, atol=1e-8)


def test_it_is_uncorrelated_with_the_growth_of_a_layer():
    """The score of γ to first order, for normal increments of three tokens."""
    normals = np.random.default_rng(0).normal(size=(200_000, 3, 3))
    Z = (normals + normals.mT) / np.sqrt(2)
    trace = np.trace(Z, axis1=1, axis2=2)
    assert_mean((np.trace(Z @ Z @ Z, axis1=1, axis2=2) - 12 * trace) * trace, 0.0)


def test_it_does_not_depend_on_the_coordinates_of_a_mask():
    """In those of a causal mask and in those without one, for weak attention, it is nearly the same."""
    path, layer = path_of(np.asarray(si.equicorrelated(tokens=3, correlation=0.3)), si.CAUSAL, 500)
    one = third_moments(path, law_of(layer))
    other = si.ShapedAttention(gamma=0.5, tau0=1e3)  # nearly the same noise without a mask
    two = third_moments(
        Path(path.covariance, path.width, path.network, path.layer, path.gap, si.Pattern()), law_of(other)
    )
    assert np.corrcoef(one, two)[0, 1] > 0.9
