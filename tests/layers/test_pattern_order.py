"""The next order of attention of any pattern, against series of the softmax, sampled softmaxes and index sums."""

import functools

import jax
import numpy as np
import pytest
from helpers import pattern_references, references
from helpers.cases import random_covariance
from helpers.internals import (
    EVERY_TOKEN,
    LARGEST_ERROR,
    VARIANCE_FEATURES,
    attention_drift,
    attention_drift_next,
    attention_noise_next,
    attention_noise_tensor,
    frame,
    pattern_drift_next,
    pattern_features,
    relu_drift,
    relu_drift_curvature,
    relu_noise,
    spectrum,
    unvech,
    vech,
)
from helpers.moment_references import along, crossed, repeated
from helpers.pattern_references import covariance
from helpers.references import assert_agrees
from scipy.special import ndtri
from scipy.stats import qmc

from sdeinfer.covariance import CAUSAL, Pattern

PATTERNS = {
    "no mask": (EVERY_TOKEN, 4),
    "causal": (CAUSAL, 4),
    "two prompts": (Pattern(prompts=(3, 1)), 4),
    "two causal prompts": (Pattern(causal=True, prompts=(2, 2)), 4),
    "a mask of its own": (Pattern.of_mask([[0, 1, 1, 0], [1, 1, 0, 1], [0, 0, 0, 1], [1, 1, 1, 1]]), 4),
}
"""All have one number of tokens, so that they share programs."""

ANY = pytest.mark.parametrize("name", PATTERNS)
FEATURES = {name: number for number, name in enumerate((*VARIANCE_FEATURES[:9], "linear_repeat", "attention_repeat"))}


@functools.cache
def of(name: str):
    """A pattern, V, 𝒜, the coordinates and the features."""
    pattern, tokens = PATTERNS[name]
    V = np.asarray(random_covariance(tokens, seed=tokens))
    noise = pattern_references.attention_tensor(V, pattern.mask(tokens))
    W, U, e = pattern_references.coordinates(V, noise)
    drifts = drifts_of(V)
    return pattern, V, noise, W, U, e, drifts, pattern_features(V, pattern, W, U, *drifts)


def drifts_of(V) -> tuple[np.ndarray, ...]:
    """Symmetric matrices for B₁, B₂ and B₁′; only the second is that of V and its pattern."""
    V = np.asarray(V)
    return np.asarray(attention_drift(V)), np.asarray(relu_drift(V)), attention_drift_next(V)


@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 5])
def test_without_a_mask_it_is_the_next_order_without_a_mask(tokens):
    V = np.asarray(random_covariance(tokens, seed=tokens))
    at, (i, j) = frame(V, spectrum(V)), np.triu_indices(tokens)
    R, Q, repeats = np.asarray(at.R), np.asarray(at.Q), 1.0 + (i == j)
    W = (R[i, :, None] * R[j, None, :] + R[j, :, None] * R[i, None, :]) / (2 * np.sqrt(repeats))[:, None, None]
    U = (Q.T[i, :, None] * Q.T[j, None, :] + Q.T[j, :, None] * Q.T[i, None, :]) / np.sqrt(repeats)[:, None, None]
    attention, relu, after = drifts_of(V)
    b1, b2, b1_next = (np.diag(R @ B @ R.T) for B in (attention, relu, after))
    noise, moved = relu_noise(at, R @ relu @ R.T), R @ relu @ R.T
    mixing = (at.delta[i] ** 2 + at.delta[j] ** 2) / tokens**2
    expected = {
        "attention_growth": b1[i] + b1[j],
        "relu_growth": b2[i] + b2[j],
        "attention_growth_next": b1_next[i] + b1_next[j],
        "attention_next": attention_noise_next(at)[i, j],
        "relu_hidden": noise.hidden[i, j],
        "relu_tokens": noise.tokens[i, j],
        "relu_response": noise.response[i, j],
        "relu_growth_square": (b2[i] * b2[j] + moved[i, j] ** 2) / repeats,
        "relu_hidden_square": noise.hidden_square[i, j],
        "linear_repeat": repeats,
        "attention_repeat": repeats * mixing,
    }
    found = pattern_features(V, EVERY_TOKEN, W, U, attention, relu, after)
    assert list(expected) == list(FEATURES)
    for (feature, values), feature_found in zip(expected.items(), found, strict=True):
        np.testing.assert_allclose(feature_found, values, rtol=1e-10, atol=1e-13, err_msg=feature)
    np.testing.assert_allclose(pattern_drift_next(V, EVERY_TOKEN), attention_drift_next(V), rtol=1e-10, atol=1e-14)


