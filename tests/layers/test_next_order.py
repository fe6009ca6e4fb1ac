"""What finite width adds to a limit, against expectations that know nothing of the derivation.

Attention: the Taylor coefficients of S = A V Aᵀ in ε = 1/(τ0 √n) are polynomials in the normals G of the logits
Y = LGLᵀ, see `pattern_references`. ReLU: E[h hᵀ |h_c| |h_d|] by regression on h_c and h_d, which leaves an integral
over one angle, a trigonometric polynomial between kinks.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.cases import random_covariance
from helpers.internals import (
    VARIANCE_FEATURES,
    Frame,
    absolute_squares,
    angles,
    drift_terms,
    frame,
    relu_drift,
    relu_drift_along,
    spectrum,
    unvech,
    variance_terms,
)
from helpers.pattern_references import all_absolute
from helpers.references import assert_agrees

import sdeinfer as si

FEW = pytest.mark.parametrize("tokens", [1, 2, 4])
B1, B2, B2_ALONG_B1, B1_NEXT = range(4)
RELU_GROWTH, NEXT, HIDDEN, TOKENS, RESPONSE, RELU_GROWTH_SQUARE, HIDDEN_SQUARE = (
    VARIANCE_FEATURES.index(name)
    for name in (
        *("relu_growth", "attention_next", "relu_hidden", "relu_tokens", "relu_response"),
        *("relu_growth_square", "relu_hidden_square"),
    )
)


def frame_of(V) -> Frame:
    V = np.asarray(V)
    return frame(V, spectrum(V))


def terms_of(V):
    V = np.asarray(V)
    drift = drift_terms(V)
    return drift, unvech(variance_terms(V, spectrum(V), drift))


@FEW
def test_relu_drift_along_is_its_derivative(tokens):
    V = np.asarray(random_covariance(tokens, seed=tokens))
    A = np.random.default_rng(tokens).normal(size=(2, tokens, tokens))
    S = A + np.swapaxes(A, -1, -2)
    jvp = jax.jit(lambda direction: jax.jvp(relu_drift, (V,), (direction,))[1])
    for direction, found in zip(S, relu_drift_along(V, S), strict=True):
        np.testing.assert_allclose(found, jvp(direction), rtol=1e-10, atol=1e-14)


def absolute_moments(V: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """E|h_c h_d| and E[h_a h_b |h_c||h_d|] over [a, b, c, d] for h ~ N(0, V)."""
    m = len(V)
    plain, moments = np.empty((m, m)), np.empty((m, m, m, m))
    x, w = np.polynomial.legendre.leggauss(12)
    for c, d in itertools.product(range(m), repeat=2):
        if c == d:
            v = V[c, c]
            regression, second, plain[c, c] = V[:, [c]] / v, np.array([[3 * v**2]]), v
            inner = np.array([[v]])
        else:
            inner = V[np.ix_([c, d], [c, d])]
            L = np.linalg.cholesky(inner)
            # The kinks: where a row of L is orthogonal to (cos θ, sin θ).
            kinks = np.sort(np.mod([np.arctan2(-row[0], row[1]) + k * np.pi for row in L for k in (0, 1)], 2 * np.pi))
            arcs = list(zip(kinks, [*kinks[1:], kinks[0] + 2 * np.pi], strict=True))
            theta = np.concatenate([(lo + hi) / 2 + (hi - lo) / 2 * x for lo, hi in arcs])
            weight = np.concatenate([(hi - lo) / 2 * w for lo, hi in arcs]) / (2 * np.pi)
            y = L @ np.stack([np.cos(theta), np.sin(theta)])
            absolute = weight * np.abs(y[0] * y[1])
            # E r² = 2 and E r⁴ = 8 in the plane.
            plain[c, d], second = 2 * absolute.sum(), 8 * (y * absolute) @ y.T
            regression = V[:, [c, d]] @ np.linalg.inv(inner)
        rest = V - regression @ inner @ regression.T
        moments[:, :, c, d] = regression @ second @ regression.T + rest * plain[c, d]
    return plain, moments


@pytest.mark.parametrize("tokens", [1, 2, 3])
def test_relu_noise_is_exact_to_all_orders_for_up_to_three_tokens(tokens):
    """Four of three tokens have two of one: E[h_a² |h_c h_d|] is all that E[u_i² u_j²] is made of."""
    V = random_covariance(tokens, seed=tokens)
    R, equal, q = np.asarray(frame_of(V).R), np.eye(tokens), 0.3
    plain, moments = absolute_moments(np.asarray(V))
    mixed = np.einsum("ia,ib,jc,jd,abcd->ij", R, R, R, R, moments)
    products = np.einsum("ia,jb,ic,jd,abcd->ij", R, R, R, R, moments)
    fourth = np.einsum("ia,ib,jc,jd,abcd->ij", R, R, R, R, all_absolute(np.asarray(V), plain, moments))
    # φ = √(1 − q) g ± √q u
    mean = (1 - q) * equal + q * R @ plain @ R.T
    square = (1 - q) ** 2 * (1 + 2 * equal) + q * (1 - q) * (mixed + mixed.T + 4 * products) + q**2 * fourth
    variance = terms_of(V)[1]
    found = (1 + q * variance[HIDDEN] + q**2 * variance[HIDDEN_SQUARE]) * (1 + equal)
    np.testing.assert_allclose(found, square - mean**2, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 5])
def test_squares_of_absolute_values_are_sums_over_four_tokens(tokens):
    V = np.asarray(random_covariance(tokens, seed=tokens))
    R = frame_of(V).R
    plain, moments = absolute_moments(V)
    expected = np.einsum("ia,ib,jc,jd,abcd->ij", R, R, R, R, all_absolute(V, plain, moments))
    np.testing.assert_allclose(absolute_squares(R, angles(V), R @ plain @ R.T), expected, rtol=1e-10)


def test_terms_do_not_depend_on_the_order_of_the_tokens():
    V, order = np.asarray(random_covariance(4, seed=4)), np.array([2, 0, 3, 1])
    (drift, variance), (moved, same) = terms_of(V), terms_of(V[order][:, order])
    assert_agrees(moved, np.asarray(drift)[:, order][:, :, order])
    assert_agrees(same, variance)


@pytest.mark.parametrize("correlation", [0.0, 0.3, 0.999])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
def test_repeated_eigenvalues_leave_the_terms_finite(correlation, dtype):
    V = np.asarray(si.equicorrelated(tokens=4, correlation=correlation, norm=1.3), dtype)
    for terms in terms_of(V):
        assert np.isfinite(terms).all()
