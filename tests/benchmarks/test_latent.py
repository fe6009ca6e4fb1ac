"""Ways to fit every eighth layer: effective draws a second.

- Metropolis steps for the parameters, the bridges' innovations renewed one by one: what `fit` does.
- NUTS on the parameters and all innovations at once: the same model, the same bridges.
- One step of the SDE from each observed layer to the next, by NUTS: no latent layers, another posterior.
"""

import time

import jax
import jax.random as jr
import numpy as np
import numpyro.infer
import pytest
from arviz_stats.base import array_stats
from helpers.cases import layer_of
from helpers.internals import Assumptions, bridges_of, path_statistics

import sdeinfer as si
from sdeinfer.infer import NUTS, Metropolis
from sdeinfer.layers import template
from sdeinfer.likelihood import any_transitions

NAMES = ("gamma", "tau0", "c_gap")
SIZES = {"chains": 2, "draws": 200, "warmup": 200}
FEW = {"chains": 2, "draws": 50, "warmup": 50}
"""Of NUTS on all innovations, hundreds of dimensions with gradients through every bridge."""


def on_everything(model, bridges, key):
    """NumPyro's own chains, one after the other, with a dense mass matrix as ours have."""
    kernel = numpyro.infer.NUTS(model, dense_mass=True)
    sizes = {"num_warmup": FEW["warmup"], "num_samples": FEW["draws"], "num_chains": FEW["chains"]}
    chains = numpyro.infer.MCMC(kernel, **sizes, chain_method="sequential", progress_bar=False)
    chains.run(key, bridges)
    return chains.get_samples(group_by_chain=True)


@pytest.mark.benchmark
def test_ways_to_fit_every_eighth_layer():
    kind = template("transformer")
    truth = layer_of(kind, gamma=0.5, tau0=1.0, c_plus=2.0, c_minus=-2.0)
    V0 = si.equicorrelated(tokens=3, correlation=0.2)
    data = si.sample_networks(truth, V0, width=256, depth=32, networks=4, observe_every=8, key=jr.key(1))
    latent, coarse, assumptions = si.models.thinned_path, si.models.full_path, Assumptions(kind, "limit")
    path = any_transitions(data)
    bridges, steps = bridges_of(path, assumptions), path_statistics(path, assumptions=assumptions)
    ways = {
        "Metropolis, bridges": lambda key: Metropolis(**SIZES).sample(latent, bridges, key=key).samples,
        "NUTS, bridges": lambda key: on_everything(latent, bridges, key),
        "NUTS, one step each": lambda key: NUTS(**SIZES).sample(coarse, steps, key=key).samples,
    }
    reference = None
    for name, way in ways.items():
        jax.clear_caches()
        seconds = []
        for seed in (0, 1):
            start = time.perf_counter()
            draws = jax.block_until_ready(way(jr.key(seed)))
            seconds.append(time.perf_counter() - start)
        least = min(float(array_stats.ess(draws[site], chain_axis=0, draw_axis=1)) for site in NAMES)
        rate = least / seconds[1]
        reference = reference or rate
        moments = ", ".join(f"{site} {np.mean(draws[site]):.3g} ± {np.std(draws[site]):.2g}" for site in NAMES)
        print(
            f"\n{name}: ESS {least:.0f}; {seconds[0]:.1f} s, {seconds[1]:.1f} s compiled: {rate:.2f} a second, "
            f"{rate / reference:.3f} of the first; {moments}"
        )
