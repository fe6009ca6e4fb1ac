"""Simulation-based calibration (Talts et al. 2018): data drawn from the law that is fitted, parameters from the prior.

The limit's likelihood is that of the SDE's own Euler chain, so that its posteriors must be calibrated exactly.
"""

import functools

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from calibration.study import assert_calibrated, draw_parameters, posterior, ranks_of_sets, statistics
from helpers.cases import layer_of
from helpers.internals import ARCHITECTURES, Assumptions
from helpers.sigma import sigma_of

from sdeinfer.layers import template
from sdeinfer.observation import covariance_dataset

DATA_SETS = 256
NETWORKS, DEPTH, WIDTH, TOKENS = 8, 16, 512, 3
IDENTIFIED = ("gamma", "tau0", "c_gap")


def euler_chain(limit, V0, key):
    """Covariances of one network under the law that the likelihood assumes, dt = 1/n."""
    p = TOKENS * (TOKENS + 1) // 2

    def step(V, key):
        noise = sigma_of(limit, V).sample(jr.normal(key, (p,)))
        V = V + limit.drift(V) / WIDTH + noise / np.sqrt(WIDTH)
        return V, V

    _, V = jax.lax.scan(step, V0, jr.split(key, DEPTH))
    return jnp.concatenate([V0[None], V])


@jax.jit
def paths(limit, key):
    """One data set; its tokens are small, norm ½, so that only where τ0 is smaller still chains leave the cone."""
    key_start, key_paths = jr.split(key)
    X = jr.normal(key_start, (TOKENS, 4 * TOKENS))
    V0 = 0.25 * (X @ X.T) / (4 * TOKENS)
    return jax.vmap(functools.partial(euler_chain, limit, V0))(jr.split(key_paths, NETWORKS))


@pytest.mark.slow
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_posteriors_of_the_limits_own_chain_are_calibrated(name, key):
    architecture = template(name)
    assumptions = Assumptions(architecture, "limit")

    def one(key):
        key_parameters, key_paths, key_fit = jr.split(key, 3)
        truth = draw_parameters(Assumptions(architecture), key_parameters)
        V = paths(layer_of(architecture, **truth).limit(), key_paths)
        if not jnp.isfinite(V).all():
            return None  # the chain has left the cone
        found = posterior(statistics(covariance_dataset(np.asarray(V), width=WIDTH), assumptions), key_fit)
        return found.ranks(truth, set(truth) & set(IDENTIFIED))

    assert_calibrated(ranks_of_sets(one, DATA_SETS, key), name)
