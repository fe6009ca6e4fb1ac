"""The limits of layers, with and without attention patterns."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import references
from helpers.cases import CAUSAL, LAYERS, PATTERNS, masked_layer_of, random_covariance
from helpers.internals import ARCHITECTURES, attention_drift, attention_drift_vectors, is_named
from helpers.references import assert_agrees

import sdeinfer as si
from sdeinfer.layers import Limit, template

G, T, P, M = 0.6, 0.7, 0.4, -1.1  # γ, τ0, c₊, c₋

TABLE = {
    "mlp": (si.ShapedMLP(P, M), (0, (P - M) ** 2, 1, 0)),
    "feedforward": (si.ResidualFeedForward(G, P, M), (0, G**2 * (P - M) ** 2, 2 * G**2, 0)),
    "attention": (si.ShapedAttention(G, T), (G**2 / T**2, 0, G**2 * (2 - G**2), G**4 / T**2)),
    "transformer": (
        si.ShapedTransformer(G, T, P, M),
        (G**2 / T**2, G**2 * (P - M) ** 2, G**2 * (4 - G**2), G**4 / T**2),
    ),
}
VARIANTS = {
    "heads": (si.ShapedAttention(G, T, heads=4), (G**2 / T**2, 0, G**2 * (2 - G**2), G**4 / (4 * T**2))),
    "projection": (
        si.ShapedAttention(G, T, heads=2, output_projection=True),
        (G**2 / T**2, 0, 2 * G**2, G**4 / (2 * T**2)),
    ),
    "expansion": (
        si.ResidualFeedForward(G, P, M, expansion=4),
        (0, G**2 * (P - M) ** 2, G**2 * (2 - G**2 * 3 / 4), 0),
    ),
    "all of them": (
        si.ShapedTransformer(G, T, P, M, key_width=8, heads=3, output_projection=True, expansion=8 / 3),
        (G**2 / T**2, G**2 * (P - M) ** 2, 2 * G**2 + G**2 * (2 - G**2 * 5 / 8), G**4 / (3 * T**2)),
    ),
}
"""Drift of the attention and of the ReLU, a and κ² of each architecture, as the table of the theory gives them.

The paper's, and with what real Transformers have beside it: heads, an output projection, a wide hidden layer.
"""


def coefficients(limit: Limit) -> np.ndarray:
    return np.array([limit.attention_drift, limit.relu_drift, limit.linear_noise, limit.attention_noise], float)


MASKED = [*CAUSAL, *list(PATTERNS)[1:]]
ANY = {"no mask": lambda tokens: si.Pattern()} | PATTERNS


@pytest.mark.usefixtures("unchecked")  # NumPy in place of JAX, which would compile a program for each
@pytest.mark.parametrize("name", [*LAYERS, *MASKED])
def test_drift_is_the_papers_index_sum(name, V):
    layer = LAYERS[name]() if name in LAYERS else masked_layer_of(name, len(V))
    expected, found = references.drift(layer, V), layer.limit().drift(np.asarray(V))
    # One token has no drift, whatever the architecture: compare at the scale of V then.
    assert np.abs(found - expected).max() <= 1e-10 * max(1.0, np.abs(expected).max())


@pytest.mark.parametrize("name", ANY)
def test_attention_drift_is_the_index_sum_at_its_own_scale(name):
    V, pattern = np.asarray(random_covariance(6)) * 1e-3, ANY[name](6)
    assert_agrees(attention_drift(V, pattern), references.attention_drift(V, pattern.mask(6)))


@pytest.mark.parametrize("name", ANY)
def test_drift_vectors_are_the_factors_of_s2(name, V):
    V, pattern = np.asarray(V), ANY[name](len(V))
    v, s = attention_drift_vectors(V, pattern)
    mask = pattern.mask(len(V))
    expected = references.S2(V, mask) / mask.sum(axis=1)[:, None]
    np.testing.assert_allclose(v[:, None] * s, expected, rtol=1e-10, atol=1e-12)


def test_a_batch_is_one_covariance_after_the_other():
    V = np.stack([random_covariance(3, seed) for seed in range(4)], axis=-1)
    found = attention_drift(V, si.CAUSAL)
    for i in range(4):
        assert_agrees(found[..., i], attention_drift(V[..., i], si.CAUSAL), rtol=1e-13)


@pytest.mark.parametrize("name", TABLE | VARIANTS)
def test_coefficients_are_those_of_the_theorem(name):
    layer, expected = (TABLE | VARIANTS)[name]
    np.testing.assert_allclose(coefficients(layer.limit()), expected, rtol=1e-14)


def test_a_stack_adds_coefficients_each_with_its_own_parameters():
    layers = [layer for layer, _ in TABLE.values()]
    expected = np.sum([np.array(row, float) for _, row in TABLE.values()], axis=0)
    np.testing.assert_allclose(coefficients(si.Stack(layers).limit()), expected, rtol=1e-14)


def test_attention_does_not_drift_where_all_tokens_are_equal_but_for_rounding():
    V = np.asarray(si.equicorrelated(tokens=4, correlation=1.0, norm=1.7))
    np.testing.assert_allclose(attention_drift(V), 0, atol=1e-13)


def test_drift_is_differentiable_in_every_parameter():
    V = random_covariance(3)

    @jax.jit
    @jax.value_and_grad
    def size(values):
        return jnp.sum(si.ShapedTransformer(*values).limit().drift(V) ** 2)

    values, step = np.array([G, T, P, M]), 1e-5
    for along, slope in zip(step * np.eye(4), size(values)[1], strict=True):
        np.testing.assert_allclose(slope, (size(values + along)[0] - size(values - along)[0]) / (2 * step), rtol=1e-7)


def test_names_of_architectures_go_both_ways():
    for name, kind in ARCHITECTURES.items():
        found = template(name)
        assert type(found) is kind
        assert found == template(kind) == template(TABLE[name][0])
        assert hash(found) == hash(template(kind))
        assert found.name == name
        assert is_named(found)
    assert not is_named(si.Stack((TABLE["mlp"][0],)))
    with pytest.raises(ValueError, match="architecture: must be one of transformer, .* got 'lstm'"):
        template("lstm")
