"""Statistics of chains and their derivatives: central differences on common noise, and a naive twin."""

from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from diffrax import LinearInterpolation
from helpers.internals import chain_sample, sample_chains

import sdeinfer as si
from sdeinfer import criteria as of

V0 = np.array([[1.0, 0.8, 0.3], [0.8, 1.2, 0.25], [0.3, 0.25, 0.8]])
TWINS = np.array([[1.0, 1.0, 0.3], [1.0, 1.0, 0.3], [0.3, 0.3, 0.8]])
SIZES: dict[str, Any] = {"width": 16, "depth": 4, "networks": 65}
ONE_OF_EACH = (of.MeanCorrelation(), of.NormFactor(), of.EffectiveRank(), of.RangeMargin(0.01, 50.0))
SHAPED = si.ShapedTransformer(gamma=0.5, tau0=1.0, c_plus=0.5, c_minus=-0.5)
MLP = si.blocks.Block(si.blocks.MLP(gain=2.0), strength=0.6, norm="layer")


def blocks(norm="layer", **of_attention):
    attention = si.blocks.SelfAttention(temperature=0.8, gain=1.5, heads=2, pattern=si.CAUSAL, **of_attention)
    mlp = si.blocks.MLP(gain=2.0)
    return si.Stack(
        (si.blocks.Block(attention, strength=0.4, norm=norm), si.blocks.Block(mlp, strength=0.6, norm=norm))
    )


LAYERS = {
    "shaped": SHAPED,
    "over depth": si.OverDepth(SHAPED, gamma=LinearInterpolation(jnp.array([0.0, 0.25]), jnp.array([0.3, 0.6]))),
    "pre-LN": blocks(),
    "RoPE": blocks("rms", rope=100.0, key_value_heads=1),
}


def moved(layer, number, change):
    """The layer with one of its arrays' entries changed."""
    leaves, structure = jax.tree.flatten(layer)
    flat = np.concatenate([np.ravel(leaf) for leaf in leaves])
    flat[number] += change
    parts = np.split(flat, np.cumsum([np.size(leaf) for leaf in leaves])[:-1])
    return jax.tree.unflatten(structure, [p.reshape(np.shape(leaf)) for p, leaf in zip(parts, leaves, strict=True)])


def directions(layer):
    """A derivative along each entry of the layer's arrays."""
    count = sum(np.size(leaf) for leaf in jax.tree.leaves(layer))
    along = [jax.tree.map(np.subtract, moved(layer, number, 1.0), layer) for number in range(count)]
    return count, jax.tree.map(lambda *x: np.stack(x), *along)


@pytest.mark.slow
@pytest.mark.parametrize("start", [V0, TWINS], ids=["definite", "equal tokens"])
@pytest.mark.parametrize("name", LAYERS)
def test_derivatives_are_those_of_common_noise(name, start, key):
    layer, spread = LAYERS[name], 1e-5
    count, slopes = directions(layer)
    # Tokens that are equal have a correlation of 1, whose margin in a range is that of rounding.
    statistics = ONE_OF_EACH if start is V0 else ONE_OF_EACH[:3]

    def sample(layer):
        return chain_sample(statistics, layer, start, slopes=slopes, key=key, **SIZES)

    found = sample(layer)
    assert found.slopes.shape == (len(statistics), count, SIZES["networks"])
    for number in range(count):
        ends = [sample(moved(layer, number, sign * spread)).values for sign in (1, -1)]
        differences = (ends[0] - ends[1]) / (2 * spread)
        size = np.abs(differences).max(axis=1, keepdims=True)
        wrong = np.abs(found.slopes[:, number] - differences) > 1e-5 * np.maximum(size, 1e-3)
        # A largest norm, or the worst of all eigenvalues, may be another one a step further.
        assert wrong.mean(axis=1) == pytest.approx(0, abs=1.5 / SIZES["networks"])
    assert np.abs(found.slopes).max(axis=(1, 2)).min() > 0.01


def test_values_are_those_of_the_sampled_covariances(key):
    """The naive twin: statistics of the paths of `sample_chains`, by NumPy."""
    found = chain_sample(ONE_OF_EACH, MLP, V0, key=key, **SIZES)
    starts = np.broadcast_to(V0, (SIZES["networks"], 3, 3))
    V = sample_chains(MLP, starts, width=16, observed=4, key=key)[:, 1:]
    norms = np.sqrt(np.diagonal(V[:, -1], axis1=1, axis2=2))
    rows, columns = np.triu_indices(3, 1)
    rho = (V[:, -1] / (norms[:, :, None] * norms[:, None]))[:, rows, columns]
    growth = norms**2 / np.diagonal(V0)
    eigenvalues = np.linalg.eigvalsh(V)
    expected = [
        rho.mean(axis=1),
        np.maximum(growth, 1 / growth).max(axis=1),
        np.trace(V[:, -1], axis1=1, axis2=2) ** 2 / np.square(V[:, -1]).sum(axis=(1, 2)),
        np.log(np.minimum(eigenvalues.min(axis=(1, 2)) / 0.01, 50 / eigenvalues.max(axis=(1, 2)))),
    ]
    np.testing.assert_allclose(found.values, expected, rtol=1e-9)
    assert not found.exploded.any()
    assert found.slopes.shape == (4, 0, SIZES["networks"])


def test_networks_that_overflow_explode(key):
    layer = si.blocks.Block(si.blocks.MLP(activation=lambda z: z**3), strength=1e80)
    found = chain_sample((of.LogNorm(),), layer, np.eye(1), key=key, **SIZES | {"depth": 2})
    assert found.exploded.all()
    assert np.isfinite(found.values).all()


def test_a_network_depends_on_its_number_and_key_alone():
    one, other = (
        chain_sample(ONE_OF_EACH, MLP, V0, key=jr.key(3), **SIZES | {"networks": count}).values for count in (5, 65)
    )
    np.testing.assert_allclose(one, other[:, :5], rtol=1e-12)
