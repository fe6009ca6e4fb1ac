"""Parameters that change with depth: paths, networks with and without weights, tangents and derivatives."""

import diffrax
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from helpers.budget import assert_same_distribution
from helpers.cases import LAYERS

import sdeinfer as si

V0 = np.asarray(si.equicorrelated(tokens=3, correlation=0.3, norm=1.0))
TIMES = [0.1, 0.25]


def line(start, end):
    return diffrax.LinearInterpolation(jnp.array([0.0, 0.25]), jnp.array([start, end]))


@pytest.mark.long
def test_a_constant_profile_changes_nothing(key):
    layer = LAYERS["transformer"]()
    over_depth = si.OverDepth(layer, gamma=line(layer.gamma, layer.gamma), tau0=lambda time: 0.6 + 0 * time)
    settings = {"paths": 64, "key": key}
    plain, profiled = (si.simulate(each, V0, TIMES, **settings) for each in (layer, over_depth))
    np.testing.assert_allclose(profiled, plain, rtol=1e-12)


def test_norms_have_the_integrated_variance(key):
    """Var log V_T = 2 ∫ a(t) dt for one token, with a = γ²(2 − γ²); by the midpoints of two steps."""
    layer = si.OverDepth(si.ShapedAttention(gamma=0.5, tau0=1.0), gamma=line(0.1, 0.9))
    V = si.simulate(layer, np.eye(1), [0.25], paths=4096, step=0.125, key=key)[:, 0, 0, 0]
    gamma = np.array([0.3, 0.7])
    variance = 2 * 0.25 * np.mean(gamma**2 * (2 - gamma**2))
    exact = np.exp(-variance / 2 + np.sqrt(variance) * np.asarray(jr.normal(jr.fold_in(key, 1), (100_000,))))
    assert_same_distribution(V, exact)


def test_layers_have_the_parameters_of_their_middle(key):
    """A γ that steps up after three quarters of the third layer is that of the fourth and later ones."""
    weak = si.ShapedAttention(0.2, 1.0)
    stepped = si.OverDepth(weak, gamma=lambda time: jnp.where(time * 8 < 2.75, 0.2, 0.7))
    settings = {"width": 8, "depth": 4, "networks": 2, "key": key}
    found, same = (si.sample_networks(each, V0, **settings)["covariance"].values for each in (stepped, weak))
    np.testing.assert_allclose(found[:, :4], same[:, :4], rtol=1e-12)
    assert np.abs(found[:, 4] - same[:, 4]).max() > 0.01
    earlier = si.OverDepth(weak, gamma=lambda time: jnp.where(time * 8 < 2.25, 0.2, 0.7))
    again = si.sample_networks(earlier, V0, **settings)["covariance"].values
    assert np.abs(again[:, 3] - same[:, 3]).max() > 0.01


@pytest.mark.slow
@pytest.mark.parametrize("method", ["chain", "weights"])
def test_networks_agree_with_paths(method, key):
    layer = si.OverDepth(LAYERS["transformer"](), gamma=line(0.1, 0.6))
    V = si.simulate(layer, V0, [0.25], paths=2000, key=key)[:, 0]
    data = si.sample_networks(layer, V0, width=64, depth=16, networks=500, method=method, observe_every=16, key=key)
    networks = data["covariance"].values[:, -1]
    for statistic in (lambda V: np.log(V[:, 0, 0]), lambda V: V[:, 0, 1] / np.sqrt(V[:, 0, 0] * V[:, 1, 1])):
        assert_same_distribution(statistic(networks), statistic(np.asarray(V)))


@pytest.mark.slow
def test_derivatives_by_a_profile_are_those_of_differences(key):
    """First ones backwards, and second ones, forwards over backwards."""
    layer, direction = LAYERS["transformer"](), jnp.array([0.6, -0.8])

    def mean(ends):
        V = si.simulate(si.OverDepth(layer, gamma=line(*ends)), V0, [0.25], paths=32, key=key)
        return (V[:, 0] ** 2).mean()

    @jax.jit
    def derivatives(ends):
        return jax.jvp(jax.value_and_grad(mean), (ends,), (direction,))

    ends, change = jnp.array([0.2, 0.5]), 1e-5
    (_, gradient), (slope, second) = derivatives(ends)
    (up, upper), (down, lower) = (derivatives(ends + sign * change * direction)[0] for sign in (1, -1))
    np.testing.assert_allclose([gradient @ direction, slope], (up - down) / (2 * change), rtol=1e-6)
    np.testing.assert_allclose(second, (upper - lower) / (2 * change), rtol=1e-6)


def test_a_function_may_close_over_what_is_differentiated(key):
    def mean(end):
        layer = si.OverDepth(si.ShapedAttention(gamma=0.5, tau0=1.0), gamma=lambda time: 0.1 + time * end)
        return si.simulate(layer, np.eye(1), TIMES, paths=8, key=key).mean()

    change, backwards = 1e-5, jax.jit(jax.value_and_grad(mean))
    (_, slope), (up, _), (down, _) = (backwards(0.5 + step) for step in (0.0, change, -change))
    np.testing.assert_allclose(slope, (up - down) / (2 * change), rtol=1e-6)
