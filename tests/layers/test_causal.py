"""The limit of attention with a causal mask."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import references
from conftest import random_covariance
from references import assert_agrees

import sdeinfer as si
from sdeinfer.layers import causal_attention_drift, causal_drift_vectors

# One program for all layers of one number of tokens: operation by operation there are dozens of each.
compiled_drift = jax.jit(lambda limit, V: limit.drift(V))
compiled_root = jax.jit(lambda limit, V: limit.diffusion(V).as_operator().as_matrix())
compiled_vectors = jax.jit(causal_drift_vectors)


def test_drift_is_the_index_sum(causal_layer, V):
    # The first token has no drift of attention: compare at the scale of V then.
    expected = references.drift(causal_layer, V)
    assert np.abs(compiled_drift(causal_layer.limit(), V) - expected).max() <= 1e-10 * max(1.0, np.abs(expected).max())


def test_attention_drift_is_the_index_sum_at_its_own_scale():
    V = random_covariance(6) * 1e-3
    assert_agrees(causal_attention_drift(V), references.causal_attention_drift(np.asarray(V)))


def test_drift_vectors_are_the_factors_of_s2(V):
    v, s = map(np.asarray, compiled_vectors(V))
    expected = references.causal_S2(np.asarray(V)) / np.arange(1, len(V) + 1)[:, None]
    np.testing.assert_allclose(v[:, None] * s, expected, rtol=1e-10, atol=1e-12)


def test_a_batch_is_one_covariance_after_the_other():
    V = jnp.stack([random_covariance(3, seed) for seed in range(4)], axis=-1)
    found = causal_attention_drift(V)
    for i in range(4):
        assert_agrees(found[..., i], causal_attention_drift(V[..., i]), rtol=1e-13)


def test_tokens_do_not_depend_on_later_ones(causal_layer):
    V = np.asarray(random_covariance(6))
    limit, S = causal_layer.limit(), references.diffusion_tensor(causal_layer, V)
    whole = np.asarray(compiled_drift(limit, V))
    for seen in range(1, 6):
        part = V[:seen, :seen]
        np.testing.assert_allclose(whole[:seen, :seen], compiled_drift(limit, part), atol=1e-12)
        root = np.asarray(compiled_root(limit, part))
        assert_agrees(root @ root.T, references.packed_tensor(S[:seen, :seen, :seen, :seen]))


def test_the_last_token_attends_as_without_a_mask():
    V = random_covariance(4)
    one, other = causal_attention_drift(V), si.layers.attention_drift(V)
    np.testing.assert_allclose(one[-1, -1], other[-1, -1], rtol=1e-12)
    assert np.abs(one - other).max() > 0.01 * np.abs(other).max()


def test_the_first_token_does_not_attend():
    limit, V = si.ShapedAttention(0.7, 0.5, causal=True).limit(), random_covariance(4)
    np.testing.assert_allclose(limit.drift(V)[0, 0], 0, atol=1e-15)


def test_masks_do_not_mix():
    with pytest.raises(ValueError, match="causal: layers of attention with a causal mask and without one"):
        si.Stack((si.ShapedAttention(0.5, 1.0), si.ShapedAttention(0.5, 1.0, causal=True))).limit()


@pytest.mark.parametrize("name", ["attention", "transformer"])
def test_there_is_no_law_of_finite_width(name):
    layer = si.layers.Architecture(name, causal=True).layer(gamma=0.5, tau0=1.0, c_plus=1.0, c_minus=0.0)
    with pytest.raises(ValueError, match="law: with a causal mask there is the limit's law only"):
        layer.finite_width(100)
