"""Observed paths for the tests of the likelihood, and their log densities in both laws."""

import functools

import jax
import numpy as np
import references
import scipy.linalg
from numpy.typing import ArrayLike
from references import wishart_path
from scipy.stats import multivariate_normal

from sdeinfer.covariance import EVERY_TOKEN, Pattern, coordinates, spectrum, unvech
from sdeinfer.layers import drift_terms, variance_terms
from sdeinfer.likelihood import FullPath, Path, PathStatistics, Terms, observed_path, path_statistics, with_pattern
from sdeinfer.observation import covariance_dataset

WIDTH = 40
LAWS = ("limit", "finite-width")


_laws_of_widths = jax.jit(lambda layer, widths: jax.vmap(layer.finite_width)(widths))


def law_of(layer, statistics: PathStatistics, law: str):
    return layer.limit() if law == "limit" else _laws_of_widths(layer, statistics.widths)


@jax.jit
def _log_prob(law, path):
    return FullPath(law, path).log_prob(path.weights)


def log_prob(layer, statistics: PathStatistics, law: str = "limit") -> np.ndarray:
    """In a program for each shape of the statistics, whatever the layer."""
    return np.asarray(_log_prob(law_of(layer, statistics, law), statistics))


def assert_dense_normals(found, layer, paths, widths) -> None:
    """Log likelihoods of networks are those of dense normals, up to the rounding of these."""
    for value, path, width in zip(np.asarray(found), paths, np.broadcast_to(widths, len(paths)), strict=True):
        allowed = references.log_likelihood_rounding(layer, path, width=width)
        np.testing.assert_allclose(value, references.log_likelihood(layer, path, width=width), rtol=0, atol=allowed)


def path_of(paths, *, width: ArrayLike = WIDTH, layers=None, pattern: Pattern = EVERY_TOKEN) -> Path:
    data = covariance_dataset(np.asarray(paths), width=width, layers=layers)
    return observed_path(with_pattern(data, pattern))


def statistics_of(paths, **options) -> PathStatistics:
    return path_statistics(path_of(paths, **options))


def all_terms(path: Path) -> Terms:
    return path.terms(np.arange(len(path)))


def residual_and_variance(terms: Terms, layer) -> tuple[np.ndarray, np.ndarray]:
    """The z − θ₁b₁ − θ₂b₂ and a + κ²e of the limit."""
    limit = layer.limit()
    drift = limit.attention_drift * terms.drift[:, 0] + limit.relu_drift * terms.drift[:, 1]
    return np.asarray(terms.increments - drift), np.asarray(limit.linear_noise + limit.attention_noise * terms.mixing)


def naive(path: Path, terms: Terms, layer) -> tuple[np.ndarray, np.ndarray]:
    """The naive sum over terms of the limit for each network, and the sum of its absolute terms."""
    residual, variance = residual_and_variance(terms, layer)
    square, log, jacobian = residual**2 / variance, np.log(2 * np.pi * variance), np.asarray(terms.log_jacobian)
    value, scale = jacobian - (square + log).sum(axis=1) / 2, np.abs(jacobian) + (square + np.abs(log)).sum(axis=1) / 2
    networks = len(path.width)
    return np.bincount(path.network, value, networks), np.bincount(path.network, scale, networks)


@functools.cache
def common_path(tokens: int) -> np.ndarray:
    return np.stack([wishart_path(tokens, 6, width=WIDTH, seed=seed) for seed in range(3)])


def drifts_and_features(V):
    drift = drift_terms(V)
    return drift, unvech(variance_terms(V, spectrum(V), drift))


def dense_log_density(law, V, after, width: int) -> float:
    """Normal on the entries α ≤ β with the mean and the spectral variances of a layer of finite width."""
    m, (drifts, features) = len(V), drifts_and_features(V)
    delta, Q = scipy.linalg.eigh(np.eye(m) - 1 / m, np.linalg.inv(V))  # Qᵀ H Q = diag δ, QQᵀ = V
    mean = V + np.tensordot(law.drift, drifts, 1) / width
    covariance = np.zeros((m * (m + 1) // 2,) * 2)
    for i in range(m):
        for j in range(i, m):
            e, multiplicity = (delta[i] ** 2 + delta[j] ** 2) / m**2, 1 + (i == j)
            v = law.limit.linear_noise + law.limit.attention_noise * e
            v += (law.variance + e * law.variance_mixing) @ features[:, i, j]
            direction = references.packed(np.outer(Q[:, i], Q[:, j]) + np.outer(Q[:, j], Q[:, i])) / multiplicity
            covariance += np.outer(direction, direction) * float(v) * multiplicity / width
    return float(multivariate_normal.logpdf(references.packed(after), references.packed(mean), covariance))


def dense_pattern_density(law, V, after, width: int) -> float:
    """The same with an attention pattern: Σ_q v_q U_q U_qᵀ, with the coordinates of NumPy."""
    at, pattern = coordinates(V, law.limit.pattern), law.limit.pattern
    drift = drift_terms(V, pattern)
    features, e = variance_terms(V, at, drift, pattern), np.asarray(at.mixing)
    base = law.limit.linear_noise + law.limit.attention_noise * e
    change = ((law.variance[:, None] + law.variance_mixing[:, None] * e) * features).sum(axis=0) / base
    assert (change > -0.5).all()  # where the likelihood bounds nothing
    U = references.packed(at.forms()[1])
    covariance = np.einsum("qa,q,qb->ab", U, base * (1 + change), U) / width
    mean = V + np.tensordot(law.drift, drift, 1) / width
    return float(multivariate_normal.logpdf(references.packed(after), references.packed(mean), covariance))
