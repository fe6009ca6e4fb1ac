import math

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
import references
from budget import assert_mean
from conftest import random_covariance
from references import assert_agrees

import sdeinfer as si
from sdeinfer.layers import relu_alignment, relu_drift, shaped_relu


@pytest.mark.parametrize(("rho", "nu"), [(1.0, 0.0), (0.0, 1 / (2 * math.pi)), (-1.0, 0.5)])
def test_nu_at_its_three_known_points(rho, nu):
    gap = 1.7
    np.testing.assert_allclose(gap**2 * relu_alignment(rho) / (2 * math.pi), gap**2 * nu, rtol=1e-15)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
def test_alignment_is_positive_and_decreasing_up_to_the_very_ends(dtype):
    eps = float(jnp.finfo(dtype).eps)
    rho = jnp.array([-1, -1 + eps, -0.9, -0.1, 0, 0.5, 0.99, 1 - eps, 1], dtype)
    value = relu_alignment(rho)
    assert value.dtype == dtype
    assert (jnp.diff(value) <= 0).all()
    assert (value >= -eps).all()


def test_alignment_is_nu_between():
    for rho in np.linspace(-0.99, 0.99, 23):
        expected = references.nu(rho, 0.5, -1.0)
        np.testing.assert_allclose(1.5**2 / (2 * math.pi) * relu_alignment(rho), expected, rtol=1e-12)


@pytest.mark.parametrize(("rho", "slope"), [(1.0, 0.0), (-1.0, -math.pi), (0.0, -math.pi / 2), (0.3, -math.acos(0.3))])
def test_slope_of_alignment_is_finite_and_exact(rho, slope):
    np.testing.assert_allclose(jax.grad(relu_alignment)(rho), slope, rtol=1e-15)
    assert math.isfinite(jax.jvp(relu_alignment, (rho,), (1.0,))[1])


def test_relu_drift_is_zero_on_the_diagonal(V):
    np.testing.assert_array_equal(np.diagonal(relu_drift(V)), 0)


def test_gradient_of_relu_drift_is_right_off_the_boundary():
    V = random_covariance(3)
    direction = random_covariance(3, seed=5)
    slope = jax.jvp(relu_drift, (V,), (direction,))[1]
    step = 1e-5
    assert_agrees(slope, (relu_drift(V + step * direction) - relu_drift(V - step * direction)) / (2 * step), rtol=1e-8)
    # The diagonal is identically zero, so nothing moves it.
    np.testing.assert_array_equal(np.diagonal(slope), 0)


@pytest.mark.parametrize("rho", [1.0, -1.0])
def test_gradient_of_relu_drift_is_finite_at_equal_and_opposite_tokens(rho):
    V = si.equicorrelated(tokens=2, correlation=rho, norm=1.3)
    assert jnp.isfinite(jax.jacobian(relu_drift)(V)).all()


def test_gradient_of_relu_drift_vanishes_at_equal_tokens():
    V = si.equicorrelated(tokens=3, correlation=1.0)
    # A correlation of 1 − eps has an angle of √(2 eps), which is the slope.
    np.testing.assert_allclose(jax.jacobian(relu_drift)(V), 0, atol=2 * float(jnp.finfo(float).eps) ** 0.5)


def test_shaped_relu_has_its_slopes_and_unit_second_moment():
    width, c_plus, c_minus = 25, jnp.array(0.5), jnp.array(-1.0)
    above, below = shaped_relu(jnp.array([2.0, -2.0]), c_plus, c_minus, width)
    np.testing.assert_allclose(above / -below, 1.1 / 0.8)
    # E σ(g)² is half of each side's second moment.
    np.testing.assert_allclose((above**2 + below**2) / 8, 1)


def test_alignment_is_the_gaussian_average_of_the_relu(key):
    """E[σ_s(g)σ_s(h)] − ρ E[σ_s(g)²] = (s₊ − s₋)²/(2π) (√(1−ρ²) − ρ arccos ρ), the origin of ν, for any slopes."""
    rho, width = -0.4, 1  # at n = 1 the slopes are far from one, and the identity is still exact
    g, other = jr.normal(key, (2, 200_000))
    h = rho * g + math.sqrt(1 - rho**2) * other
    c_plus, c_minus = jnp.array(0.5), jnp.array(-0.8)
    he = 2 / (1.5**2 + 0.2**2)
    product = shaped_relu(g, c_plus, c_minus, width) * shaped_relu(h, c_plus, c_minus, width)
    assert_mean(product, rho + he * 1.3**2 * float(relu_alignment(rho)) / (2 * math.pi))
