"""The limit of attention with a pattern."""

import jax
import numpy as np
import pytest
import references
from conftest import PATTERNS, random_covariance
from references import assert_agrees
from sigma import sigma_of

import sdeinfer as si
from sdeinfer.terms._attention import attention_drift, attention_drift_vectors

# One program for all layers of one number of tokens: operation by operation there are dozens of each.
compiled_root = jax.jit(lambda limit, V: sigma_of(limit, V).root())


@pytest.mark.usefixtures("unchecked")  # NumPy in place of JAX, which would compile a program for each
def test_drift_is_the_index_sum(masked_layer, V):
    # The first token has no drift of attention: compare at the scale of V then.
    layer = masked_layer(len(V))
    expected = references.drift(layer, V)
    found = layer.limit().drift(np.asarray(V))
    assert np.abs(found - expected).max() <= 1e-10 * max(1.0, np.abs(expected).max())


@pytest.mark.parametrize("name", PATTERNS)
def test_attention_drift_is_the_index_sum_at_its_own_scale(name):
    V, pattern = np.asarray(random_covariance(6)) * 1e-3, PATTERNS[name](6)
    assert_agrees(attention_drift(V, pattern), references.attention_drift(V, pattern.mask(6)))


@pytest.mark.parametrize("name", PATTERNS)
def test_drift_vectors_are_the_factors_of_s2(name, V):
    V, pattern = np.asarray(V), PATTERNS[name](len(V))
    v, s = attention_drift_vectors(V, pattern)
    mask = pattern.mask(len(V))
    expected = references.S2(V, mask) / mask.sum(axis=1)[:, None]
    np.testing.assert_allclose(v[:, None] * s, expected, rtol=1e-10, atol=1e-12)


def test_a_batch_is_one_covariance_after_the_other():
    V = np.stack([random_covariance(3, seed) for seed in range(4)], axis=-1)
    found = attention_drift(V, si.CAUSAL)
    for i in range(4):
        assert_agrees(found[..., i], attention_drift(V[..., i], si.CAUSAL), rtol=1e-13)
