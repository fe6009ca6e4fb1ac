"""Attention patterns, and the noise of attention under them, against index sums."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import references
from conftest import PATTERNS, random_covariance
from references import assert_agrees, packed

import sdeinfer as si
from sdeinfer.covariance import (
    Pattern,
    attended_mean,
    centring,
    factor,
    pattern_spectrum,
    vech,
)
from sdeinfer.terms._attention_noise import attention_noise


@jax.jit
def of_diffusion(limit, V, rotation, dV):
    """All that the tests look at, in one program for all layers of one number of tokens."""
    tokens, diffusion = len(V), limit.diffusion(V)
    white = diffusion.whiten(dV)

    def root(X):
        def move(G):
            linear, attention = X @ G[:, :tokens], attention_noise(limit.pattern, X, G[:, tokens:])
            N = jnp.sqrt(limit.linear_noise / 2) * linear + jnp.sqrt(limit.attention_noise) * attention
            return vech(X @ N.T + N @ X.T)

        return jax.vmap(move)(jnp.eye(2 * tokens**2).reshape(-1, tokens, 2 * tokens)).T

    return {
        "root": diffusion.as_operator().as_matrix(),
        "roots of factors": [root(X) for X in (factor(V), jnp.linalg.cholesky(V) @ rotation)],
        "log det": diffusion.log_det(),
        "white": white,
        "coloured": diffusion.sample(white),
    }


def found_at(layer, V):
    """What was found, with the argument dV."""
    rng, tokens = np.random.default_rng(20230630), len(V)
    dV = rng.normal(size=(tokens, tokens))
    dV, (rotation, _) = dV + dV.T, np.linalg.qr(rng.normal(size=V.shape))
    return jax.tree.map(np.asarray, of_diffusion(layer.limit(), V, rotation, dV)) | {"dV": dV}


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


@pytest.mark.parametrize(
    ("pattern", "count"),
    [
        (Pattern(), 11),
        (Pattern(causal=True), 11),
        (Pattern(prompts=(3, 3, 3, 3)), 8),
        (Pattern(causal=True, prompts=(5, 7)), 10),
        (Pattern.of_mask(np.tri(12, k=3) > 0), 11),
    ],
    ids=str,
)
def test_nested_sets_share_their_differences(pattern, count):
    """Hence O(m³): a causal mask, and one of a prefix that all tokens see, have as many as no mask."""
    assert len(centring(pattern, 12).differences) == count


def test_spectral_root_is_a_root_of_sigma(masked_layer, V):
    layer = masked_layer(len(V))
    S = found_at(layer, V)["root"]
    assert_agrees(S @ S.T, references.diffusion(layer, V))


def test_noise_of_a_factor_is_a_root_of_sigma_for_any_factor(masked_layer, V):
    layer = masked_layer(len(V))
    for S in found_at(layer, V)["roots of factors"]:
        assert_agrees(S @ S.T, references.diffusion(layer, V))


@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 5, 6])
def test_eigenvalues_are_those_of_the_noise_of_attention(name, tokens):
    V, pattern = np.asarray(random_covariance(tokens)), PATTERNS[name](tokens)
    e = pattern_spectrum(pattern, V).mixing
    attention = references.masked_attention_tensor(V, pattern.mask(tokens))
    linear, attention = (references.packed_tensor(tensor) for tensor in (references.linear_tensor(V), attention))
    expected = np.sort(np.linalg.eigvals(np.linalg.solve(linear, attention)).real)
    # Of the eigenvalues of Σ_lin⁻¹𝒜: as many roundings as Σ_lin's condition number, for each of the p entries.
    allowed = len(e) * np.finfo(float).eps * np.linalg.cond(linear) * np.abs(expected).max()
    np.testing.assert_allclose(e, expected, rtol=0, atol=allowed)
    if name == "causal":
        assert (e[:tokens] == 0).all()
        assert (e[tokens:] > 0).all()


def test_log_det_and_whitening(masked_layer, V):
    layer = masked_layer(len(V))
    sigma, found = references.diffusion(layer, V), found_at(layer, V)
    np.testing.assert_allclose(found["log det"], np.linalg.slogdet(sigma)[1], rtol=1e-10, atol=1e-10)
    dV, white = packed(found["dV"]), found["white"]
    np.testing.assert_allclose(white @ white, dV @ np.linalg.solve(sigma, dV), rtol=1e-10)
    assert_agrees(found["coloured"], found["dV"])


def test_repeated_eigenvalues_do_no_harm_to_the_values(masked_layer):
    V, layer = si.equicorrelated(tokens=5, correlation=0.2, norm=1.3), masked_layer(5)
    S = found_at(layer, V)["root"]
    assert_agrees(S @ S.T, references.diffusion(layer, V))


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
