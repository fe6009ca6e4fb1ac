"""The solver with an attention pattern: its step, the generator of the SDE, the cone, and networks."""

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from budget import assert_same_distribution
from conftest import random_covariance

import sdeinfer as si


@pytest.mark.parametrize("start", ["full rank", "rank one", "equal", "opposite"])
def test_paths_stay_in_the_cone(start, key):
    tokens = 4
    x = {
        "rank one": jnp.linspace(0.5, 1.5, tokens),
        "equal": jnp.ones(tokens),
        "opposite": (-1.0) ** jnp.arange(tokens),
    }
    V0 = 0.8 * jnp.eye(tokens) + 0.2 if start == "full rank" else jnp.outer(x[start], x[start])
    layer = si.ShapedTransformer(0.5, 0.6, 0.3, -1.5, pattern=si.CAUSAL)
    V = si.simulate(layer, V0.astype(jnp.float32), [0.2, 0.4], paths=200, step=0.02, key=key)
    assert not jnp.isnan(V).any()
    finite = V[jnp.isfinite(V).all(axis=(1, 2, 3))]
    assert len(finite) >= 100  # about one in twelve explodes from opposite tokens
    values = np.linalg.eigvalsh(np.asarray(finite, np.float64))
    assert (values[..., 0] >= -1e-5 * values[..., -1]).all()


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [8, 16, 32])
@pytest.mark.parametrize("make", [lambda half: si.Pattern(prompts=(half, half)), lambda half: si.CAUSAL])
def test_many_paths_stay_in_the_cone(make, tokens, key):
    """2¹³ paths in single precision."""
    layer = si.ShapedTransformer(0.5, 1.0, 0.3, -1.5, pattern=make(tokens // 2))
    V0 = si.equicorrelated(tokens=tokens, correlation=0.2, norm=0.7).astype(jnp.float32)
    V = np.asarray(si.simulate(layer, V0, [0.1, 0.3], paths=2**13, step=0.02, key=key), np.float64)
    assert not np.isnan(V).any()
    finite = V[np.isfinite(V).all(axis=(1, 2, 3))]
    assert len(finite) >= 0.99 * len(V)
    values = np.linalg.eigvalsh(finite)
    print(f"\nm = {tokens}: {len(V) - len(finite)} exploded; least eigenvalue {values.min():.2g}")
    assert (values[..., 0] >= -1e-6 * tokens * values[..., -1]).all()


def test_paths_that_explode_are_infinite_and_never_nan(key):
    layer, V0 = si.ShapedAttention(0.9, 0.05, pattern=si.CAUSAL), 4 * random_covariance(3)
    V = si.simulate(layer, V0, [0.1, 0.5], paths=50, step=0.05, key=key)
    assert not jnp.isnan(V).any()
    assert jnp.isinf(V[:, -1]).any()


def test_paths_have_a_gradient(key):
    V0 = random_covariance(3)

    @jax.jit
    @jax.value_and_grad
    def size(tau0):
        layer = si.ShapedAttention(0.7, tau0, pattern=si.CAUSAL)
        return jnp.mean(si.simulate(layer, V0, [0.2], paths=8, step=0.05, key=key)[..., 2, 2])

    slope, step = size(0.8)[1], 1e-5
    np.testing.assert_allclose(slope, (size(0.8 + step)[0] - size(0.8 - step)[0]) / (2 * step), rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["attention", "transformer"])
def test_networks_have_the_sdes_distribution(name, key):
    """At T = ½ of width 200; tokens 3 and 4, which attend to those before them, and not to the same."""
    width, depth, networks, keys = 200, 100, 1024, jr.split(key)
    layer = si.layers.Architecture(name, pattern=si.CAUSAL).layer(gamma=0.4, tau0=1.0, c_plus=1.0, c_minus=-1.0)
    V0 = si.equicorrelated(tokens=4, correlation=0.2).astype(jnp.float32)
    data = si.sample_networks(layer, V0, width=width, depth=depth, networks=networks, observe_every=depth, key=keys[0])
    seen = data["covariance"].values[:, -1].astype(np.float64)
    assert np.isfinite(seen).all()
    paths = np.asarray(si.simulate(layer, V0, [depth / width], paths=2**13, step=0.01, key=keys[1])[:, 0], np.float64)
    # Of so many paths one or two explode, as without a mask.
    finite = np.isfinite(paths).all(axis=(1, 2))
    assert finite.mean() >= 0.999
    paths = paths[finite]
    for statistic in (
        lambda V: V[:, 2, 3] / np.sqrt(V[:, 2, 2] * V[:, 3, 3]),
        lambda V: V[:, 0, 1] / np.sqrt(V[:, 0, 0] * V[:, 1, 1]),
        lambda V: np.log(V[:, 3, 3]),
    ):
        print(f"\n{name}: mean {statistic(seen).mean():.4f} in {networks} networks, {statistic(paths).mean():.4f} SDE")
        assert_same_distribution(statistic(seen), statistic(paths))
