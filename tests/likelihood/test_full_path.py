"""The law of a path from its statistics: it must be the dense twin's, for every layer and every parameter."""

import functools
import importlib

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
import references
from budget import assert_distribution
from conftest import LAYERS
from numpy.typing import ArrayLike
from references import wishart_path
from scipy import stats

import sdeinfer as si
from sdeinfer.likelihood import FullPath, PathStatistics, Transitions, path_statistics, transitions
from sdeinfer.observe import covariance_dataset

WIDTH = 40


def log_prob(layer, statistics: PathStatistics) -> np.ndarray:
    return np.asarray(FullPath(layer.limit(), statistics).log_prob(statistics.weights))


def statistics_of(paths, *, width: ArrayLike = WIDTH, layers=None) -> PathStatistics:
    return path_statistics(transitions(covariance_dataset(paths, width=width, layers=layers)))


def terms(path: Transitions, layer) -> tuple[np.ndarray, np.ndarray]:
    """The naive sum over terms of z ~ N(θ₁b₁ + θ₂b₂, a + κ²e) for each network, and the sum of its absolute terms."""
    limit = jax.tree.map(float, layer.limit())
    z, b1, b2, e = map(np.asarray, (path.increments, path.attention_drift, path.relu_drift, path.mixing))
    variance = limit.linear_noise + limit.attention_noise * e
    square = (z - limit.attention_drift * b1 - limit.relu_drift * b2) ** 2 / variance
    log = np.log(2 * np.pi * variance)
    jacobian = np.asarray(path.log_jacobian)
    return (
        jacobian - (square + log).sum(axis=(1, 2)) / 2,
        np.abs(jacobian) + (square + np.abs(log)).sum(axis=(1, 2)) / 2,
    )


@functools.cache
def common_path(tokens: int) -> np.ndarray:
    return np.stack([wishart_path(tokens, 6, width=WIDTH, seed=seed) for seed in range(3)])


def test_log_likelihood_is_the_dense_normal(layer, V):
    paths = common_path(len(V))
    expected = [references.log_likelihood(layer, path, width=WIDTH) for path in paths]
    np.testing.assert_allclose(log_prob(layer, statistics_of(paths)), expected, rtol=1e-10)


def test_networks_of_several_widths_each_have_their_own_law(layer):
    widths = [15, 40, 300]
    paths = np.stack([wishart_path(3, 5, width=n, seed=n) for n in widths])
    expected = [references.log_likelihood(layer, path, width=n) for path, n in zip(paths, widths, strict=True)]
    law = FullPath(layer.limit(), statistics_of(paths, width=widths))
    assert law.batch_shape == (3,)
    assert law.event_shape == law.path.weights.shape[1:]
    np.testing.assert_allclose(law.log_prob(law.path.weights), expected, rtol=1e-10)


@pytest.mark.parametrize("tokens", [1, 2, 4, 6])
@pytest.mark.parametrize("tau0", [1e-3, 1e-1, 1.0, 30.0, 1e3])
@pytest.mark.parametrize("gamma", [0.01, 0.3, 1.0])
def test_statistics_lose_nothing_at_wild_parameters(tokens, tau0, gamma):
    path = transitions(covariance_dataset(common_path(tokens), width=WIDTH))
    layer = si.ShapedTransformer(gamma=gamma, tau0=tau0, c_plus=2.0, c_minus=-3.0)
    expected, scale = terms(path, layer)
    assert (np.abs(log_prob(layer, path_statistics(path)) - expected) <= 1e-10 * scale).all()


@pytest.mark.parametrize("decades", [3, 6, 9, 12])
def test_statistics_lose_nothing_for_nearly_coincident_tokens(layer, decades):
    # Tokens at distances over many decades give values of e over many decades.
    rng = np.random.default_rng(decades)
    X = rng.normal(size=(1, 12)) + np.logspace(0, -decades / 4, 4)[:, None] * rng.normal(size=(4, 12))
    path = [X @ X.T / 12]
    for _ in range(5):
        X = X @ rng.normal(size=(12, 12)) / np.sqrt(12)
        path.append(X @ X.T / 12)
    path = transitions(covariance_dataset(np.stack(path)[None], width=12))
    e = np.asarray(path.mixing)
    assert np.log10(e.max() / e[e > 1e-14 * e.max()].min()) >= 0.8 * decades
    expected, scale = terms(path, layer)
    assert (np.abs(log_prob(layer, path_statistics(path)) - expected) <= 1e-10 * scale).all()


def test_parts_of_a_path_add_up(layer):
    paths = common_path(4)
    whole = log_prob(layer, statistics_of(paths))
    parts = [statistics_of(paths[:, :4]), statistics_of(paths[:, 3:], layers=[3, 4, 5, 6])]
    np.testing.assert_allclose(sum(log_prob(layer, part) for part in parts), whole, rtol=1e-10)