@ANY
def test_attention_drifts_as_the_expanded_softmax(name):
    pattern, V, *_ = of(name)
    weights, terms = pattern_references.expanded(V, pattern.mask(len(V)))
    assert_agrees(pattern_drift_next(V, pattern), np.tensordot(weights, terms[4], 1))


@ANY
def test_attention_has_the_noise_of_the_expanded_softmax(name):
    pattern, V, noise, W, _, e, _, features = of(name)
    assert_agrees(attention_noise_tensor(V, pattern), noise)
    weights, terms = pattern_references.expanded(V, pattern.mask(len(V)))
    t1, t2, t3 = (np.einsum("qab,sab->sq", W, T) for T in terms[1:4])
    assert_agrees(np.diag(covariance(weights, t1, t1)), e)
    expected = covariance(weights, t2, t2) + 2 * covariance(weights, t1, t3)
    assert_agrees(features[FEATURES["attention_next"]], np.diag(expected))


@ANY
def test_noise_that_acts_twice_is_a_sum_over_tokens(name):
    _, V, noise, W, *_, features = of(name)
    for tensor, feature in ((references.linear_tensor(V), "linear_repeat"), (noise, "attention_repeat")):
        assert_agrees(features[FEATURES[feature]], along(W, repeated(tensor)))


@jax.jit
@functools.partial(jax.vmap, in_axes=(None, 0))
def relu_drifts_along(V, S):
    return jax.jvp(relu_drift, (V,), (S,))[1]


@ANY
def test_growth_within_a_layer_is_a_sum_over_tokens(name):
    _, V, _, W, U, _, drifts, features = of(name)
    for B, feature in zip(drifts, ("attention_growth", "relu_growth", "attention_growth_next"), strict=True):
        assert_agrees(features[FEATURES[feature]], along(W, crossed(V, B)))
    assert_agrees(features[FEATURES["relu_growth_square"]], along(W, references.linear_tensor(drifts[1])))
    assert_agrees(features[FEATURES["relu_response"]], np.einsum("qab,qab->q", W, relu_drifts_along(V, U)))


@ANY
def test_relu_noise_is_a_sum_over_tokens(name):
    _, V, _, W, _, _, (_, relu, _), features = of(name)
    absolute = V + 4 * relu
    mixed = pattern_references.signed_and_absolute(V, absolute)
    # h_a h_b |h_c||h_d| with the two absolute values in one W, or one in each.
    same, each = (np.einsum(f"{order}->abcd", mixed) for order in ("abcd", "acbd"))
    normal, pairs = along(W, pattern_references.isserlis(V)), 2 * along(W, same) + 4 * along(W, each)
    drift = 4 * np.einsum("qab,ab->q", W, relu)
    size = np.einsum("qab,ab->q", W, V)
    assert_agrees(features[FEATURES["relu_hidden"]], pairs - 2 * normal - 2 * size * drift)
    assert_agrees(features[FEATURES["relu_tokens"]], 4 * along(W, each))
    # Four absolute values have no closed form; the quadrature is good to a quarter of 1 plus the moment.
    h = np.linalg.cholesky(V) @ ndtri(qmc.Sobol(len(V), rng=np.random.default_rng(1)).random(2**16)).T
    squares = np.stack([(np.einsum("an,qab,bn->qn", x, W, x)) for x in (np.abs(h), h)])
    moment = ((squares[0] - squares[1]) ** 2).mean(axis=1)
    four = (squares[0] ** 2).mean(axis=1)
    error = features[FEATURES["relu_hidden_square"]] - (normal - pairs + four - drift**2)
    assert (np.abs(error) <= LARGEST_ERROR * (1 + moment)).all()


hessian_of_relu_drift = jax.jit(jax.hessian(lambda v: vech(relu_drift(unvech(v)))))


