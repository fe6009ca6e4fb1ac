"""Simulation-based calibration (Talts et al. 2018): data drawn from the law that is fitted, parameters from the prior.

All data sets are fitted side by side in one compilation: their statistics have one shape, whatever they hold.
"""

import functools

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from arviz_stats.ecdf_utils import ecdf_pit
from numpyro import handlers
from sdeinfer.models import full_path
from sdeinfer.models._priors import sample_layer

from sdeinfer.infer import Problem
from sdeinfer.layers import ARCHITECTURES
from sdeinfer.likelihood import PathStatistics, path_statistics, transitions
from sdeinfer.observe import covariance_dataset

DATA_SETS = 256
NETWORKS, DEPTH, WIDTH, TOKENS = 8, 16, 512, 3
WARMUP, CHUNKS, THINNING = 500, 8, 10
BAND, SIMULATIONS = 1 - 1e-4, 100_000
"""Simultaneous probability of ArviZ's ECDF band. Its 11 uses spend 1.1e-3, beside the budget of `budget.SUITE`."""


def draw_parameters(architecture: str, key) -> dict:
    model = handlers.seed(functools.partial(sample_layer, architecture), key)
    return {name: site["value"] for name, site in handlers.trace(model).get_trace().items()}


def euler_chain(layer, V0, key):
    """Covariances of one network under the law that the likelihood assumes, dt = 1/n."""
    limit = layer.limit()
    p = TOKENS * (TOKENS + 1) // 2

    def step(V, key):
        noise = limit.diffusion(V).sample(jr.normal(key, (p,)))
        V = V + limit.drift(V) / WIDTH + noise / np.sqrt(WIDTH)
        return V, V

    _, V = jax.lax.scan(step, V0, jr.split(key, DEPTH))
    return jnp.concatenate([V0[None], V])


def simulate_data_set(architecture: str, key):
    key_parameters, key_start, key_paths = jr.split(key, 3)
    parameters = draw_parameters(architecture, key_parameters)
    kind = ARCHITECTURES[architecture]
    layer = kind(**{name: value for name, value in parameters.items() if name in kind.__dataclass_fields__})
    X = jr.normal(key_start, (TOKENS, 4 * TOKENS))
    V0 = 0.25 * (X @ X.T) / (4 * TOKENS)
    return parameters, jax.vmap(euler_chain, in_axes=(None, None, 0))(layer, V0, jr.split(key_paths, NETWORKS))


# The tokens are small, norm ½, so that no chain of any prior draw leaves the cone of positive semi-definite matrices:
# `covariance_dataset` would refuse it.


def pooled_statistics(V) -> PathStatistics:
    """The networks of one data set share its parameters: their statistics add up to those of one network."""
    statistics = path_statistics(transitions(covariance_dataset(V, width=WIDTH)), nodes=64)
    total = PathStatistics(statistics.weights.sum(0)[None], statistics.nodes, statistics.constant.sum()[None])
    return jax.tree.map(np.asarray, total)


def posterior_ranks(architecture: str, key) -> dict[str, np.ndarray]:
    """Rank of each data set's own parameters among its thinned posterior draws, as a fraction, randomised at ties."""
    key_data, key_fit, key_ties = jr.split(key, 3)
    simulate = jax.jit(jax.vmap(functools.partial(simulate_data_set, architecture)))
    parameters, V = simulate(jr.split(key_data, DATA_SETS))
    prepared = jax.tree.map(lambda *leaves: jnp.stack(leaves), *map(pooled_statistics, np.asarray(V)))

    def start(prepared, key):
        return Problem(full_path, architecture, WARMUP, prepared).start(key)

    def advance(prepared, state):
        return Problem(full_path, architecture, WARMUP, prepared).advance(state, 250)

    state = jax.jit(jax.vmap(start))(prepared, jr.split(key_fit, DATA_SETS))
    advance, kept = jax.jit(jax.vmap(advance)), []
    for chunk in range(WARMUP // 250 + CHUNKS):
        state, draws = advance(prepared, state)
        if chunk >= WARMUP // 250:
            kept.append(jax.tree.map(np.asarray, draws.samples))
    ties = np.random.default_rng(np.asarray(jr.key_data(key_ties)))
    ranks = {}
    for name in kept[0]:
        posterior = np.concatenate([chunk[name] for chunk in kept], axis=1)[:, ::THINNING]
        below = (posterior < np.asarray(parameters[name])[:, None]).sum(axis=1)
        ranks[name] = (below + ties.uniform(size=DATA_SETS)) / (posterior.shape[1] + 1)
    return ranks


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_posterior_ranks_are_uniform(architecture, key):
    ranks = posterior_ranks(architecture, key)
    for name in set(ranks) - {"c_plus", "c_minus"}:
        _, ecdf, lower, upper = ecdf_pit(ranks[name], ci_prob=BAND, n_simulations=SIMULATIONS)
        outside = np.flatnonzero((ecdf < lower) | (ecdf > upper))
        assert not outside.size, f"{architecture} {name}: ECDF of {DATA_SETS} ranks leaves its {BAND:.2%} band"
        print(f"{architecture} {name}: mean rank {ranks[name].mean():.3f} ± {1 / np.sqrt(12 * DATA_SETS):.3f}")
