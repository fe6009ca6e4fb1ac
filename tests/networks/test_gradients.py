"""Tangents and gradients of networks with weights: exact starts, Jacobians, and the SDE of 𝒱."""

import importlib
from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from helpers.cases import CAUSAL, LAYERS, random_covariance
from helpers.internals import sample_gradients, sample_tangents
from helpers.references import assert_agrees

from sdeinfer.networks import tokens_with_covariance

SIZES: dict[str, Any] = {"width": 8, "depth": 4, "networks": 2}


@pytest.fixture
def V0():
    return random_covariance(3)


@pytest.fixture
def directions():
    return random_covariance(3, seed=9)


@jax.jit
def one_layer(layer, X, key, number):
    """X after a layer of one network, and the Jacobian of the layer."""

    def forward(X):
        return layer.forward(X, key=jr.fold_in(key, number))

    return forward(X), jax.jacfwd(forward)(X).reshape(X.size, X.size)


@pytest.mark.long
@pytest.mark.parametrize("name", ["causal transformer", "transformer", "mlp"])
def test_tangents_are_differences_of_networks(name, V0, directions, key):
    layer = (LAYERS | CAUSAL)[name]()
    S = sample_tangents(layer, V0, directions=directions, **SIZES, key=key)
    assert S.shape == (2, 5, 6, 6)
    np.testing.assert_array_equal(S, np.swapaxes(S, -1, -2))
    assert len(np.unique(S[:, 1:, 0, 3].round(8))) == 2 * 4
    zero = np.zeros((3, 3))
    expected = np.block([[np.asarray(V0), zero], [zero, np.asarray(directions)]])
    assert_agrees(S[:, 0], np.broadcast_to(expected, (2, 6, 6)), rtol=1e-13)
    key_tokens, key_layers = jr.split(jr.split(key, 2)[0])
    rows = tokens_with_covariance(jnp.eye(6), width=8, key=key_tokens)
    values, vectors = np.linalg.eigh([V0, directions])
    X, X_dot = np.einsum("sij,sj,sjn->sin", vectors, np.sqrt(values), rows.reshape(2, 3, 8))
    step = 1e-6
    ends = X + step * X_dot, X, X - step * X_dot
    for number in range(4):
        ends = [one_layer(layer, end, key_layers, number)[0] for end in ends]
    both = np.concatenate([ends[1], (ends[0] - ends[2]) / (2 * step)])
    assert_agrees(S[0, -1], both @ both.T / 8, rtol=1e-6)


def test_a_token_that_does_not_move_and_sees_none_that_does_has_no_tangent(V0, key):
    layer = CAUSAL["causal transformer"]()
    S = sample_tangents(layer, V0, directions=np.diag([0.0, 1.0, 0.0]), **SIZES, key=key)
    np.testing.assert_array_equal(S[:, :, 3], 0)
    assert (S[:, 1:, 5, 5] > 0).all()


@pytest.mark.one_case
@pytest.mark.parametrize("name", ["transformer", "causal transformer", "mlp"])
def test_gradients_are_products_with_the_jacobian(name, V0, key):
    layer, layers = (LAYERS | CAUSAL)[name](), [0, 1, 4]
    norms, V = sample_gradients(layer, V0, layers=layers, cotangents=3, **SIZES, key=key)
    assert norms.shape == (2, 3, 3)
    assert V.shape == (2, 3, 3, 3)
    for network, own in enumerate(jr.split(key, 2)):
        key_tokens, key_layers, key_cotangents = jr.split(own, 3)
        inputs, jacobians = [tokens_with_covariance(V0, width=8, key=key_tokens)], []
        for number in range(4):
            X, J = one_layer(layer, inputs[-1], key_layers, number)
            inputs.append(X)
            jacobians.append(J)
        white = np.asarray(jr.normal(key_cotangents, (3, 3, 8)))
        for place, number in enumerate(layers):
            g = white.reshape(3, 24)
            for J in jacobians[: number - 1 if number else None : -1]:
                g = g @ J
            assert_agrees(norms[network, place], np.mean(np.sum(g.reshape(3, 3, 8) ** 2, axis=2), axis=0) / 8)
            assert_agrees(V[network, place], inputs[number] @ inputs[number].T / 8)


@pytest.mark.long
def test_networks_depend_neither_on_their_batches_nor_on_what_is_observed(V0, directions, monkeypatch, key):
    layer, sizes = LAYERS["mlp"](), SIZES | {"networks": 5}
    every = sample_tangents(layer, V0, directions=directions, **sizes, key=key)
    norms, V = sample_gradients(layer, V0, layers=[0, 2, 3], cotangents=1, **sizes, key=key)
    # Five networks in batches of three: the last batch is filled up with a network already drawn.
    module = importlib.import_module("sdeinfer.networks._gradients")
    monkeypatch.setattr(module, "ENTRIES_AT_ONCE", 3 * 5 * 3 * 8)
    thinned = sample_tangents(layer, V0, directions=directions, observe_every=2, **sizes | {"depth": 5}, key=key)
    assert_agrees(thinned, every[:, [0, 2, 4]], rtol=1e-12)
    again = sample_gradients(layer, V0, layers=[0, 2], cotangents=1, **sizes, key=key)
    for found, expected in zip(again, (norms, V), strict=True):
        assert_agrees(found, expected[:, :2], rtol=1e-12)
