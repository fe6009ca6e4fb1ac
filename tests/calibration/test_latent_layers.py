"""Calibration of fits with latent layers, m = 2, parameters from the prior.

Data from the law that is fitted, of which every fourth layer, or the last, is seen; and data from real networks.
"""

import functools

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from calibration.study import assert_calibrated, draw_parameters, ranks_of_sets
from helpers.cases import layer_of
from helpers.internals import (
    Assumptions,
    LayerLaw,
    bridges_of,
    layer_step,
    power_of,
    problem_of,
    singular,
    unvech,
)
from helpers.ranges import marked

import sdeinfer as si
from sdeinfer.infer import Metropolis
from sdeinfer.layers import template
from sdeinfer.likelihood import any_transitions
from sdeinfer.models import thinned_path
from sdeinfer.observation import covariance_dataset

DATA_SETS = 128
NETWORKS, DEPTH, WIDTH, TOKENS = 16, 16, 256, 2
IDENTIFIED = ("gamma", "tau0", "c_gap")
REAL_DATA_SETS = 64
REAL_NETWORKS, REAL_WIDTH = 64, 64
"""Their posteriors know γ to 1 %: a law whose variances were a few percent off would be seen."""

SAMPLER = Metropolis(chains=1, warmup=500, draws=1500)
EFFECTIVE = 200
"""Independent draws among these, about."""


@functools.partial(jax.jit, static_argnames="layers")
def chain(law: LayerLaw, V0, layers: int, key):
    """Every layer of networks side by side, shape (networks, layers, m, m)."""
    p = TOKENS * (TOKENS + 1) // 2

    def one_layer(V, key):
        step = layer_step(law, V)
        xi = jax.vmap(unvech)(jr.normal(key, (NETWORKS, p)))
        F = jnp.eye(TOKENS)[..., None] + step.mean + jnp.sqrt(step.variance) * jnp.moveaxis(xi, 0, -1)
        power = jnp.linalg.matrix_power(jnp.moveaxis(F, -1, 0), law.power)
        V = jnp.einsum("ikb,bkl,jlb->ijb", step.Q, power, step.Q)
        return V, V

    start = jnp.repeat(V0[..., None], NETWORKS, axis=-1)
    _, path = jax.lax.scan(one_layer, start, jr.split(key, layers))
    return jnp.moveaxis(jnp.concatenate([start[None], path]), -1, 0)


def random_start(key):
    X = jr.normal(key, (TOKENS, 4 * TOKENS))
    return X @ X.T / (4 * TOKENS)


def ranks(seen, assumptions, truth, key) -> dict[str, float]:
    draws = SAMPLER.sample(thinned_path, bridges_of(any_transitions(seen), assumptions), key=key).samples
    return {site: float(np.mean(draws[site] < truth[site])) for site in IDENTIFIED if site in truth}


@pytest.mark.slow
@pytest.mark.parametrize("every", [4, DEPTH], ids=["every-4th", "last"])
def test_posteriors_with_latent_layers_are_calibrated(every, key):
    architecture = template("transformer")
    assumptions, h = Assumptions(architecture, "limit"), jnp.full(NETWORKS, 1 / WIDTH)

    def one(key):
        keys = jr.split(key, 4)
        truth = draw_parameters(Assumptions(architecture), keys[0])
        layer = layer_of(architecture, **truth)
        law = LayerLaw.of_limit(layer.limit(), h, tokens=TOKENS, power=power_of(layer.skewness))
        V = np.asarray(chain(law, 0.25 * random_start(keys[1]), DEPTH, keys[2]))
        if not np.isfinite(V).all() or singular(V).any():
            return None  # where τ0 is smallest chains explode
        seen = covariance_dataset(V[:, ::every], width=WIDTH, layers=np.arange(0, DEPTH + 1, every))
        return ranks(seen, assumptions, truth, keys[3])

    assert_calibrated(ranks_of_sets(one, DATA_SETS, key), f"every {every}", draws=EFFECTIVE)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["transformer", "attention", "feedforward", "mlp"])
def test_posteriors_of_thinned_networks_are_calibrated(name, key):
    architecture = template(name)
    assumptions = Assumptions(architecture)
    sizes = {"width": REAL_WIDTH, "depth": DEPTH, "networks": REAL_NETWORKS, "observe_every": 4}

    def one(key):
        keys = jr.split(key, 4)
        truth = draw_parameters(assumptions, keys[0])
        try:
            data = si.sample_networks(
                layer_of(architecture, **truth), 0.5 * random_start(keys[1]), **sizes, key=keys[2]
            )
            used = marked(problem_of(thinned_path, assumptions), data)
        except si.InputError:
            return None
        return ranks(used, assumptions, truth, keys[3])

    found = ranks_of_sets(one, REAL_DATA_SETS, jr.fold_in(key, len(name)))
    assert_calibrated(found, f"{name}, every 4", draws=EFFECTIVE)
