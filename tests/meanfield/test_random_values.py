"""Random value matrices: the exponent of antipodal tokens by Monte Carlo."""

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from budget import assert_distribution, assert_estimate, mean_and_error
from scipy import stats

from sdeinfer import InputError, meanfield

PATHS, TIME, STEP, APART = 4096, 2.0, 0.005, 1e-7


@pytest.mark.slow
@pytest.mark.parametrize(("dimension", "beta"), [(5, 1.0), (8, 0.7), (8, 1.5)])
def test_nearly_antipodal_tokens_part_with_this_exponent(dimension, beta, key):
    """The bias of the step, of weak order 1, is a fifth of the Monte Carlo error of 0.015 or less."""
    flow = meanfield.SelfAttentionFlow(beta)
    x = jnp.eye(dimension)[0]
    y = meanfield.on_sphere(-x + APART * jnp.eye(dimension)[1])

    @jax.jit
    @jax.vmap
    def growth(key):
        end = meanfield.solve_random_values(flow, jnp.stack([x, y]), np.array([TIME]), step=STEP, key=key)[0]
        return jnp.log(jnp.linalg.norm(end.sum(axis=0)) / APART) / TIME

    found, error = mean_and_error(growth(jr.split(key, PATHS)))
    assert_estimate(found, meanfield.antipodal_exponent(beta, dimension=dimension), error)


def test_one_step_of_one_token_has_its_exact_law(key):
    """x + √h ξ on the sphere: (D − 1)^½ cot of the angle is of Student's noncentral t law, with 1/√h for its mean."""
    dimension, step = 20, 0.04
    flow, x = meanfield.SelfAttentionFlow(1.0), jnp.eye(dimension)[:1]

    @jax.jit
    @jax.vmap
    def cosine(key):
        return meanfield.solve_random_values(flow, x, np.array([step]), step=step, key=key)[0, 0, 0]

    found = np.asarray(cosine(jr.split(key, 20_000)))
    t = found * np.sqrt((dimension - 1) / (1 - found**2))
    assert_distribution(t, stats.nct(dimension - 1, step**-0.5).cdf)


def test_antipodal_tokens_stay_antipodal_and_on_the_sphere(key):
    x = jnp.array([[0.0, 0.6, 0.8], [0.0, -0.6, -0.8]])
    found = meanfield.solve_random_values(meanfield.SelfAttentionFlow(2.0), x, [0.1, 0.5], step=0.02, key=key)
    np.testing.assert_allclose(found.sum(axis=1), 0, atol=1e-12)
    np.testing.assert_allclose(jnp.linalg.norm(found, axis=-1), 1)
    again = meanfield.solve_random_values(meanfield.SelfAttentionFlow(2.0), x, [0.5], step=0.02, key=key)
    np.testing.assert_array_equal(again[-1], found[-1])


def test_times_that_are_no_multiples_of_the_step_are_refused(key):
    x = meanfield.random_tokens(2, 3, key=key)
    with pytest.raises(InputError, match="ts: increasing multiples of the step 0.02"):
        meanfield.solve_random_values(meanfield.SelfAttentionFlow(2.0), x, [0.03], step=0.02, key=key)
