"""Gradients of the full-path log-likelihood, and whole fits.

The peer is what a NumPyro user would write: a dense multivariate normal on the p entries of each dV, with Σ_lin and 𝒜
computed once from the data.
"""

import os
import pathlib
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from dense import dense_diffusions
from numpyro.distributions import MultivariateNormal

import sdeinfer as si
from sdeinfer.covariance import vech
from sdeinfer.infer import NUTS, Networks
from sdeinfer.layers import Architecture
from sdeinfer.likelihood import Assumptions, FullPath, observed_path, path_layout, path_statistics
from sdeinfer.observation import covariance_dataset
from sdeinfer.terms import attention_drift, relu_drift

pytestmark = pytest.mark.benchmark

WIDTH, DEPTH, NETWORKS = 256, 64, 32
LEAST_RATIO = {2: 10, 4: 30, 8: 200}


def simulated(tokens: int, networks: int, depth: int):
    layer = si.ShapedTransformer(gamma=0.5, tau0=1.0, c_plus=1.0, c_minus=-3.0)
    V0 = si.equicorrelated(tokens=tokens, correlation=0.0, norm=1.0)
    V = si.simulate(layer, V0, np.arange(depth + 1) / WIDTH, paths=networks, step=1 / WIDTH, key=jr.key(0))
    return covariance_dataset(np.asarray(V), width=WIDTH)


def dense_log_likelihood(data):
    V = jnp.asarray(data["covariance"].values)
    starts, dV = V[:, :-1].reshape(-1, *V.shape[2:]), jnp.diff(V, axis=1).reshape(-1, *V.shape[2:])
    increments = jax.vmap(vech)(dV)
    b1, b2 = (jax.vmap(lambda S, f=f: vech(f(S)))(starts) for f in (attention_drift, relu_drift))
    linear, attention = dense_diffusions(starts)
    h = 1 / WIDTH

    def log_likelihood(gamma, tau0, gap):
        limit = si.ShapedTransformer(gamma, tau0, gap, 0.0).limit()
        mean = h * (limit.attention_drift * b1 + limit.relu_drift * b2)
        covariance = h * (limit.linear_noise * linear + limit.attention_noise * attention)
        return MultivariateNormal(mean, covariance).log_prob(increments).sum()

    return log_likelihood


@pytest.mark.parametrize("tokens", LEAST_RATIO)
def test_gradient(tokens, timed, bounded):
    data = simulated(tokens, NETWORKS, DEPTH)
    path = path_statistics(observed_path(data))

    def structured(gamma, tau0, gap):
        return FullPath(si.ShapedTransformer(gamma, tau0, gap, 0.0).limit(), path).log_prob(path.weights).sum()

    at = (jnp.array(0.5), jnp.array(1.0), jnp.array(4.0))
    ours, peer = (jax.jit(jax.value_and_grad(f, (0, 1, 2))) for f in (structured, dense_log_likelihood(data)))
    np.testing.assert_allclose(np.array(ours(*at)[1]), np.array(peer(*at)[1]), rtol=1e-8)
    fast, slow = timed(lambda: ours(*at)), timed(lambda: peer(*at))
    ratio = bounded("ratio", slow / fast, least=LEAST_RATIO[tokens])
    print(
        f"\nm = {tokens}, {NETWORKS * DEPTH} layers: gradient {fast * 1e6:.0f} µs, dense {slow * 1e6:.0f} µs, {ratio}"
    )


