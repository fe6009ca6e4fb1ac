"""The solver against the SDE: the generator in one small step, and exact laws at a finite time.

The solver has weak order 2. Its bias, quadratic in the step h, is removed by Richardson's extrapolation
(4 E_{h/2} − E_h)/3; what remains is of the order h³ and far below the Monte Carlo errors at the steps chosen here.
"""

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from helpers import references
from helpers.budget import assert_distribution, assert_estimate, assert_mean, assert_variance, mean_and_error
from helpers.cases import LAYERS, masked_layer_of, random_covariance
from helpers.given_normals import moments_of_a_step
from helpers.internals import splitting_step, vech
from helpers.references import extrapolated, packed
from scipy import stats

import sdeinfer as si
from sdeinfer.solve import BrownianSteps


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


def richardson(layer, V0, time: float, step: float, statistic, key, paths: int = 10_000):
    """Estimates of E statistic(V_t) and Var statistic(V_t) without the bias of order h², each with its error."""
    found = []
    for h, k in zip((step, step / 2), jr.split(key), strict=True):
        V = si.simulate(layer, V0, [time], paths=paths, step=h, key=k)[:, 0]
        x = np.asarray(statistic(V))
        found.append((mean_and_error(x), mean_and_error((x - x.mean(axis=0)) ** 2 * paths / (paths - 1))))
    return [
        (extrapolated(whole[0], half[0]), np.hypot(4 * half[1], whole[1]) / 3)
        for whole, half in zip(*found, strict=True)
    ]


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


def test_without_a_gap_the_mean_is_constant_and_the_log_volume_normal(key):
    # E V_t = V_0 and log det V_t ~ N(log det V_0 − a m(m+1) t/2, 2 a m t).
    layer, m, time, V0 = si.ShapedMLP(-1.0, -1.0), 3, 0.25, random_covariance(3)
    a = float(layer.limit().linear_noise)

    def entries_and_log_det(V):
        return jnp.concatenate([V.reshape(-1, 9), jnp.linalg.slogdet(V)[1][:, None]], axis=1)

    (mean, error), (variance, variance_error) = richardson(layer, V0, time, 1 / 32, entries_and_log_det, key)
    assert_estimate(mean[:9], np.ravel(V0), error[:9])
    assert_estimate(mean[9], np.linalg.slogdet(V0)[1] - a * m * (m + 1) * time / 2, error[9])
    assert_estimate(variance[9], 2 * a * m * time, variance_error[9])


def test_norms_keep_their_mean_under_the_relu(key):
    V0 = random_covariance(3)
    (mean, error), _ = richardson(
        LAYERS["feedforward"](), V0, 0.25, 1 / 16, lambda V: jnp.diagonal(V, axis1=-2, axis2=-1), key, paths=5_000
    )
    assert_estimate(mean, np.diagonal(V0), error)


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
