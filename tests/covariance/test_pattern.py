"""Attention patterns, and the spectrum of attention's noise under them, against index sums."""

import numpy as np
import pytest
from helpers import references
from helpers.cases import PATTERNS, random_covariance
from helpers.internals import attended_mean, centring, pattern_spectrum

from sdeinfer.covariance import Pattern, coordinates


@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 5, 6])
def test_centrings_are_sums_of_differences(name, tokens):
    pattern, V = PATTERNS[name](tokens), np.asarray(random_covariance(tokens))
    found, mask = centring(pattern, tokens), pattern.mask(tokens)
    means = attended_mean(pattern, V)
    for row, seen in enumerate(mask):
        H = np.diag(seen * 1.0) - np.outer(seen, seen) / seen.sum()
        R, selected = found.differences, found.selected[row]
        np.testing.assert_allclose(R.T @ np.diag(selected) @ R, H / seen.sum(), atol=1e-14)
        np.testing.assert_allclose(means[row], V[seen].mean(axis=0), rtol=1e-13)


@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 5, 6])
def test_eigenvalues_are_those_of_the_noise_of_attention(name, tokens):
    V, pattern = np.asarray(random_covariance(tokens)), PATTERNS[name](tokens)
    e = pattern_spectrum(pattern, V).mixing
    attention = references.attention_tensor(V, pattern.mask(tokens))
    linear, attention = (references.packed_tensor(tensor) for tensor in (references.linear_tensor(V), attention))
    expected = np.sort(np.linalg.eigvals(np.linalg.solve(linear, attention)).real)
    # Of the eigenvalues of Σ_lin⁻¹𝒜: as many roundings as Σ_lin's condition number, for each of the p entries.
    allowed = len(e) * np.finfo(float).eps * np.linalg.cond(linear) * np.abs(expected).max()
    np.testing.assert_allclose(e, expected, rtol=0, atol=allowed)
    if name == "causal":
        assert (e[:tokens] == 0).all()
        assert (e[tokens:] > 0).all()


def test_words_calls_and_attributes_of_patterns():
    for pattern in (*(make(4) for make in PATTERNS.values()), Pattern(), Pattern(causal=True, prompts=(1, 3))):
        assert eval(repr(pattern), {"Pattern": Pattern}) == pattern
        assert Pattern.in_attributes(pattern.attributes()) == pattern
    assert str(Pattern()) == "no mask"
    assert str(Pattern(causal=True)) == "a causal mask"
    assert str(Pattern(causal=True, prompts=(3, 3))) == "2 prompts of 3 tokens, a causal mask"
    assert str(Pattern(prompts=(2, 3))) == "2 prompts of 2, 3 tokens"
    assert Pattern.of_mask(np.ones((3, 3))) == Pattern()


def test_tokens_can_be_taken_with_all_that_they_attend_to():
    prompts = Pattern(causal=True, prompts=(3, 2, 2))
    assert prompts.restricted([0, 1, 5], 7) == Pattern(causal=True, prompts=(2, 1))
    assert prompts.restricted([3, 4], 7) == Pattern(causal=True)
    assert Pattern(prompts=(3, 2)).restricted([3, 4], 5) == Pattern()
    mask = PATTERNS["mask"](3)
    assert mask.restricted([0, 1, 2], 3) == mask
    with pytest.raises(ValueError, match="tokens: token 5 attends to token 3, which is left out; with attention, take"):
        Pattern(causal=True, prompts=(3, 4)).restricted([0, 5], 7)
    with pytest.raises(ValueError, match="tokens: token 0 attends to token 1"):
        Pattern().restricted([0], 2)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Pattern(prompts=(3, 0)), "prompts: each needs at least one token, got 3, 0"),
        (lambda: Pattern.of_mask(np.eye(3)[:2]), r"pattern: a boolean matrix \(tokens, tokens\) is needed"),
        (lambda: Pattern.of_mask(np.diag([1, 0, 1])), "pattern: token 1 attends to no token"),
        (lambda: Pattern(prompts=(3, 2)).mask(4), r"pattern: prompts of 3 \+ 2 tokens for 4 tokens"),
        (lambda: Pattern.of_mask(np.eye(3)).mask(4), "pattern: a mask of 3 tokens for 4 tokens"),
        (lambda: Pattern(causal=True, rows=((True,),)), "pattern: either rows of a mask, or causal and prompts"),
        (lambda: Pattern.in_attributes({"prompts": "3,x"}), "causal, prompts, mask: numbers are needed"),
    ],
)
def test_bad_patterns_are_refused_in_one_line(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_forms_read_and_make_the_coordinates():
    """z_q = ⟨W_q, S⟩ of a symmetric S, which is Σ z_q U_q."""
    V, S = (np.asarray(random_covariance(3, seed=seed)) for seed in (1, 2))
    at = pattern_spectrum(Pattern(causal=True), V)
    read, made = at.forms()
    z = np.einsum("qab,ab->q", read, S)
    rows, columns = np.triu_indices(3)
    np.testing.assert_allclose(z, at.whiten(S)[rows, columns] / np.where(rows == columns, np.sqrt(2), 1.0))
    np.testing.assert_allclose(np.einsum("q,qab->ab", z, made), S)


@pytest.mark.parametrize("pattern", [Pattern(), Pattern(causal=True)], ids=str)
def test_a_matrix_without_a_factor_leaves_the_others_alone(pattern):
    V = np.stack([random_covariance(3, seed=seed) for seed in range(3)])
    V[1] = 1.0
    with np.errstate(all="ignore"):
        at = coordinates(V, pattern)
    assert np.isnan(at.cholesky[1]).all()
    assert np.isnan(at.mixing[1][-1])
    whole = coordinates(V[[0, 2]], pattern)
    np.testing.assert_array_equal(at.mixing[[0, 2]], whole.mixing)