@pytest.mark.parametrize("tokens", [2, 3, 4, 8])
def test_gradient_of_the_finite_width_law(tokens, timed, bounded):
    """As the sampler has it: four chains side by side, gradient after gradient inside one loop."""
    data = simulated(tokens, NETWORKS, DEPTH)
    steps, costs = 64, []
    for law in ("limit", "finite-width"):
        path = (
            Networks.of(si.models.full_path, Assumptions(Architecture("transformer"), law)).prepare(data).each.pooled()
        )

        def log_prob(parameters, path):
            layer = si.ShapedTransformer(*parameters)
            if path.adjustment is None:
                return FullPath(layer.limit(), path).log_prob(path.weights).sum()
            layer = path.adjustment(layer)
            return FullPath(jax.vmap(layer.finite_width)(path.widths), path).log_prob(path.weights).sum()

        @jax.jit
        def run(start, path, log_prob=log_prob):
            def step(_, parameters):
                slope = jax.vmap(jax.grad(log_prob), (0, None))(parameters, path)
                # Far too small to move, but the next gradient has to wait for this one.
                return parameters + 1e-16 * slope

            return jax.lax.fori_loop(0, steps, step, start)

        start = jnp.array([0.5, 1.0, 1.0, -3.0]) + 0.01 * jnp.arange(4)[:, None]
        costs.append(timed(lambda run=run, start=start, path=path: run(start, path)) / steps)
    limit, finite = costs
    print(
        f"\nm = {tokens}, {path.nodes.size} nodes, four chains: gradient of the limit {limit * 1e6:.1f} µs, at finite "
        f"width {finite * 1e6:.1f} µs: {bounded('ratio', finite / limit, most=3)}"
    )


def test_fit():
    data = simulated(4, 127, 63)
    for law in ("limit", "finite-width"):
        for attempt in ("first, compilation included", "second"):
            started = time.perf_counter()
            settings = {"architecture": "transformer", "law": law, "chains": 4, "draws": 1000, "warmup": 1000}
            si.fit(si.models.full_path, data, **settings, key=jr.key(1))
            elapsed = time.perf_counter() - started
            print(f"\n{law}: fit of {127 * 63 * 10} transition terms, 4 × (1,000 + 1,000), {attempt}: {elapsed:.1f} s")


def test_growth_with_the_number_of_terms():
    """Each size in a process of its own, whose peak of memory is read where it ends."""
    for terms in (10**5, 10**6, 10**7):
        environment = os.environ | {"PYTHONPATH": str(pathlib.Path(__file__).parent.parent)}
        command = [sys.executable, __file__, str(terms)]
        result = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        print(f"\n{result.stdout.strip()}")


def _peak() -> float:
    """Peak resident memory of this process so far, in GiB."""
    status = pathlib.Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) / 2**20


def _fit_of(terms: int) -> None:
    """Fit so many terms of three tokens: one set of sampled networks, as often as it takes."""
    layers, tokens = 64, 3
    truth = si.ShapedTransformer(gamma=0.5, tau0=1.0, c_plus=1.0, c_minus=-3.0)
    V0 = si.equicorrelated(tokens=tokens, correlation=0.2)
    networks = round(terms / (layers * 6))
    data = si.sample_networks(truth, V0, width=WIDTH, depth=layers, networks=256, key=jr.key(0))
    V = np.resize(data["covariance"].values, (networks, layers + 1, tokens, tokens))
    model, assumptions = si.models.full_path, Assumptions(Architecture("transformer"))
    sampler, key = NUTS(chains=4, draws=500, warmup=500), jr.key(1)
    first = observed_path(data.isel(network=slice(1)))
    # Compilation, the same for every size, and its memory.
    sampler.sample(
        model, Networks.of(model, assumptions).adjusted(first, path_layout(first, nodes=48), pooled=True), key=key
    )
    data = covariance_dataset(V, width=WIDTH)
    before, started = _peak(), time.perf_counter()
    path = observed_path(data)
    checked = time.perf_counter()
    statistics = Networks.of(model, assumptions).adjusted(path, path_layout(path, nodes=48), pooled=True)
    prepared, peak = time.perf_counter(), _peak()
    draws = sampler.sample(model, statistics, key=key)
    sampled = time.perf_counter()
    gamma = draws.samples["gamma"]
    print(
        f"{len(path) * 6:,} terms of {networks:,} networks, {V.nbytes / 2**30:.2f} GiB: checked in "
        f"{checked - started:.1f} s, statistics {prepared - checked:.1f} s, "
        f"NUTS 4 × (500 + 500) {sampled - prepared:.1f} s; "
        f"peak {before:.2f} GiB with the data, {peak:.2f} prepared, {_peak():.2f} fitted; "
        f"gamma {gamma.mean():.5f} ± {gamma.std():.5f}"
    )


if __name__ == "__main__":
    jax.config.update("jax_enable_x64", True)  # noqa: FBT003
    _fit_of(int(sys.argv[1]))
