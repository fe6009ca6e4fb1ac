"""Observed paths for the tests of the likelihood, and their log densities in both laws."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from helpers import references
from helpers.internals import (
    EVERY_TOKEN,
    AbstractPath,
    FullPath,
    Path,
    PathStatistics,
    Spectrum,
    Terms,
    observed_path,
    path_statistics,
)
from helpers.moment_references import dense_log_density
from helpers.references import wishart_path
from numpy.typing import ArrayLike

from sdeinfer.covariance import Pattern, coordinates
from sdeinfer.layers import FiniteWidth, Limit
from sdeinfer.likelihood import with_pattern
from sdeinfer.observation import covariance_dataset

WIDTH = 40
LAWS = ("limit", "finite-width")


def law_of(layer, path: AbstractPath, law: str):
    """With coefficients of all terms, zero for those that a layer has not: one program serves all layers."""
    own = layer.limit() if law == "limit" else jax.vmap(layer.finite_width)(path.widths)
    of = own if law == "limit" else own.limit
    limit = Limit(of.attention_drift, of.relu_drift, of.linear_noise, of.attention_noise, pattern=of.pattern)
    own = limit if law == "limit" else eqx.tree_at(lambda law: law.limit, own, limit)
    return jax.tree.map(lambda x: jnp.asarray(x, float), own)


@jax.jit
def log_prob_of_law(law, path: PathStatistics):
    return FullPath(law, path).log_prob(path.weights)


def log_prob(layer, statistics: PathStatistics, law: str = "limit") -> np.ndarray:
    """By NumPy, which compiles nothing."""
    on_host, layer = jax.tree.map(np.asarray, (statistics, layer))
    laws = [FiniteWidth.of_limit(layer.limit()) if law == "limit" else layer.finite_width(n) for n in on_host.widths]
    return on_host.log_density(jax.tree.map(lambda *each: np.stack(each), *laws), on_host.weights)


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


def forms(V, pattern: Pattern = EVERY_TOKEN) -> np.ndarray:
    """The W_q of the coordinates ⟨W_q, dV⟩ in which densities are products."""
    at = coordinates(np.asarray(V), pattern)
    if not isinstance(at, Spectrum):
        return at.forms()[0]
    return references.spectral_forms(V)


def dense_log_likelihood(layer, path, width: float) -> float:
    """Log density of a path by the law of layers of finite width, from sums over tokens and dense normals."""
    pattern = layer.limit().pattern
    ends = zip(path[:-1], path[1:], strict=True)
    return sum(dense_log_density(layer, V, after, width, forms(V, pattern)) for V, after in ends)
