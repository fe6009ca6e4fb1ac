"""The solver stays in the cone of covariances, at the sizes and the step of the paper's figures."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from budget import assert_estimate

import sdeinfer as si

PATHS = {2: 2**13, 4: 2**13, 8: 2**13, 16: 2**13, 32: 2**13, 64: 256}
STARTS = {
    "full rank": lambda m: 0.8 * np.eye(m) + 0.2,
    "rank one": lambda m: np.outer(np.linspace(0.5, 1.5, m), np.linspace(0.5, 1.5, m)),
    "ρ = 1": lambda m: np.ones((m, m)),
    "ρ = −1": lambda m: np.outer((-1.0) ** np.arange(m), (-1.0) ** np.arange(m)),
}


@pytest.mark.slow
@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("tokens", PATHS)
def test_paths_of_the_papers_transformer_are_covariances_in_single_precision(tokens, start, key):
    layer = si.ShapedTransformer(gamma=1 / math.sqrt(8), tau0=1.0, c_plus=0.0, c_minus=-1.0)
    V0 = jnp.asarray(STARTS[start](tokens), jnp.float32)
    paths = PATHS[tokens]
    V = np.array(si.simulate(layer, V0, [0.25, 0.5, 0.75], paths=paths, step=0.01, key=key))
    assert not np.isnan(V).any()
    exploded = np.isinf(V).any(axis=(1, 2, 3))
    smallest, traces = zip(*(_spectrum(block) for block in np.array_split(V[~exploded], 8)), strict=True)
    share = np.concatenate(smallest).min() / np.concatenate(traces).mean()
    print(f"\nm = {tokens:2}, {start:9}, {paths} paths: smallest eigenvalue {share:.1e} of the mean trace", end="")
    print(f", {exploded.sum()} exploded", end="")
    assert share >= -1e-6


def _spectrum(V):
    V = V.astype(np.float64)
    return np.linalg.eigvalsh(V)[..., 0].ravel(), np.trace(V, axis1=-2, axis2=-1).ravel()


@pytest.mark.parametrize(("gamma", "tau0", "correlation"), [(0.5, 0.5, 0.2), (8**-0.5, 1.0, -1.0)])
def test_explosions_are_of_the_sde_and_not_of_the_step(gamma, tau0, correlation, key):
    layer = si.ShapedTransformer(gamma=gamma, tau0=tau0, c_plus=0.0, c_minus=-1.0)
    V0 = si.equicorrelated(tokens=2, correlation=correlation)
    shares = []
    # Of 75 and of 250 steps: one program, which is compiled for 256.
    for step, k in zip((0.01, 0.003), jax.random.split(key), strict=True):
        V = si.simulate(layer, V0, [0.75], paths=4000, step=step, key=k)
        shares.append(float(jnp.isinf(V[:, 0, 0, 0]).mean()))
    error = math.sqrt(sum(share * (1 - share) / 4000 for share in shares))
    assert min(shares) > 0.01
    assert_estimate(*shares, error)
