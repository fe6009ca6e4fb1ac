"""The projected normal distribution against its integral over radii, and its samples."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.budget import assert_mean
from scipy import integrate, special

from sdeinfer.meanfield import ProjectedNormal, on_sphere


def log_integral(x, mean, scale):
    """Log of ∫₀^∞ r^{D−1} N(r x; mean, scale² I) dr by quadrature."""
    D, along = len(x), x @ mean
    # The largest value of (D − 1) log r − (r − along)²/2 scale².
    mode = (along + np.sqrt(along**2 + 4 * (D - 1) * scale**2)) / 2
    width = scale / np.sqrt(1 + (D - 1) * (scale / mode) ** 2)

    def exponent(r):
        return (D - 1) * np.log(r / mode) - ((r - along) ** 2 - (mode - along) ** 2) / (2 * scale**2)

    ends = max(mode - 40 * width, 0), mode + 40 * width
    value, _ = integrate.quad(lambda r: np.exp(exponent(r)), *ends, epsabs=0, epsrel=1e-12, limit=500, points=[mode])
    at_mode = np.sum((mode * x - mean) ** 2) / (2 * scale**2)
    return np.log(value) + (D - 1) * np.log(mode) - at_mode - D / 2 * np.log(2 * np.pi * scale**2)


@jax.jit
def log_density(x, mean, scale):
    return ProjectedNormal(mean, scale).log_prob(x)


@pytest.mark.one_case("40")
@pytest.mark.parametrize("dimension", [2, 3, 40])
def test_density_is_the_integral_over_radii(dimension):
    """Along the mean, across it and against it, at −1e3 standard deviations too; and for mean 0."""
    rng = np.random.default_rng(dimension)
    mean = 1.3 * on_sphere(rng.normal(size=dimension))
    across = on_sphere(np.asarray(rng.normal(size=dimension)))
    for scale in (1e-3, 0.3, 5.0):
        beside = on_sphere(mean + scale * rng.normal(size=dimension))
        points = np.stack([beside, across, -beside])
        for each in (np.asarray(mean), np.zeros(dimension)):
            expected = [log_integral(x, each, scale) for x in points]
            np.testing.assert_allclose(log_density(points, each, scale), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.one_case("7")
@pytest.mark.parametrize("k", [2, 7, 39])
def test_slopes_are_those_of_the_recursion(k):
    """N_k′ = k N_{k−1}, by densities at two dimensions, for means of −40 to 40 standard deviations along the point."""
    t = jnp.linspace(-40, 40, 41)

    def log_moment(t, k):
        along = jnp.zeros(k + 1).at[0].set(1.0)
        return ProjectedNormal(t * along, jnp.ones(())).log_prob(along) + k / 2 * np.log(2 * np.pi)

    lower, own = (jax.vmap(lambda t, k=k: log_moment(t, k))(t) for k in (k - 1, k))
    slope = jax.jit(jax.vmap(jax.grad(lambda t: log_moment(t, k))))(t)
    np.testing.assert_allclose(slope, k * np.exp(lower - own), rtol=1e-10)


@pytest.mark.long
def test_samples_have_the_density(key):
    """Powers of the component along the mean, over 10⁵ samples at D = 5, by quadrature of the density."""
    D, scale = 5, 0.6
    mean = jnp.zeros(D).at[0].set(0.8)
    law = ProjectedNormal(mean, jnp.asarray(scale))
    t, weights = special.roots_legendre(200)
    points = np.stack([t, np.sqrt(1 - t**2), *np.zeros((D - 2, len(t)))], axis=1)
    area = 2 * np.pi ** ((D - 1) / 2) / special.gamma((D - 1) / 2)
    density = weights * np.exp(law.log_prob(points)) * area * (1 - t**2) ** ((D - 3) / 2)
    assert density.sum() == pytest.approx(1, abs=1e-10)
    along = np.asarray(law.sample(key, (100_000,)))[:, 0]
    powers = np.arange(1, 4)
    assert_mean(along[:, None] ** powers, density @ t[:, None] ** powers)


def test_single_precision():
    """Relative to the value or absolute, 1e-4; derivatives too."""
    rng = np.random.default_rng(1)
    mean, scale = on_sphere(rng.normal(size=(50, 6))), 10 ** rng.uniform(-3, 1, size=50)
    x = on_sphere(mean + scale[:, None] * rng.normal(size=(50, 6)))

    def results(dtype):
        @jax.jit
        def with_slope(scale):
            def log_prob(scale):
                found = ProjectedNormal(mean.astype(dtype), scale).log_prob(x.astype(dtype))
                return found.sum(), found

            return jax.value_and_grad(log_prob, has_aux=True)(scale)

        (_, found), slope = with_slope(jnp.asarray(scale, dtype))
        slope = np.asarray(slope, float) * scale
        assert found.dtype == dtype
        return np.asarray(found, float), np.asarray(slope, float)

    for found, expected in zip(results(jnp.float32), results(jnp.float64), strict=True):
        np.testing.assert_allclose(found, expected, rtol=2e-3, atol=2e-3)
