"""Exact properties of finite layers, path by path."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from conftest import LAYERS
from references import assert_agrees

import sdeinfer as si


def exchanged(layer):
    """The layer with c₊ and c₋ exchanged, wherever it has them."""
    if isinstance(layer, si.Stack):
        return si.Stack(tuple(exchanged(part) for part in layer.layers))
    if "c_plus" not in layer.parameters():
        return layer
    return dataclasses.replace(layer, c_plus=layer.c_minus, c_minus=layer.c_plus)


@eqx.filter_jit
def forward(layer, X, *, key):
    return layer.forward(X, key=key)


@pytest.fixture
def X(key):
    return np.asarray(jr.normal(key, (3, 16)))


def test_exchange_of_slopes_is_a_change_of_sign(layer, X, key):
    # σ with exchanged slopes is −σ(−x) and the weights are symmetric in law: so V has the same law at every width.
    np.testing.assert_allclose(
        forward(exchanged(layer), -X, key=key), -forward(layer, X, key=key), rtol=1e-12, atol=1e-12
    )


def test_layers_are_equivariant_under_permutations_of_the_tokens(layer, X, key):
    order = np.array([2, 0, 1])
    assert_agrees(forward(layer, X[order], key=key), forward(layer, X, key=key)[order], rtol=1e-12)


def test_equal_tokens_stay_equal(layer, X, key):
    out = forward(layer, X[[0, 0, 2]], key=key)
    assert_agrees(out[1], out[0], rtol=1e-13)


def test_scale_of_the_tokens_passes_through_the_relu_layers(X, key):
    for name in ("mlp", "feedforward"):
        layer = LAYERS[name]()
        assert_agrees(forward(layer, 3 * X, key=key), 3 * forward(layer, X, key=key), rtol=1e-13)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
def test_precision_of_the_tokens_is_kept(name, dtype, X, key):
    layer = jax.tree.map(lambda value: value.astype(dtype), LAYERS[name]())
    assert forward(layer, X.astype(dtype), key=key).dtype == dtype


def test_a_transformer_is_its_stack(X, key):
    layer = LAYERS["transformer"]()
    np.testing.assert_array_equal(forward(layer, X, key=key), forward(layer.stack, X, key=key))


def test_a_stack_uses_fresh_weights_for_each_of_its_layers(X, key):
    mlp = si.ShapedMLP(0.0, 0.0)
    once, twice = si.Stack((mlp,)), si.Stack((mlp, mlp))
    # With one weight matrix for both layers, the second layer would apply the first one's matrix again.
    (first,) = jr.split(key, 1)
    again = forward(mlp, forward(mlp, X, key=first), key=first)
    np.testing.assert_array_equal(forward(once, X, key=key), forward(mlp, X, key=first))
    assert not np.allclose(forward(twice, X, key=key), again)


def test_attention_is_eq_9(X, key):
    """Eq. 1 and 9 token by token, with the weights that the layer draws."""
    gamma, tau0, key_width = 0.7, 0.8, 5
    layer = si.ShapedAttention(gamma=gamma, tau0=tau0, key_width=key_width)
    m, n = X.shape
    W_Q, W_K, W_V = (
        np.asarray(jr.normal(k, (n, width)))
        for k, width in zip(jr.split(key, 3), (key_width, key_width, n), strict=True)
    )
    x = np.asarray(X)
    expected = np.empty((m, n))
    for a in range(m):
        y = np.array([(x[a] @ W_Q / np.sqrt(n)) @ (x[b] @ W_K / np.sqrt(n)) for b in range(m)])
        weights = np.exp(y / (tau0 * np.sqrt(n * key_width)))
        attention = (np.arange(m) == a) + weights / weights.sum() - 1 / m
        expected[a] = np.sqrt(1 - gamma**2) * x[a] + gamma * attention @ x @ W_V / np.sqrt(n)
    assert_agrees(forward(layer, X, key=key), expected, rtol=1e-12)


@pytest.mark.parametrize("projection", [False, True])
def test_heads_are_attention_side_by_side(projection, X, key):
    """Each head's columns are those of Eq. 9 with its own part of the weights."""
    gamma, tau0, heads, key_width = 0.7, 0.8, 2, 5
    layer = si.ShapedAttention(gamma, tau0, key_width=key_width, heads=heads, output_projection=projection)
    m, n = X.shape
    columns = (heads * key_width, heads * key_width, n, n)[: 3 + projection]
    W_Q, W_K, W_V, *W_O = (
        np.asarray(jr.normal(k, (n, width))) for k, width in zip(jr.split(key, 3 + projection), columns, strict=True)
    )
    x, values = np.asarray(X), []
    for head in range(heads):
        own, made = (slice(head * w, (head + 1) * w) for w in (key_width, n // heads))
        Y = (x @ W_Q[:, own]) @ (x @ W_K[:, own]).T / n
        weights = np.exp(Y / (tau0 * np.sqrt(n * key_width)))
        A = np.eye(m) + weights / weights.sum(axis=1, keepdims=True) - 1 / m
        values.append(A @ x @ W_V[:, made] / np.sqrt(n))
    branch = np.concatenate(values, axis=1)
    if projection:
        branch = branch @ W_O[0] / np.sqrt(n)
    assert_agrees(forward(layer, X, key=key), np.sqrt(1 - gamma**2) * x + gamma * branch, rtol=1e-12)


@pytest.mark.parametrize("heads", [1, 2])
def test_causal_attention_is_eq_9_over_the_tokens_so_far(heads, X, key):
    """Row α is that of attention without a mask among the first α tokens, with the same weights."""
    masked, whole = (
        si.ShapedAttention(0.7, 0.8, key_width=5, heads=heads, pattern=each) for each in (si.CAUSAL, si.Pattern())
    )
    out = forward(masked, X, key=key)
    for a in range(len(X)):
        assert_agrees(out[a], forward(whole, X[: a + 1], key=key)[a], rtol=1e-12)
    # The first token sees itself alone: nothing of the softmax is left.
    gamma, W_V = 0.7, jr.normal(jr.split(key, 3)[2], (16, 16))
    assert_agrees(out[0], np.sqrt(1 - gamma**2) * X[0] + gamma * X[0] @ W_V / 4, rtol=1e-12)


@pytest.mark.parametrize("causal", [False, True])
def test_gains_are_those_of_eq_33(causal, X, key):
    gains, m = {"gamma1": 0.3, "gamma2": 0.8}, len(X)
    pattern = si.Pattern(causal=causal)
    shaped, trained = (si.ShapedAttention(0.7, 0.8, pattern=pattern, **each) for each in ({}, gains))
    values = X @ jr.normal(jr.split(key, 3)[2], (16, 16)) / 4
    mask = np.tril(np.ones((m, m))) if causal else np.ones((m, m))
    flat = mask / mask.sum(axis=1, keepdims=True)
    moved = (gains["gamma1"] - 1) * np.eye(m) - (gains["gamma2"] - 1) * flat
    difference = forward(trained, X, key=key) - forward(shaped, X, key=key)
    assert_agrees(difference, 0.7 * moved @ values, rtol=1e-12)


def test_gains_are_trained_where_they_are_given(X, key):
    def loss(layer):
        return jnp.sum(forward(layer, X, key=key) ** 2)

    assert si.ShapedAttention(0.7, 0.8).gamma1 is None
    one, two = si.ShapedAttention(0.7, 0.8), si.ShapedAttention(0.7, 0.8, gamma1=1.0, gamma2=1.0)
    np.testing.assert_array_equal(forward(one, X, key=key), forward(two, X, key=key))
    slope = jax.grad(loss)(two)
    assert slope.gamma1 != 0
    assert slope.gamma2 != 0
    assert set(two.parameters()) == {"gamma", "tau0", "gamma1", "gamma2"}


@pytest.mark.parametrize("expansion", [1, 4, 0.25])
def test_feedforward_is_eq_4(expansion, X, key):
    gamma, c_plus, c_minus = 0.6, 0.5, -1.0
    layer = si.ResidualFeedForward(gamma=gamma, c_plus=c_plus, c_minus=c_minus, expansion=expansion)
    n = X.shape[1]
    units = int(expansion * n)
    W_pre, W_post = (
        np.asarray(jr.normal(k, shape)) for k, shape in zip(jr.split(key), ((n, units), (units, n)), strict=True)
    )
    s_plus, s_minus = 1 + c_plus / np.sqrt(n), 1 + c_minus / np.sqrt(n)
    h = np.asarray(X) @ W_pre / np.sqrt(n)
    shaped = np.where(h > 0, s_plus * h, s_minus * h) * np.sqrt(2 / (s_plus**2 + s_minus**2) / units)
    assert_agrees(forward(layer, X, key=key), np.sqrt(1 - gamma**2) * X + gamma * shaped @ W_post, rtol=1e-12)


@pytest.mark.slow  # needs the optimised programs of users, in which XLA rounds the logits anew at each use
def test_huge_logits_are_those_of_a_saturated_softmax():
    layer, X = si.ShapedAttention(gamma=0.7, tau0=1.0, gamma2=0.0), 1e12 * jr.normal(jr.key(0), (4, 300))
    found = jax.jit(jax.vmap(lambda key: layer.forward(X, key=key)))(jr.split(jr.key(1), 8))
    assert np.isfinite(found).all()