@ANY
def test_curvature_of_a_relu_is_that_of_its_second_derivative(name):
    pattern, V, noise, *_ = of(name)
    hessian, found = hessian_of_relu_drift(vech(V)), relu_drift_curvature(V, attention_noise_tensor(V, pattern))
    expected, of_linear = (
        np.einsum("pqr,qr->p", hessian, references.packed_tensor(tensor)) / 2
        for tensor in (noise, references.linear_tensor(V))
    )
    np.testing.assert_allclose(references.packed(found), expected, rtol=1e-10, atol=1e-13)
    np.testing.assert_allclose(of_linear, 0, atol=1e-12 * np.abs(hessian).max())
    np.testing.assert_allclose(relu_drift_curvature(V, references.linear_tensor(V)), 0, atol=1e-14)
    if pattern.everything:
        np.testing.assert_allclose(found, 0, atol=1e-14)
    else:
        assert np.abs(found).max() > 1e-3


def test_tokens_that_attend_to_themselves_only_are_not_moved():
    V, alone = np.asarray(random_covariance(3, seed=3)), Pattern.of_mask(np.eye(3))
    for found in (pattern_drift_next(V, alone), attention_noise_tensor(V, alone)):
        np.testing.assert_array_equal(found, 0)


def test_terms_scale_as_their_order_in_the_covariance():
    pattern, V, noise, W, U, _, (attention, relu, after), features = of("a mask of its own")
    larger = pattern_features(3 * V, pattern, W / 3, U * 3, 27 * attention, 3 * relu, 3**5 * after)
    assert_agrees(larger, 3.0 ** np.array([2, 0, 4, 4, 0, 0, 0, 0, 0, 0, 2])[:, None] * features)
    assert_agrees(pattern_drift_next(3 * V, pattern), 3**5 * pattern_drift_next(V, pattern))
    assert_agrees(relu_drift_curvature(3 * V, 3**4 * noise), 27 * relu_drift_curvature(V, noise))


@pytest.mark.one_case("a mask of its own")
@pytest.mark.parametrize("name", ["causal", "a mask of its own"])
def test_jax_agrees_with_numpy_and_has_derivatives(name):
    """The derivatives are those of differences."""
    pattern, V, _, W, U, _, drifts, features = of(name)

    def everything(V, W):
        curvature = relu_drift_curvature(V, attention_noise_tensor(V, pattern))
        return pattern_drift_next(V, pattern), curvature, pattern_features(V, pattern, W, U, *drifts)

    @jax.jit
    def along(V, W, S):
        return jax.jvp(lambda V: everything(V, W), (V,), (S,))

    A, h = np.random.default_rng(0).normal(size=V.shape), 1e-3
    S = A + A.T
    values, derivatives = along(V, W, S)
    for found, expected in zip(values, everything(V, W), strict=True):
        assert isinstance(found, jax.Array)
        assert_agrees(found, expected, rtol=1e-12)
    ends = [jax.tree.map(np.subtract, along(V + k * h * S, W, S)[0], along(V - k * h * S, W, S)[0]) for k in (1, 2)]
    for found, near, far in zip(derivatives, *ends, strict=True):
        assert_agrees(found, (8 * near - far) / (12 * h), rtol=1e-6)
    stack = np.stack([V, 2 * V])
    for found, expected in zip(everything(stack[:1], W[None])[:2], everything(V, W)[:2], strict=True):
        assert_agrees(found[0], expected, rtol=1e-12)
    doubled = (np.stack([B, 2 * B]) for B in drifts)
    both = pattern_features(stack, pattern, np.stack([W, W / 2]), np.stack([U, 2 * U]), *doubled)
    assert_agrees(both[:, 0], features, rtol=1e-12)


@pytest.mark.parametrize("correlation", [0.0, 0.999])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_equal_tokens_keep_the_precision(correlation, dtype):
    V = np.asarray((1 - correlation) * np.eye(3) + correlation, dtype)
    found = pattern_drift_next(V, CAUSAL), relu_drift_curvature(V, attention_noise_tensor(V, CAUSAL))
    for terms in found:
        assert terms.dtype == dtype
        assert np.isfinite(terms).all()
