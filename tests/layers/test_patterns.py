"""The limit of attention with a pattern."""

import jax
import numpy as np
import pytest
import references
from conftest import CAUSAL, PATTERNS, masked_layer_of, random_covariance
from references import assert_agrees
from sigma import sigma_of

import sdeinfer as si
from sdeinfer.terms import attention_drift, attention_drift_vectors

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
    assert_agrees(attention_drift(V, pattern), references.masked_attention_drift(V, pattern.mask(6)))


@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 5, 6])
def test_the_drift_without_a_mask_is_that_of_a_mask_that_leaves_nothing_out(tokens):
    V, everything = np.asarray(random_covariance(tokens)), si.Pattern(rows=((True,) * tokens,) * tokens)
    np.testing.assert_allclose(attention_drift(V), attention_drift(V, everything), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", PATTERNS)
def test_drift_vectors_are_the_factors_of_s2(name, V):
    V, pattern = np.asarray(V), PATTERNS[name](len(V))
    v, s = attention_drift_vectors(V, pattern)
    mask = pattern.mask(len(V))
    expected = references.masked_S2(V, mask) / mask.sum(axis=1)[:, None]
    np.testing.assert_allclose(v[:, None] * s, expected, rtol=1e-10, atol=1e-12)


def test_a_batch_is_one_covariance_after_the_other():
    V = np.stack([random_covariance(3, seed) for seed in range(4)], axis=-1)
    found = attention_drift(V, si.CAUSAL)
    for i in range(4):
        assert_agrees(found[..., i], attention_drift(V[..., i], si.CAUSAL), rtol=1e-13)


@pytest.mark.usefixtures("unchecked")  # NumPy in place of JAX, which would compile a program for each
@pytest.mark.parametrize("name", CAUSAL)
def test_tokens_do_not_depend_on_later_ones(name):
    V, layer = np.asarray(random_covariance(6)), masked_layer_of(name, 6)
    limit, S = layer.limit(), references.diffusion_tensor(layer, V)
    whole = np.asarray(limit.drift(V))
    for seen in (1, 3):
        part = V[:seen, :seen]
        np.testing.assert_allclose(whole[:seen, :seen], limit.drift(part), atol=1e-12)
        root = np.asarray(compiled_root(limit, part))
        assert_agrees(root @ root.T, references.packed_tensor(S[:seen, :seen, :seen, :seen]))


def test_the_last_token_attends_as_without_a_mask():
    V = np.asarray(random_covariance(4))
    one, other = attention_drift(V, si.CAUSAL), attention_drift(V)
    np.testing.assert_allclose(one[-1, -1], other[-1, -1], rtol=1e-12)
    assert np.abs(one - other).max() > 0.01 * np.abs(other).max()


def test_a_prompt_evolves_as_if_it_were_alone():
    V, pattern = np.asarray(random_covariance(6)), si.Pattern(prompts=(2, 4))
    np.testing.assert_allclose(attention_drift(V, pattern)[2:, 2:], attention_drift(V[2:, 2:]), rtol=1e-12)
    both = attention_drift(V, pattern)[:2, 2:]
    assert np.abs(both - attention_drift(V)[:2, 2:]).max() > 0.1 * np.abs(both).max()


def test_masks_do_not_mix():
    with pytest.raises(
        ValueError, match="pattern: layers of attention with different patterns have no limit in common"
    ):
        si.Stack((si.ShapedAttention(0.5, 1.0), si.ShapedAttention(0.5, 1.0, pattern=si.CAUSAL))).limit()
