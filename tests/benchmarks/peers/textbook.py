"""The textbook's program: the SDE's coefficients as one would type them, Euler steps as dense normals, NumPyro's NUTS.

Nothing here imports sdeinfer.
"""

import json
import sys
import time

import arviz_stats
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC, NUTS


def vech(V):
    """The p entries α ≤ β."""
    return V[jnp.triu_indices(V.shape[0])]


def unvech(x):
    """The symmetric matrix with those entries."""
    tokens = round(((8 * len(x) + 1) ** 0.5 - 1) / 2)
    rows, columns = jnp.triu_indices(tokens)
    return jnp.zeros((tokens, tokens)).at[rows, columns].set(x).at[columns, rows].set(x)


def drift(gamma, tau0, gap, x):
    """b_attn + γ² b_relu on the p entries (Theorem 3.2, Theorem 4.2)."""
    V = unvech(x)
    m = len(V)
    v = jnp.diag(V)
    C = V - V.mean(0) - V.mean(1)[:, None] + V.mean()
    s = v - 2 * V.mean(1) + 2 * V.mean() - v.mean()
    row = jnp.outer(v, V @ s)
    attention = V * jnp.trace(V @ C) / m**2 + (row + row.T) / (2 * m)
    i, j = jnp.triu_indices(m, 1)
    scale = jnp.sqrt(v[i] * v[j])
    rho = V[i, j] / scale
    nu = gap**2 / (2 * jnp.pi) * (jnp.sqrt(1 - rho**2) - rho * jnp.arccos(rho))
    relu = jnp.zeros_like(V).at[i, j].set(nu * scale)
    return vech(gamma**2 / tau0**2 * attention + gamma**2 * relu)


def diffusion(gamma, tau0, x):
    """Σ = a Σ_lin + κ² 𝒜, the p×p matrix."""
    V = unvech(x)
    m = len(V)
    C = V - V.mean(0) - V.mean(1)[:, None] + V.mean()
    W = V @ C @ V
    i, j = jnp.triu_indices(m)
    a, b, d, w = i[:, None], j[:, None], i[None], j[None]
    linear = V[a, d] * V[b, w] + V[a, w] * V[b, d]
    attention = (V[b, w] * W[a, d] + V[b, d] * W[a, w] + V[a, w] * W[b, d] + V[a, d] * W[b, w]) / m**2
    return gamma**2 * (4 - gamma**2) * linear + gamma**4 / tau0**2 * attention


def model(starts, ends, h):
    """Pairs of successive layers, starts and ends of shape (pairs, p)."""
    gamma = numpyro.sample("gamma", dist.Uniform(0, 1))
    tau0 = numpyro.sample("tau0", dist.LogNormal(0, 1))
    gap = numpyro.sample("c_gap", dist.HalfNormal(8**0.5))
    numpyro.sample("c_mean", dist.Normal(0, 2**0.5))
    means = jax.vmap(lambda x: x + h * drift(gamma, tau0, gap, x))(starts)
    covariances = jax.vmap(lambda x: h * diffusion(gamma, tau0, x))(starts)
    with numpyro.plate("pair", len(starts)):
        numpyro.sample("end", dist.MultivariateNormal(means, covariances), obs=ends)


if __name__ == "__main__":
    numpyro.enable_x64()
    source, draws = sys.argv[1], int(sys.argv[2])
    stored = dict(np.load(source))
    started = time.perf_counter()
    x = jax.vmap(jax.vmap(vech))(jnp.asarray(stored["V"]))
    starts, ends = (part.reshape(-1, x.shape[-1]) for part in (x[:, :-1], x[:, 1:]))
    sizes = {"num_chains": 4, "num_samples": draws, "num_warmup": draws}
    mcmc = MCMC(NUTS(model), **sizes, chain_method="vectorized", progress_bar=False)
    mcmc.run(jr.key(0), starts, ends, 1 / float(stored["width"]))
    found = {name: np.asarray(each) for name, each in mcmc.get_samples(group_by_chain=True).items()}
    seconds = time.perf_counter() - started
    ess = min(float(arviz_stats.ess(found[name])) for name in ("gamma", "tau0", "c_gap"))
    print(json.dumps({"seconds": seconds, "ess": ess}))
