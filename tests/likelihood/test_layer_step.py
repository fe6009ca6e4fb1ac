"""One layer as a step of the factor: its twin, its moments, and what it has of a real layer that a Gaussian has not."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from helpers import references
from helpers.budget import assert_mean, assert_variance
from helpers.cases import LAYERS, random_covariance
from helpers.internals import LayerLaw, layer_step, power_of, unvech
from helpers.references import assert_agrees
from scipy import stats

import sdeinfer as si

WIDTH = 64
DRAWS = 100_000


@functools.partial(jax.jit, static_argnames=("tokens", "power"))
def _limit_law(limit, tokens: int, power: int) -> LayerLaw:
    return LayerLaw.of_limit(limit, jnp.full(1, 1 / WIDTH), tokens=tokens, power=power)


def limit_law(layer, tokens: int, power: int = 4) -> LayerLaw:
    return _limit_law(layer.limit(), tokens, power)


compiled_step = jax.jit(layer_step)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _draw(step, power: int, count: int, key):
    tokens = step.mean.shape[0]
    xi = jr.normal(key, (count, tokens * (tokens + 1) // 2))
    Y = step.mean[..., 0] + jnp.sqrt(step.variance[..., 0]) * jax.vmap(unvech)(xi)
    return jnp.linalg.matrix_power(jnp.eye(tokens) + Y, power)


def draw(step, power: int, count: int, key) -> np.ndarray:
    """Covariances after the layer, in the coordinates Q: (I + Y)^p."""
    return np.asarray(_draw(step, power, count, key))


@pytest.mark.one_case
@pytest.mark.parametrize(("name", "tokens", "power"), [("transformer", 3, 16), ("transformer", 3, 2), ("mlp", 1, 4)])
def test_its_mean_and_variance_are_those_of_the_law(name, tokens, power, key):
    """Against the index sums of the paper, over 100,000 draws; what is left out goes with n⁻³."""
    V = random_covariance(tokens, seed=tokens)
    law = limit_law(LAYERS[name](), tokens, power)
    V = np.asarray(V)
    step = jax.tree.map(np.asarray, compiled_step(law, V[..., None]))
    single = [np.asarray(x[..., 0]) for x in (law.drift, law.more_drift, law.noise, law.mixing, law.h)]
    mean, variance = references.layer_step(single, np.asarray(V))
    Q, _ = references.spectral_coordinates(np.asarray(V))
    # Columns of Q are known up to their signs.
    signs = np.sign(np.einsum("ij,ij->j", Q, np.asarray(step.Q[..., 0])))
    assert_agrees(step.Q[..., 0] * signs, Q, rtol=1e-9)
    assert_agrees(2 * step.log_volume[0], np.linalg.slogdet(np.asarray(V))[1])
    Z = (draw(step, power, DRAWS, key) - np.eye(tokens)) * np.outer(signs, signs)
    rows, columns = np.triu_indices(tokens)
    assert_mean(Z[:, rows, columns], mean[rows, columns])
    assert_variance(Z[:, rows, columns], variance[rows, columns])


def test_one_token_has_the_variance_of_the_law_up_to_the_third_order():
    """By quadrature: what is left of Var (1 + Y)⁴ over 2ah is of order h²."""
    layer = LAYERS["mlp"]()
    law, (x, w) = limit_law(layer, 1), np.polynomial.hermite_e.hermegauss(20)

    def gap(h):
        step = compiled_step(dataclasses.replace(law, h=jnp.full(1, h)), np.ones((1, 1, 1)))
        F = (1 + step.mean[0, 0, 0] + np.sqrt(step.variance[0, 0, 0]) * x) ** 4
        mean = w @ F / w.sum()
        return w @ (F - mean) ** 2 / w.sum() / (2 * float(layer.limit().linear_noise) * h) - 1

    np.testing.assert_allclose(gap(4e-3) / gap(2e-3), 4, rtol=0.1)


def test_without_noise_it_is_the_drift_up_to_the_third_order():
    V = random_covariance(3, seed=3)
    law = limit_law(LAYERS["transformer"](), 3)
    still = {"noise": 1e-20 * law.noise, "mixing": 0.0 * law.mixing}
    drift = references.drift(LAYERS["transformer"](), np.asarray(V))

    def gap(h):
        step = compiled_step(dataclasses.replace(law, h=jnp.full(1, h), **still), V[..., None])
        F, Q = np.eye(3) + np.asarray(step.mean[..., 0]), np.asarray(step.Q[..., 0])
        return Q @ np.linalg.matrix_power(F, 4) @ Q.T - V - h * drift

    np.testing.assert_allclose(np.abs(gap(2e-3)).max() / np.abs(gap(1e-3)).max(), 8, rtol=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["transformer", "attention", "feedforward", "mlp"])
def test_it_has_about_the_skewness_of_a_real_layer(name, key):
    """Of Z_ii, in units of its standard deviation, over 100,000 layers; Monte Carlo error 0.05."""
    layer, tokens = LAYERS[name](), 2
    power = power_of(layer.skewness)
    V = si.equicorrelated(tokens=tokens, correlation=0.3, norm=0.5)
    data = si.sample_networks(layer, V, width=WIDTH, depth=1, networks=DRAWS, key=key)
    step = layer_step(limit_law(layer, tokens, power), V[..., None])
    R = np.asarray(step.R[..., 0])
    real = np.einsum("ia,nab,ib->ni", R, data["covariance"].values[:, 1], R)
    ours = np.einsum("nii->ni", draw(step, power, DRAWS, jr.fold_in(key, 1)))
    found, by_step = (np.mean([stats.skew(x) / x.std() for x in values.T]) for values in (real, ours))
    print(f"\n{name}: skewness {found:.2f} s, of the step {by_step:.2f} s, of a Gaussian 0")
    assert abs(by_step - found) < 0.4


@pytest.mark.parametrize("power", [2, 4, 8, 16])
def test_a_power_has_the_skewness_of_its_step(power):
    """The skewness of (1 + y)^p over its relative standard deviation, for a normal y of small variance."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(20)
    values = (1 + 1e-3 * nodes) ** power
    mean = np.average(values, weights=weights)
    second, third = (np.average((values - mean) ** k, weights=weights) for k in (2, 3))
    skewness = third * mean / second**2
    assert {power_of(skewness + shift) for shift in (-0.05, 0.0, 0.05)} == {power}
