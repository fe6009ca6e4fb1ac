"""The solver stays in the cone of covariances, at every step and from every start."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from budget import assert_estimate
from conftest import CAUSAL, LAYERS, random_covariance

import sdeinfer as si

STARTS = {
    "full rank": lambda m: 0.8 * np.eye(m) + 0.2,
    "rank one": lambda m: np.outer(np.linspace(0.5, 1.5, m), np.linspace(0.5, 1.5, m)),
    "ρ = 1": lambda m: np.ones((m, m)),
    "ρ = −1": lambda m: np.outer((-1.0) ** np.arange(m), (-1.0) ** np.arange(m)),
    "a zero": lambda m: np.diag(np.linspace(0.0, 2.0, m)),
}


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("layer", [LAYERS["transformer"](), CAUSAL["causal transformer"]()], ids=["all", "causal"])
def test_paths_are_finite_covariances_at_any_step(layer, dtype, key):
    """From every start, at steps that Euler–Maruyama survives and at others, by one program."""
    for start in STARTS.values():
        for step in (0.02, 0.5):
            settings = {"paths": 200, "step": step, "key": key}
            V = np.asarray(si.simulate(layer, jnp.asarray(start(3), dtype), [0.5, 1.0], **settings), np.float64)
            assert not np.isnan(V).any()
            finite = V[np.isfinite(V).all(axis=(1, 2, 3))]
            assert len(finite) >= 100
            np.testing.assert_array_equal(finite, np.swapaxes(finite, -1, -2))
            eigenvalues = np.linalg.eigvalsh(finite)
            assert (eigenvalues[..., 0] >= -64 * np.finfo(dtype).eps * eigenvalues[..., -1]).all()


def test_paths_that_explode_are_infinite_and_never_nan(key):
    layer = si.ShapedTransformer(gamma=0.9, tau0=0.05, c_plus=0.3, c_minus=-1.5, pattern=si.CAUSAL)
    V = si.simulate(layer, 4 * random_covariance(3), [0.1, 0.5], paths=50, step=0.05, key=key)
    assert not jnp.isnan(V).any()
    assert jnp.isinf(V[:, -1]).any()


@pytest.mark.parametrize(
    ("tokens", "gamma", "tau0"), [(3, 0.5, 0.5), pytest.param(2, 8**-0.5, 1.0, marks=pytest.mark.long)]
)
def test_explosions_are_of_the_sde_and_not_of_the_step(tokens, gamma, tau0, key):
    layer = si.ShapedTransformer(gamma=gamma, tau0=tau0, c_plus=0.0, c_minus=-1.0)
    V0 = si.equicorrelated(tokens=tokens, correlation=0.2 if tokens == 3 else -1.0)
    shares = []
    # Of 75 and of 250 steps: one program, which is compiled for 256.
    for step, k in zip((0.01, 0.003), jax.random.split(key), strict=True):
        V = si.simulate(layer, V0, [0.75], paths=4000, step=step, key=k)
        shares.append(float(jnp.isinf(V[:, 0, 0, 0]).mean()))
    error = math.sqrt(sum(share * (1 - share) / 4000 for share in shares))
    assert min(shares) > 0.01
    assert_estimate(*shares, error)