def test_statistics_at_the_same_nodes_add_up():
    # Networks of one data set share their nodes; the law is linear in the weights, so networks pool.
    layer, statistics = LAYERS["transformer"](), statistics_of(common_path(3))
    pooled = PathStatistics(
        statistics.weights.sum(axis=0, keepdims=True), statistics.nodes, statistics.constant.sum(keepdims=True)
    )
    np.testing.assert_allclose(log_prob(layer, pooled), [log_prob(layer, statistics).sum()], rtol=1e-12)


def test_first_feature_counts_the_terms():
    statistics = statistics_of(common_path(4))
    np.testing.assert_allclose(statistics.weights[:, 0].sum(axis=1), 6 * 10, rtol=1e-12)
    # Of each transition one term, with δ = 0 twice, is at e = 0; m = 4 tokens have no other.
    np.testing.assert_allclose(statistics.weights[:, 0, 0], 6)


def test_one_token_has_all_terms_at_e_zero():
    statistics = statistics_of(common_path(1))
    np.testing.assert_array_equal(statistics.weights[:, 0, 0], 6)
    np.testing.assert_array_equal(statistics.weights[:, :, 1:], 0)


def test_more_nodes_change_nothing():
    layer, path = LAYERS["transformer"](), transitions(covariance_dataset(common_path(4), width=WIDTH))
    np.testing.assert_allclose(
        log_prob(layer, path_statistics(path, nodes=200)), log_prob(layer, path_statistics(path)), rtol=1e-11
    )


def test_chunks_change_nothing(monkeypatch):
    module = importlib.import_module("sdeinfer.likelihood._statistics")
    path = transitions(covariance_dataset(common_path(4), width=WIDTH))
    whole = path_statistics(path)
    monkeypatch.setattr(module, "CHUNK", 7)
    np.testing.assert_allclose(path_statistics(path).weights, whole.weights, rtol=1e-9, atol=1e-11)


def test_likelihood_does_not_depend_on_the_order_of_the_tokens(layer):
    paths, order = common_path(5), np.array([4, 2, 0, 1, 3])
    permuted = paths[:, :, order][:, :, :, order]
    np.testing.assert_allclose(
        log_prob(layer, statistics_of(permuted)), log_prob(layer, statistics_of(paths)), rtol=1e-10
    )


def test_likelihood_knows_the_slopes_only_by_the_square_of_their_gap():
    statistics = statistics_of(common_path(3))
    values = [
        log_prob(si.ShapedTransformer(0.5, 0.8, *slopes), statistics) for slopes in ((1, -1), (-1, 1), (5, 3), (0, -2))
    ]
    np.testing.assert_array_equal(values, [values[0]] * 4)


def test_gradient_of_the_likelihood_is_that_of_the_naive_sum():
    path = transitions(covariance_dataset(common_path(4), width=WIDTH))
    statistics = path_statistics(path)

    def fast(values):
        law = FullPath(si.ShapedTransformer(*values).limit(), statistics)
        return law.log_prob(statistics.weights).sum()

    def naive(values):
        limit = si.ShapedTransformer(*values).limit()
        variance = limit.linear_noise + limit.attention_noise * path.mixing
        residual = path.increments - limit.attention_drift * path.attention_drift - limit.relu_drift * path.relu_drift
        return -jnp.sum(residual**2 / variance + jnp.log(variance)) / 2

    values = jnp.array([0.5, 0.6, 0.3, -1.5])
    np.testing.assert_allclose(jax.grad(fast)(values), jax.grad(naive)(values), rtol=1e-10)


def test_data_of_the_euler_chain_have_independent_normal_residuals(key):
    """The law is that of the chain V′ = V + b/n + Σ^{1/2}ξ/√n: its standardised residuals are standard normal."""
    layer, width = LAYERS["transformer"](), 200
    limit = layer.limit()

    @jax.jit
    def chain(key):
        def step(V, key):
            noise = limit.diffusion(V).sample(jr.normal(key, (6,)))
            V = V + limit.drift(V) / width + noise / np.sqrt(width)
            return V, V

        V0 = si.equicorrelated(tokens=3, correlation=0.2, norm=0.7)
        return jnp.concatenate([V0[None], jax.lax.scan(step, V0, jr.split(key, 20))[1]])

    path = transitions(covariance_dataset(jax.vmap(chain)(jr.split(key, 50)), width=width))
    variance = limit.linear_noise + limit.attention_noise * path.mixing
    residual = path.increments - limit.attention_drift * path.attention_drift - limit.relu_drift * path.relu_drift
    assert_distribution(residual / jnp.sqrt(variance), stats.norm.cdf)
