"""Exact properties of finite layers, path by path."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from helpers.references import assert_agrees

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


@pytest.mark.one_case("stack")
def test_exchange_of_slopes_is_a_change_of_sign(layer, X, key):
    # σ with exchanged slopes is −σ(−x) and the weights are symmetric in law: so V has the same law at every width.
    np.testing.assert_allclose(
        forward(exchanged(layer), -X, key=key), -forward(layer, X, key=key), rtol=1e-12, atol=1e-12
    )


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
def test_precision_of_the_tokens_is_kept(layer, dtype, X, key):
    layer = jax.tree.map(lambda value: value.astype(dtype), layer)
    assert eqx.filter_eval_shape(layer.forward, X.astype(dtype), key=key).dtype == dtype


def test_a_stack_uses_fresh_weights_for_each_of_its_layers(X, key):
    mlp = si.ShapedMLP(0.0, 0.0)
    once, twice = si.Stack((mlp,)), si.Stack((mlp, mlp))
    # With one weight matrix for both layers, the second layer would apply the first one's matrix again.
    (first,) = jr.split(key, 1)
    again = forward(mlp, forward(mlp, X, key=first), key=first)
    np.testing.assert_array_equal(forward(once, X, key=key), forward(mlp, X, key=first))
    assert not np.allclose(forward(twice, X, key=key), again)


ATTENTION = {
    "one head": {},
    "heads, W_O and a mask": {"heads": 2, "output_projection": True, "pattern": si.CAUSAL},
    "gains and a mask": {"gamma1": 0.3, "gamma2": 0.8, "pattern": si.CAUSAL},
}


@pytest.mark.parametrize("name", ATTENTION)
def test_attention_is_eq_9_and_33(name, X, key):
    """Token by token and head by head, each with its columns of the weights that the layer draws."""
    gamma, tau0, key_width, options = 0.7, 0.8, 5, ATTENTION[name]
    layer = si.ShapedAttention(gamma, tau0, key_width=key_width, **options)
    heads, causal, (m, n) = layer.heads, "pattern" in options, X.shape
    gain, flat_gain = (options.get(each, 1.0) for each in ("gamma1", "gamma2"))
    columns = (heads * key_width, heads * key_width, n, n)[: 3 + layer.output_projection]
    keys = jr.split(key, len(columns))
    W_Q, W_K, W_V, *W_O = (np.asarray(jr.normal(k, (n, width))) for k, width in zip(keys, columns, strict=True))
    branch = np.empty((m, n))
    for head in range(heads):
        own, made = (slice(head * w, (head + 1) * w) for w in (key_width, n // heads))
        for a in range(m):
            seen = X[: a + 1] if causal else X
            y = np.array([(X[a] @ W_Q[:, own] / np.sqrt(n)) @ (x @ W_K[:, own] / np.sqrt(n)) for x in seen])
            weights = np.exp(y / (tau0 * np.sqrt(n * key_width)))
            attention = gain * (np.arange(len(seen)) == a) + weights / weights.sum() - flat_gain / len(seen)
            branch[a, made] = attention @ seen @ W_V[:, made] / np.sqrt(n)
    if W_O:
        branch = branch @ W_O[0] / np.sqrt(n)
    assert_agrees(forward(layer, X, key=key), np.sqrt(1 - gamma**2) * X + gamma * branch, rtol=1e-12)


def test_gains_are_trained_where_they_are_given(X, key):
    one, two = (si.ShapedAttention(0.7, 0.8, key_width=5, **gains) for gains in ({}, {"gamma1": 1.0, "gamma2": 1.0}))
    assert one.gamma1 is None
    np.testing.assert_array_equal(forward(one, X, key=key), forward(two, X, key=key))
    slope = jax.grad(lambda layer: jnp.sum(forward(layer, X, key=key) ** 2))(two)
    assert slope.gamma1 != 0
    assert slope.gamma2 != 0
    assert set(two.parameters()) == {"gamma", "tau0", "gamma1", "gamma2"}


@pytest.mark.one_case
@pytest.mark.parametrize("expansion", [4, 0.25])
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
