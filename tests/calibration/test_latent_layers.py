"""Calibration of fits with latent layers, m = 2, parameters from the prior.

Data from the law that is fitted, of which every fourth layer, or the last, is seen; and data from real networks.
"""

import functools

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from calibration.study import assert_calibrated, draw_parameters, report

import sdeinfer as si
from sdeinfer.covariance import singular, unvech
from sdeinfer.infer import Metropolis, in_range, problem_of
from sdeinfer.layers import Architecture
from sdeinfer.likelihood import Assumptions, LayerLaw, layer_step
from sdeinfer.likelihood._layer_step import power_of
from sdeinfer.models import thinned_path
from sdeinfer.observation import covariance_dataset

DATA_SETS = 128
NETWORKS, DEPTH, WIDTH, TOKENS = 16, 16, 256, 2
IDENTIFIED = ("gamma", "tau0", "c_gap")
REAL_DATA_SETS = 64
REAL_NETWORKS, REAL_WIDTH = 64, 64
"""Their posteriors know γ to 1 %: a law whose variances were a few percent off would be seen."""

SIZES = {"chains": 1, "warmup": 500, "draws": 1500}
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


@pytest.mark.slow
@pytest.mark.parametrize("every", [4, DEPTH], ids=["every-4th", "last"])
def test_posteriors_with_latent_layers_are_calibrated(every, key):
    architecture = Architecture("transformer")
    sampler, assumptions = Metropolis(**SIZES), Assumptions(architecture, "limit")
    h = jnp.full(NETWORKS, 1 / WIDTH)
    ranks: dict[str, list[float]] = {}
    drawn = fitted = 0
    while fitted < DATA_SETS:
        keys = jr.split(jr.fold_in(key, drawn), 4)
        truth = draw_parameters(Assumptions(architecture), keys[0])
        X = jr.normal(keys[1], (TOKENS, 4 * TOKENS))
        layer = architecture.layer(**truth)
        law = LayerLaw.of_limit(layer.limit(), h, tokens=TOKENS, power=power_of(layer.skewness))
        V = chain(law, 0.25 * X @ X.T / (4 * TOKENS), DEPTH, keys[2])
        drawn += 1
        # Where τ0 is smallest chains explode; leaving a data set out by what its data say does not bias the others.
        if not jnp.isfinite(V).all() or singular(np.asarray(V)).any():
            continue
        fitted += 1
        seen = covariance_dataset(np.asarray(V)[:, ::every], width=WIDTH, layers=np.arange(0, DEPTH + 1, every))
        draws = sampler.sample(thinned_path, thinned_path.bridges(seen, assumptions), key=keys[3]).samples
        for site in IDENTIFIED:
            ranks.setdefault(site, []).append(float(np.mean(draws[site] < truth[site])))
    uniform = {site: np.array(u) for site, u in ranks.items()}
    print(f"\n{drawn - fitted} of {drawn} data sets left the cone")
    report(uniform, f"every {every}")
    assert_calibrated(uniform, f"every {every}", draws=EFFECTIVE)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["transformer", "attention", "feedforward", "mlp"])
def test_posteriors_of_thinned_networks_are_calibrated(name, key):
    architecture = Architecture(name)
    sampler, assumptions = Metropolis(**SIZES), Assumptions(architecture)
    latent = draw_parameters(Assumptions(architecture), key)
    identified = [site for site in IDENTIFIED if site in latent]
    ranks: dict[str, list[float]] = {site: [] for site in identified}
    drawn = refused = 0
    while drawn - refused < REAL_DATA_SETS:
        keys = jr.split(jr.fold_in(jr.fold_in(key, len(name)), drawn), 4)
        truth = draw_parameters(Assumptions(architecture), keys[0])
        X = jr.normal(keys[1], (TOKENS, 4 * TOKENS))
        sizes = {"width": REAL_WIDTH, "depth": DEPTH, "networks": REAL_NETWORKS}
        drawn += 1
        try:
            layer, V0 = architecture.layer(**truth), 0.5 * X @ X.T / (4 * TOKENS)
            data = si.sample_networks(layer, V0, **sizes, key=keys[2]).isel(layer=slice(None, None, 4))
            used = in_range(problem_of(thinned_path, assumptions), data)[0]
        except si.InputError:
            refused += 1
            continue
        draws = sampler.sample(thinned_path, thinned_path.bridges(used, assumptions), key=keys[3]).samples
        for site in identified:
            ranks[site].append(float(np.mean(draws[site] < truth[site])))
    uniform = {site: np.array(u) for site, u in ranks.items()}
    print(f"\n{name}, n = {REAL_WIDTH}: {refused} of {drawn} data sets refused")
    report(uniform, f"{name}, every 4")
    assert_calibrated(uniform, f"{name}, every 4", draws=EFFECTIVE)
