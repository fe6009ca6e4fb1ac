"""The solver against the SDE: the generator in one small step, and the exact law of one token at a finite time."""

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from helpers import references
from helpers.budget import assert_distribution, assert_mean, assert_variance
from helpers.cases import LAYERS, masked_layer_of, random_covariance
from helpers.given_normals import moments_of_a_step
from helpers.internals import splitting_step, vech
from helpers.references import packed
from scipy import stats

import sdeinfer as si
from sdeinfer.solve import BrownianSteps


@pytest.mark.one_case("causal prompts")
@pytest.mark.parametrize("name", ["attention", "transformer", "causal prompts", "mask"])
def test_one_small_step_has_the_generators_mean_and_covariance(name, key):
    layer = LAYERS[name]() if name in LAYERS else masked_layer_of(name, 3)
    V, limit, samples, h = random_covariance(3), layer.limit(), 20_000, 1e-2
    X = jnp.linalg.cholesky(V)

    def increment(G, h):
        Y, _ = splitting_step(limit, X, jnp.asarray(h), jnp.sqrt(h) * G, jnp.asarray(h) < 0, tangents=False)
        return vech(Y @ Y.T - V)

    G = jr.normal(key, (samples, *limit.normals(3)))
    drift, covariance = jax.jit(jax.vmap(lambda G: moments_of_a_step(increment, G, h)))(G)
    assert_mean(drift, packed(references.drift(layer, V)))
    assert_mean(covariance, references.diffusion(layer, V))


@pytest.mark.one_case
@pytest.mark.parametrize("name", ["transformer", "feedforward"])
def test_norm_of_one_token_is_log_normal_at_every_step(name, key):
    # log V_t ~ N(log V_0 − a t, 2 a t), whatever else the architecture does.
    layer, time = LAYERS[name](), 0.7
    a = float(layer.limit().linear_noise)
    V = si.simulate(layer, jnp.array([[1.7]]), [time], paths=100_000, step=time, key=key)
    change = np.log(V[:, 0, 0, 0]) - np.log(1.7)
    assert_mean(change, -a * time)
    assert_mean((change + a * time) ** 2, 2 * a * time)
    assert_distribution(change[:2000], stats.norm(-a * time, np.sqrt(2 * a * time)).cdf)


def test_brownian_increments_are_independent_normals_of_the_steps_variance(key):
    brownian = BrownianSteps(shape=jax.ShapeDtypeStruct((2_000,), jnp.float64), key=key)
    increment = jax.jit(lambda t0, t1: brownian.evaluate(t0, t1))
    one, two = increment(0.0, 0.25), increment(0.25, 0.75)
    assert_distribution(one, stats.norm(0, 0.5).cdf)
    assert_variance(two, 0.5)
    assert_mean(one * two, 0)
    np.testing.assert_array_equal(one, increment(0.0, 0.25))
    with pytest.raises(ValueError, match="has increments only"):
        brownian.evaluate(jnp.array(0.5))
