"""Moments of GELU features over the settings of Kedia et al. 2024, "Transformers Get Stable" (arXiv 2403.09635).

Their `simulations/gelu.py` (akhilkedia/TranformersGetStable at 7f48e64) has 450 settings of equicorrelated normals, in
sequences of S = 100 and 1,000 tokens, and compares closed formulas with the means of R = 100,000 sequences.
`expected_output.txt` prints errors in percent: of the mean over the larger of mean and variance, of the variance over
itself, and of the covariance over the variance.

What is compared:
- `MLP.moments` with the integrals, by means over scramblings of its nodes; the integrals with the closed formula.
- Their printed errors with the Monte Carlo noise of their simulation: given the common part u of a sequence its tokens
  are independent, so that the noise of a mean over tokens and of one over pairs follows from moments given u.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.budget import assert_estimate, assert_within
from numpy.typing import ArrayLike
from scipy import special

from sdeinfer.blocks import MLP

SDS = 10.0 ** np.array([-0.5, 0.0, 0.5])
CORRELATIONS = 0.2 * np.arange(5)
SETTINGS = list(itertools.product(SDS, CORRELATIONS))
LENGTHS = (100, 1_000)
GRADIENTS = 15
"""Settings of the gradient for one of the features, each with features of its own."""

SEQUENCES = 100_000
PERCENTILES = np.array([50, 90, 99])
PRINTED = {"mean": [0.1, 1.0, 2.4], "variance": [0.2, 0.6, 1.3], "covariance": [0.1, 0.5, 1.2]}
"""Moments, in the order of all arrays here, with the printed percentiles in percent."""

ROUNDING = 0.05

WIDTH, LOG2_NODES, SCRAMBLINGS = 64, 12, 16
STEP = 0.1


def gelu(z: np.ndarray) -> np.ndarray:
    return z * special.ndtr(z)


def normal_rule(step: float) -> tuple[np.ndarray, np.ndarray]:
    """Nodes and weights of the trapezoidal rule, whose error falls faster than any power of the step."""
    nodes = np.arange(-10.0, 10.0 + step / 2, step)
    weights = np.exp(-(nodes**2) / 2)
    return nodes, weights / weights.sum()


def integrals(sd: float, correlation: float, step: float = STEP) -> np.ndarray:
    """The moments of features φ(x) and φ(y) of normals, by a product of two trapezoidal rules."""
    z, w = normal_rule(step)
    x = gelu(sd * z)
    y = gelu(sd * (correlation * z[:, None] + np.sqrt(1 - correlation**2) * z))
    mean = w @ x
    return np.array([mean, w @ x**2 - mean**2, w @ (x[:, None] * y) @ w - mean**2])


def closed_formula(sd: float, correlation: float) -> np.ndarray:
    """By Stein's lemma, with s the variance and c the covariance of the normals:

    E φ(x) = s/√(2π(1 + s)),
    E φ(x)φ(y) = c(1/4 + arcsin(c/(1 + s))/2π) + (s²(1 + s) + c²(1 − s))/(2π(1 + s)√((1 + s)² − c²)).
    """  # noqa: D400
    s = sd**2

    def product(c: float) -> float:
        root = np.sqrt((1 + s) ** 2 - c**2)
        of_slopes = (s**2 * (1 + s) + c**2 * (1 - s)) / (2 * np.pi * (1 + s) * root)
        return c * (1 / 4 + np.arcsin(c / (1 + s)) / (2 * np.pi)) + of_slopes

    mean = s / np.sqrt(2 * np.pi * (1 + s))
    return np.array([mean, product(s) - mean**2, product(correlation * s) - mean**2])


def by_nodes(seed: int) -> np.ndarray:
    """E φ(x)² and E φ(x)φ(y) for each setting, by `MLP.moments`."""
    branch = MLP(activation="gelu", expansion=1.0)
    nodes = branch.nodes(2, WIDTH, log2=LOG2_NODES, seed=seed)
    V = jnp.array([sd**2 * np.array([[1, rho], [rho, 1]]) for sd, rho in SETTINGS])
    K = np.asarray(jax.vmap(lambda V: branch.moments(V, nodes, width=WIDTH).mean)(V))
    return K[:, 0]


def products(moments: np.ndarray) -> np.ndarray:
    """E φ(x)² and E φ(x)φ(y), from mean, variance and covariance."""
    return moments[..., 1:] + moments[..., :1] ** 2


def moments_of(products: np.ndarray) -> np.ndarray:
    """Mean, variance and covariance: features of independent normals have the product of their means."""
    squared_mean = np.repeat(products[:: len(CORRELATIONS), 1], len(CORRELATIONS))[:, None]
    return np.concatenate([np.sqrt(squared_mean), products - squared_mean], axis=1)


def scales(exact: np.ndarray) -> np.ndarray:
    """What errors are divided by in their table."""
    mean, variance, _ = exact.T
    return np.stack([np.maximum(mean, variance), variance, variance], axis=1)


def monte_carlo_errors(sd: float, correlation: float, tokens: int) -> np.ndarray:
    """Standard errors of their estimates from sequences of this length, to leading order in 1/R."""
    u, w = normal_rule(STEP)
    x = gelu(sd * (np.sqrt(correlation) * u[:, None] + np.sqrt(1 - correlation) * u))
    x = x - w @ x @ w

    def given_u(feature: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        mean = feature @ w
        return mean, feature**2 @ w - mean**2

    def variance_over_u(value: np.ndarray) -> np.ndarray:
        return w @ value**2 - (w @ value) ** 2

    m, v = given_u(x)
    square, of_square = given_u(x**2)
    of_pairs = 2 / (tokens * (tokens - 1)) * (2 * (tokens - 1) * m**2 * v + v**2)  # of a U statistic, given u
    variances = [
        variance_over_u(m) + w @ v / tokens,
        variance_over_u(square) + w @ of_square / tokens,
        variance_over_u(m**2) + w @ of_pairs,
    ]
    return np.sqrt(np.array(variances) / SEQUENCES)


def percentiles(errors: ArrayLike) -> np.ndarray:
    """Theirs: entries ⌊450 × 50, 90, 99 %⌋ of the sorted errors, along the last axis, in percent."""
    ordered = np.sort(errors, axis=-1)
    return 100 * ordered[..., ordered.shape[-1] * PERCENTILES // 100]


@functools.cache
def exact_moments() -> np.ndarray:
    return np.array([integrals(*setting) for setting in SETTINGS])


@pytest.mark.slow
def test_the_closed_formula_is_the_integral():
    fine = np.array([integrals(*setting, step=STEP / 2) for setting in SETTINGS])
    closed = np.array([closed_formula(*setting) for setting in SETTINGS])
    rounding = 1e-12  # thousands of terms of order one
    np.testing.assert_allclose(exact_moments(), fine, rtol=rounding, atol=rounding)
    np.testing.assert_allclose(closed, fine, rtol=rounding, atol=rounding)


@pytest.mark.slow
def test_moments_by_nodes_are_the_integrals():
    exact = exact_moments()
    estimates = np.stack([by_nodes(seed) for seed in range(SCRAMBLINGS)])
    errors = np.stack([np.abs(moments_of(K) - exact) / scales(exact) for K in estimates])
    for name, of_moment in zip(PRINTED, np.moveaxis(errors, -1, 0), strict=True):
        print(
            f"{name}: errors of 2^{LOG2_NODES} nodes, percentiles {percentiles(of_moment.ravel()).round(4)} %, "
            f"largest {100 * of_moment.max():.2g} %; theirs {PRINTED[name]}"
        )
    standard_errors = estimates.std(axis=0, ddof=1) / np.sqrt(SCRAMBLINGS)
    assert_estimate(estimates.mean(axis=0), products(exact), standard_errors)


@pytest.mark.slow
def test_their_errors_are_the_monte_carlo_noise_of_their_simulation():
    rng = np.random.default_rng(20240315)
    exact = np.repeat(scales(exact_moments()), len(LENGTHS), axis=0)
    standard_errors = np.array([monte_carlo_errors(*setting, S) for setting in SETTINGS for S in LENGTHS]) / exact
    of_settings = np.repeat(standard_errors, GRADIENTS, axis=0)
    assert len(of_settings) == 450
    noise = np.abs(of_settings.T * rng.standard_normal((2_000, 3, len(of_settings))))
    replicates = percentiles(noise)
    expected, sd = replicates.mean(axis=0), replicates.std(axis=0, ddof=1)
    printed = np.array(list(PRINTED.values()))
    for name, *values in zip(PRINTED, expected.round(2), sd.round(2), printed, strict=True):
        print(f"{name}: percentiles of the noise {values[0]} ± {values[1]}, printed {values[2]}")
    assert_within(np.maximum(np.abs(printed - expected) - ROUNDING, 0) / sd)
