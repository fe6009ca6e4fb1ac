"""One gradient of the full-path log-likelihood, and one whole fit.

The peer is what a NumPyro user would write: a dense multivariate normal on the p entries of each dV, with Σ_lin and 𝒜
computed once from the data.
"""

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
from sdeinfer.layers import attention_drift, relu_drift
from sdeinfer.likelihood import FullPath
from sdeinfer.observe import covariance_dataset

pytestmark = pytest.mark.benchmark

WIDTH, DEPTH, NETWORKS = 256, 64, 32
ASKED = {2: 10, 4: 30, 8: 200}


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


@pytest.mark.parametrize("tokens", ASKED)
def test_gradient(tokens, timed):
    data = simulated(tokens, NETWORKS, DEPTH)
    path = si.models.full_path.prepare(data)

    def structured(gamma, tau0, gap):
        return FullPath(si.ShapedTransformer(gamma, tau0, gap, 0.0).limit(), path).log_prob(path.weights).sum()

    at = (jnp.array(0.5), jnp.array(1.0), jnp.array(4.0))
    ours, peer = (jax.jit(jax.value_and_grad(f, (0, 1, 2))) for f in (structured, dense_log_likelihood(data)))
    np.testing.assert_allclose(np.array(ours(*at)[1]), np.array(peer(*at)[1]), rtol=1e-8)
    fast, slow = timed(lambda: ours(*at)), timed(lambda: peer(*at))
    ratio = f"ratio {slow / fast:.0f} (asked for: {ASKED[tokens]})"
    print(
        f"\nm = {tokens}, {NETWORKS * DEPTH} layers: gradient {fast * 1e6:.0f} µs, dense {slow * 1e6:.0f} µs, {ratio}"
    )


def test_fit():
    data = simulated(4, 127, 63)
    for attempt in ("first, compilation included", "second"):
        started = time.perf_counter()
        si.fit(si.models.full_path, data, architecture="transformer", chains=4, draws=1000, warmup=1000, key=jr.key(1))
        elapsed = time.perf_counter() - started
        print(f"\nfit of {127 * 63 * 10} transition terms, 4 × (1,000 + 1,000), {attempt}: {elapsed:.1f} s")
