"""What both peers share: the SDE's coefficients on the p entries of V as one would type them, priors and clocks.

Nothing here or in the peers imports sdeinfer.
"""

import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist

PARAMETERS = ("gamma", "tau0", "c_gap")


def vech(V):
    """The p entries α ≤ β."""
    return V[jnp.triu_indices(V.shape[0])]


def unvech(x):
    """The symmetric matrix with those entries."""
    tokens = round(((8 * len(x) + 1) ** 0.5 - 1) / 2)
    rows, columns = jnp.triu_indices(tokens)
    return jnp.zeros((tokens, tokens)).at[rows, columns].set(x).at[columns, rows].set(x)


def priors():
    """γ, τ0 and c₊ − c₋; the mean of c₊ and c₋ is not in the limit, and is sampled with them all the same."""
    gamma = numpyro.sample("gamma", dist.Uniform(0, 1))
    tau0 = numpyro.sample("tau0", dist.LogNormal(0, 1))
    gap = numpyro.sample("c_gap", dist.HalfNormal(8**0.5))
    numpyro.sample("c_mean", dist.Normal(0, 2**0.5))
    return gamma, tau0, gap


def drift(theta, x):
    """b_attn + γ² b_relu on the p entries (Theorem 3.2, Theorem 4.2)."""
    gamma, tau0, gap = theta
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


def diffusion(theta, x):
    """Σ = a Σ_lin + κ² 𝒜, the p×p matrix."""
    gamma, tau0, _ = theta
    V = unvech(x)
    m = len(V)
    C = V - V.mean(0) - V.mean(1)[:, None] + V.mean()
    W = V @ C @ V
    i, j = jnp.triu_indices(m)
    a, b, d, w = i[:, None], j[:, None], i[None], j[None]
    linear = V[a, d] * V[b, w] + V[a, w] * V[b, d]
    attention = (V[b, w] * W[a, d] + V[b, d] * W[a, w] + V[a, w] * W[b, d] + V[a, d] * W[b, w]) / m**2
    return gamma**2 * (4 - gamma**2) * linear + gamma**4 / tau0**2 * attention


class Compilation:
    """Seconds that JAX spent in tracing, lowering and compiling, since this was made."""

    def __init__(self):
        self.intervals: list[tuple[float, float]] = []
        jax.monitoring.register_event_duration_secs_listener(self._heard)

    def _heard(self, event: str, duration: float, **_) -> None:
        if event.startswith("/jax/core/compile"):
            now = time.perf_counter()
            self.intervals.append((now - duration, now))

    def seconds(self) -> float:
        """Of the union of what was heard: functions are traced within functions."""
        total, until = 0.0, -np.inf
        for start, end in sorted(self.intervals):
            total += max(0.0, end - max(start, until))
            until = max(until, end)
        return total


def main(fit):
    """Time `fit(data, settings)`, which returns NumPyro's MCMC, and save what it drew: see `test_peers`."""
    numpyro.enable_x64()
    source, out, chains, draws, warmup = sys.argv[1:]
    settings = {"num_chains": int(chains), "num_samples": int(draws), "num_warmup": int(warmup)}
    data = dict(np.load(source))
    compilation, started, cpu = Compilation(), time.perf_counter(), time.process_time()
    mcmc = fit(data, settings | {"chain_method": "vectorized", "progress_bar": False})
    samples = {name: np.asarray(mcmc.get_samples(group_by_chain=True)[name]) for name in PARAMETERS}
    seconds, cpu = time.perf_counter() - started, time.process_time() - cpu
    extra = mcmc.get_extra_fields()
    counts = {"divergences": extra["diverging"].sum(), "steps": extra["num_steps"].mean()}
    np.savez(out, **samples, seconds=seconds, warm=seconds - compilation.seconds(), cpu=cpu, **counts)
