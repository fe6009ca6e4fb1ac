"""Growth rates about the uniform state, the continuum on the circle, and the equation of equiangular tokens."""

import jax.numpy as jnp
import numpy as np
import pytest
from meanfield.test_clusters import on_circle
from scipy.special import eval_gegenbauer, iv, roots_gegenbauer

from sdeinfer import meanfield

TOKENS = 480
"""On the circle."""

BETAS = (2.0, 5.0, 9.0, 20.0, 50.0, 64.0)
FASTEST = {2: (2, 3, 4, 6, 10, 11), 3: (2, 3, 4, 6, 10, 11), 8: (1, 1, 2, 4, 7, 9)}
"""The fastest modes at `BETAS`, by dimension, from the literature's formula."""


def ring(dimension: int, nodes: int):
    """cos φ and weights of uniform points of S^{D−2} seen from one of its axes."""
    if dimension == 2:
        return np.array([1.0, -1.0]), np.array([0.5, 0.5])
    c, w = roots_gegenbauer(nodes, (dimension - 3) / 2)
    return c, w / w.sum()


def measured_rate(beta: float, dimension: int, k: int, *, normalised: bool, nodes: int = 100) -> float:
    """Growth rate of the displacement ε ∇Y_k of uniform tokens, Y_k the zonal harmonic: the velocity it makes, over it.

    Tokens at polar angles s on rings, with quadrature weights. Seen from a point of the meridian, a token of a ring
    has the coordinates (cos s, sin s cos φ) in the plane of the meridian, and a third that is orthogonal to it.
    """
    nu, step = dimension / 2 - 1, 1e-5
    t, weights = roots_gegenbauer(nodes, nu)
    s, weights = np.arccos(t), weights / weights.sum()
    slope = -np.sin(s) * eval_gegenbauer(k - 1, nu + 1, t)
    slope = slope / np.abs(slope).max()
    c, ring_weights = ring(dimension, nodes)
    flow = meanfield.SelfAttentionFlow(beta, normalised=normalised)

    def velocity(size: float):
        moved = s + size * slope
        meridian = np.stack([np.cos(moved), np.sin(moved), 0 * s], axis=1)
        along = np.stack([-np.sin(moved), np.cos(moved), 0 * s], axis=1)
        rings = [
            np.stack([np.cos(moved), np.sin(moved) * cosine, np.sin(moved) * (1 - cosine**2) ** 0.5], axis=1)
            for cosine in c
        ]
        masses = np.concatenate([weights * w for w in ring_weights])
        found = flow.velocity(jnp.asarray(meridian), jnp.asarray(np.concatenate(rings)), jnp.asarray(masses))
        return (np.asarray(found) * along).sum(axis=1)

    response = (velocity(step) - velocity(-step)) / (2 * step)
    return float((weights * response * slope).sum() / (weights * slope**2).sum())


@pytest.mark.parametrize("dimension", FASTEST)
@pytest.mark.parametrize("beta", [2.0, 9.0, 64.0])
def test_small_displacements_grow_at_these_rates(beta, dimension):
    rates = meanfield.growth_rates(beta, dimension=dimension)
    for k in {1, meanfield.fastest_mode(beta, dimension=dimension)}:
        np.testing.assert_allclose(measured_rate(beta, dimension, k, normalised=True), rates[k - 1], rtol=1e-4)


@pytest.mark.parametrize("dimension", FASTEST)
def test_rates_without_normalisation(dimension):
    rates = meanfield.growth_rates(5.0, dimension=dimension, normalised=False)
    np.testing.assert_allclose(measured_rate(5.0, dimension, 2, normalised=False), rates[1], rtol=1e-4)
    if dimension == 2:
        np.testing.assert_allclose(rates[:4], [k**2 * iv(k, 5.0) / 5.0 for k in range(1, 5)])


@pytest.mark.parametrize("dimension", FASTEST)
def test_the_fastest_modes_are_those_published(dimension):
    assert tuple(meanfield.fastest_mode(beta, dimension=dimension) for beta in BETAS) == FASTEST[dimension]


@pytest.mark.long
@pytest.mark.parametrize("normalised", [True, False])
def test_the_continuum_keeps_its_mass_and_is_the_limit_of_tokens(normalised):
    beta, points, n = 3.0, 128, TOKENS
    theta = np.asarray(meanfield.angles(points))
    density = (1 + 0.5 * np.cos(theta) + 0.3 * np.sin(2 * theta)) / (2 * np.pi)
    ts = np.array([0.2, 0.6]) / (1 if normalised else 6)
    found = meanfield.solve_circle(meanfield.CircleContinuum(beta, normalised=normalised), density, ts)
    np.testing.assert_allclose(found.mean(axis=1) * 2 * np.pi, 1, rtol=1e-10)
    # Tokens at the midpoints of n quantiles; their empirical modes are those of the density to O(n⁻²).
    fine = np.linspace(0, 2 * np.pi, 200_001)
    cumulative = (fine + 0.5 * np.sin(fine) + 0.15 * (1 - np.cos(2 * fine))) / (2 * np.pi)
    start = np.interp((np.arange(n) + 0.5) / n, cumulative, fine)
    moved = meanfield.solve(meanfield.SelfAttentionFlow(beta, normalised=normalised), on_circle(start), ts, rtol=1e-8)
    angle = np.arctan2(moved[..., 1], moved[..., 0])
    for k in (1, 2, 3):
        expected = np.abs(np.exp(1j * k * angle).mean(axis=1))
        np.testing.assert_allclose(meanfield.fourier_modes(found)[:, k], expected, atol=1e-4)


@pytest.mark.parametrize("normalised", [True, False])
def test_the_continuum_has_the_velocity_of_tokens_with_its_masses(normalised):
    beta, theta = 3.0, np.asarray(meanfield.angles(64))
    density = (1 + 0.5 * np.cos(theta) + 0.3 * np.sin(2 * theta)) / (2 * np.pi)
    tokens = jnp.asarray(on_circle(theta))
    flow = meanfield.SelfAttentionFlow(beta, normalised=normalised)
    moves = flow.velocity(tokens, tokens, jnp.asarray(density * (2 * np.pi / 64)))
    found = meanfield.CircleContinuum(beta, normalised=normalised).velocity(jnp.asarray(density))
    np.testing.assert_allclose(found, -moves[:, 0] * np.sin(theta) + moves[:, 1] * np.cos(theta), atol=1e-10)


@pytest.mark.one_case
@pytest.mark.parametrize(("number", "inner", "normalised"), [(9, 0.3, True), (2, -0.5, True), (5, 0.0, False)])
def test_equiangular_tokens_follow_one_equation(number, inner, normalised):
    beta, ts = 2.0, np.array([0.3, 1.0, 4.0])
    start = meanfield.equiangular_tokens(number, inner)
    flow = meanfield.SelfAttentionFlow(beta, normalised=normalised)
    found = meanfield.solve(flow, start, ts, rtol=1e-11, atol=1e-12)
    inner_products = np.einsum("tid,tjd->tij", found, found)[:, *np.triu_indices(number, 1)]
    expected = meanfield.equiangular(beta, number, ts, inner=inner, normalised=normalised)
    np.testing.assert_allclose(inner_products, np.broadcast_to(expected[:, None], inner_products.shape), atol=1e-8)
