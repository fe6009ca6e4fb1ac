"""The SDE against finite networks at the settings of the paper's figures; run with `-m slow -s` to see the tables."""

import math

import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from helpers.budget import assert_same_distribution
from scipy.stats import ks_2samp, wasserstein_distance

import sdeinfer as si

pytestmark = pytest.mark.slow

TOKENS = 4
FIGURES = {
    "Fig. 1, 7: attention, γ = 1/√8": (si.ShapedAttention(1 / math.sqrt(8), 1.0), 200, 150, 1024),
    "Fig. 3: feed-forward, γ = 1/√d": (si.ResidualFeedForward(0.1, 0.0, -1.0), 300, 100, 512),
    "Fig. 3: feed-forward, γ = 0.25": (si.ResidualFeedForward(0.25, 0.0, -1.0), 300, 100, 512),
    "Fig. 3: feed-forward, γ = 0.5": (si.ResidualFeedForward(0.5, 0.0, -1.0), 300, 100, 512),
    "Fig. 3: feed-forward, γ = 1": (si.ResidualFeedForward(1.0, 0.0, -1.0), 300, 100, 512),
}
"""Layer, width, depth, number of networks."""


def correlations(V):
    """ρ₁₂ of each path: correlations of other tokens would not be independent of it."""
    return np.asarray(V[:, 0, 1] / np.sqrt(V[:, 0, 0] * V[:, 1, 1]))


@pytest.mark.parametrize("figure", FIGURES)
def test_correlations_at_the_last_layer_have_the_sdes_distribution(figure, key):
    layer, width, depth, networks = FIGURES[figure]
    V0 = si.equicorrelated(tokens=TOKENS, correlation=0.2).astype(jnp.float32)
    keys = jr.split(key)
    data = si.sample_networks(layer, V0, width=width, depth=depth, networks=networks, observe_every=depth, key=keys[0])
    seen = correlations(data["covariance"].values[:, -1])
    paths = correlations(si.simulate(layer, V0, [depth / width], paths=2**13, step=0.01, key=keys[1])[:, 0])
    floor = np.mean([wasserstein_distance(part, paths) for part in np.split(paths, 2**13 // networks)])
    test = ks_2samp(seen, paths, method="asymp")
    print(f"\n{figure}, n = {width}, d = {depth}: mean ρ {seen.mean():.4f} in {networks} networks, ", end="")
    print(f"{paths.mean():.4f} in the SDE; KS {test.statistic:.4f}, p = {test.pvalue:.2f}; ", end="")
    print(f"Wasserstein {wasserstein_distance(seen, paths):.4f}, Monte Carlo floor {floor:.4f}", end="")
    assert_same_distribution(seen, paths)


def test_stopping_times_of_the_papers_figure_5(key):
    """n = d = 200, τ0 = 1, norms 10√n: they shrink as γ grows, in networks and in the SDE."""
    n = 200
    V0 = si.equicorrelated(tokens=TOKENS, correlation=0.2, norm=10.0)
    print("\n     γ   networks: median, 10 %, stopped | SDE: median, 10 %, stopped (capped at 1)")
    medians = []
    for gamma, k in zip((0.01, 0.03, 0.1, 0.2, 0.3), jr.split(key, 5), strict=True):
        layer, keys = si.ShapedAttention(gamma, 1.0), jr.split(k)
        data = si.sample_networks(layer, V0.astype(jnp.float32), width=n, depth=n, networks=100, key=keys[0])
        times, _ = si.solve.stopping_times(data["covariance"].values, data["layer"].values / n)
        paths = si.simulate_stopped(layer, V0, [1.0], paths=2000, step=5e-4, key=keys[1])
        assert jnp.isfinite(paths.covariance).all()
        rows = [(*np.quantile(np.minimum(T, 1.0), (0.5, 0.1)), np.isfinite(T).mean()) for T in (times, paths.time)]
        print(f"  {gamma:4}   " + " | ".join(f"{median:9.4f} {low:9.4f} {share:7.0%}" for median, low, share in rows))
        medians.append(tuple(median for median, _, _ in rows))
    assert (np.diff(np.array(medians), axis=0) <= 0).all()
    assert medians[0] == (1.0, 1.0)
    assert max(medians[-1]) < 1.0
