import decimal
import math
from decimal import Decimal

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from helpers.budget import assert_mean
from helpers.cases import random_covariance
from helpers.internals import relu_alignment, relu_drift
from helpers.references import assert_agrees

import sdeinfer as si
from sdeinfer.layers import shaped_relu

compiled_jacobian = jax.jit(jax.jacobian(relu_drift))


def exact_alignment(rho: float) -> tuple[Decimal, Decimal]:
    """The θ = arccos ρ and sin θ − θ cos θ in 50 digits, by Newton's method on Taylor's series of the cosine."""
    theta, cosine = Decimal(math.acos(rho)), Decimal(rho)
    if abs(rho) == 1:
        return theta, theta
    with decimal.localcontext(prec=50):
        for _ in range(6):
            term, count, cos, sin = Decimal(1), 0, Decimal(0), Decimal(0)
            while abs(term) > Decimal("1e-49"):
                cos, sin = (cos, sin + term) if count % 2 else (cos + term, sin)
                term *= theta / (count + 1) * (-1 if count % 2 else 1)
                count += 1
            theta += (cos - cosine) / sin
        return theta, sin - theta * cosine


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32, jnp.float64], ids=lambda x: x.__name__)
def test_alignment_and_its_slope_keep_every_digit_up_to_the_very_ends(dtype):
    gaps = np.append(np.geomspace(1e-16, 1e-1, 46), np.linspace(0.1, 1.0, 31))
    rho = np.concatenate([[-1], gaps - 1, 1 - gaps, [1]]).astype(dtype)
    value, slope = jax.jit(lambda rho: jax.jvp(relu_alignment, (rho,), (jnp.ones_like(rho),)))(rho)
    assert value.dtype == slope.dtype == dtype
    tiny = float(jnp.finfo(dtype).smallest_normal)  # what is smaller has fewer digits
    for at, *found in zip(*(np.asarray(x, np.float64).tolist() for x in (rho, value, slope)), strict=True):
        theta, expected = exact_alignment(at)
        for x, exact in zip(found, (expected, -theta), strict=True):
            error = float(abs(Decimal(x) - exact) / max(abs(exact), Decimal(tiny)))
            assert error <= 4 * float(jnp.finfo(dtype).eps), f"{x} for {exact:.20g} at {at!r}"


def test_second_derivative_of_relu_drift_is_right_off_the_boundary():
    V, direction, step = np.asarray(random_covariance(3)), np.asarray(random_covariance(3, seed=5)), 1e-5

    @jax.jit
    def slopes(V, direction):
        return jax.jvp(jax.grad(lambda V: jnp.sum(relu_drift(V) ** 2)), (V,), (direction,))

    up, down = (np.asarray(slopes(V + h * direction, direction)[0]) for h in (step, -step))
    assert_agrees(slopes(V, direction)[1], (up - down) / (2 * step), rtol=1e-8)


@pytest.mark.parametrize("rho", [1.0, -1.0])
def test_gradient_of_relu_drift_is_finite_at_equal_and_opposite_tokens(rho):
    V = si.equicorrelated(tokens=2, correlation=rho, norm=1.3)
    assert np.isfinite(compiled_jacobian(V)).all()


def test_gradient_of_relu_drift_vanishes_at_equal_tokens():
    V = si.equicorrelated(tokens=3, correlation=1.0)
    # A correlation of 1 − eps has an angle of √(2 eps), which is the slope.
    np.testing.assert_allclose(compiled_jacobian(V), 0, atol=2 * float(jnp.finfo(float).eps) ** 0.5)


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
