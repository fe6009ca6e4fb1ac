"""Tangents and gradients of networks with weights: exact starts, Jacobians, and the SDE of 𝒱."""

import importlib
from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from budget import assert_mean, assert_same_distribution
from conftest import CAUSAL, LAYERS, random_covariance
from references import assert_agrees

import sdeinfer as si
from sdeinfer.networks import tokens_with_covariance
from sdeinfer.networks._gradients import sample_gradients, sample_tangents

SIZES: dict[str, Any] = {"width": 8, "depth": 4, "networks": 5}


@pytest.fixture
def V0():
    return random_covariance(3)


@pytest.fixture
def directions():
    return random_covariance(3, seed=9)


def passed(layer, X, key, layers: range):
    """X after so many of the layers of one network."""
    for number in layers:
        X = layer.forward(X, key=jr.fold_in(key, number))
    return X


def test_tangents_start_in_the_given_directions(V0, directions, key):
    S = sample_tangents(LAYERS["transformer"](), V0, directions=directions, **SIZES, key=key)
    assert S.shape == (5, 5, 6, 6)
    zero = np.zeros((3, 3))
    expected = np.block([[np.asarray(V0), zero], [zero, np.asarray(directions)]])
    assert_agrees(S[:, 0], np.broadcast_to(expected, (5, 6, 6)), rtol=1e-13)
    np.testing.assert_array_equal(S, np.swapaxes(S, -1, -2))
    assert len(np.unique(S[:, 1:, 0, 3].round(8))) == 20


@pytest.mark.parametrize("name", ["transformer", "mlp", "causal transformer"])
def test_tangents_are_differences_of_networks(name, V0, directions, key):
    layer = (LAYERS | CAUSAL)[name]()
    S = sample_tangents(layer, V0, directions=directions, **SIZES | {"networks": 1}, key=key)[0, -1]
    key_tokens, key_layers = jr.split(jr.split(key, 1)[0])
    rows = tokens_with_covariance(jnp.eye(6), width=8, key=key_tokens)
    values, vectors = (jnp.stack(x) for x in zip(*map(jnp.linalg.eigh, (V0, directions)), strict=True))
    X, X_dot = jnp.einsum("sij,sj,sjn->sin", vectors, jnp.sqrt(values), rows.reshape(2, 3, 8))
    step = 1e-6
    ends = [passed(layer, X + sign * step * X_dot, key_layers, range(4)) for sign in (1, 0, -1)]
    both = np.concatenate([ends[1], (ends[0] - ends[2]) / (2 * step)])
    assert_agrees(S, both @ both.T / 8, rtol=1e-6)


def test_a_token_that_does_not_move_and_sees_none_that_does_has_no_tangent(V0, key):
    layer = CAUSAL["causal transformer"]()
    S = sample_tangents(layer, V0, directions=np.diag([0.0, 1.0, 0.0]), **SIZES, key=key)
    np.testing.assert_array_equal(S[:, :, 3], 0)
    assert (S[:, 1:, 5, 5] > 0).all()


@pytest.mark.parametrize("name", ["transformer", "mlp", "causal transformer"])
def test_gradients_are_products_with_the_jacobian(name, V0, key):
    layer, layers = (LAYERS | CAUSAL)[name](), [0, 1, 4]
    norms, V = sample_gradients(layer, V0, layers=layers, cotangents=3, **SIZES | {"networks": 2}, key=key)
    assert norms.shape == (2, 3, 3)
    assert V.shape == (2, 3, 3, 3)
    for network, own in enumerate(jr.split(key, 2)):
        key_tokens, key_layers, key_cotangents = jr.split(own, 3)
        X0 = tokens_with_covariance(V0, width=8, key=key_tokens)
        white = jr.normal(key_cotangents, (3, 3, 8))
        for place, number in enumerate(layers):
            X = passed(layer, X0, key_layers, range(number))
            J = jax.jacfwd(lambda X, start=number: passed(layer, X, key_layers, range(start, 4)))(X)  # noqa: B023
            expected = np.mean(np.sum(np.einsum("gai,aibj->gbj", white, J) ** 2, axis=2), axis=0) / 8
            assert_agrees(norms[network, place], expected)
            assert_agrees(V[network, place], X @ X.T / 8)


def test_gradient_norms_have_the_squared_norm_of_the_jacobian_as_their_mean(V0, key):
    layer = LAYERS["transformer"]()
    sizes: dict[str, Any] = {"width": 8, "depth": 2, "networks": 1, "layers": [0], "key": key}
    key_tokens, key_layers, _ = jr.split(jr.split(key, 1)[0], 3)
    X0 = tokens_with_covariance(V0, width=8, key=key_tokens)
    J = jax.jacfwd(lambda X: passed(layer, X, key_layers, range(2)))(X0)
    norms, _ = sample_gradients(layer, V0, cotangents=20_000, **sizes)
    squares = np.sum(np.asarray(jax.vmap(lambda g: jnp.einsum("ai,aibj->bj", g, J))(_white(key, 20_000)) ** 2), axis=2)
    assert_agrees(norms[0, 0], squares.mean(axis=0) / 8)
    assert_mean(squares / 8, np.sum(np.asarray(J) ** 2, axis=(0, 1, 3)) / 8)


def _white(key, count: int):
    return jr.normal(jr.split(jr.split(key, 1)[0], 3)[2], (count, 3, 8))


def test_at_the_output_gradients_are_the_cotangents(V0, key):
    norms, V = sample_gradients(LAYERS["mlp"](), V0, layers=[4], cotangents=500, **SIZES | {"networks": 40}, key=key)
    assert_mean(norms.reshape(40, 3).mean(axis=1), 1.0)
    assert np.isfinite(V).all()


def test_single_precision_tokens_give_single_precision(V0, directions, key):
    V0, directions = V0.astype(jnp.float32), directions.astype(jnp.float32)
    layer = LAYERS["transformer"]()
    assert sample_tangents(layer, V0, directions=directions, **SIZES, key=key).dtype == np.float32
    norms, V = sample_gradients(layer, V0, layers=[0, 4], **SIZES, key=key)
    assert norms.dtype == V.dtype == np.float32


@pytest.mark.parametrize("together", [1, 3])
def test_networks_do_not_depend_on_their_batches(together, V0, directions, monkeypatch, key):
    # Five networks in batches of three: the last batch is filled up with a network already drawn.
    def both():
        tangents = sample_tangents(LAYERS["mlp"](), V0, directions=directions, **SIZES, key=key)
        return tangents, *sample_gradients(LAYERS["mlp"](), V0, layers=[0, 2], cotangents=1, **SIZES, key=key)

    expected = both()
    module = importlib.import_module("sdeinfer.networks._gradients")
    monkeypatch.setattr(module, "WEIGHTS_IN_MEMORY", together * 5 * 3 * 8)
    for found, before in zip(both(), expected, strict=True):
        assert_agrees(found, before, rtol=1e-12)


def test_thinned_tangents_are_of_the_same_networks(V0, directions, key):
    layer, sizes = LAYERS["mlp"](), SIZES | {"depth": 5}
    every = sample_tangents(layer, V0, directions=directions, **sizes, key=key)
    thinned = sample_tangents(layer, V0, directions=directions, observe_every=2, **sizes, key=key)
    assert_agrees(thinned, every[:, [0, 2, 4]], rtol=1e-12)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"width": 5}, "width: 3 tokens and their tangents need a width of at least 6, got 5"),
        ({"depth": 0}, "depth: a whole number of at least 1 is needed, got 0"),
        ({"networks": 0}, "networks: a whole number of at least 1 is needed, got 0"),
        ({"observe_every": 5}, "observe_every: must not exceed the depth 4, got 5"),
        ({"directions": np.eye(2)}, r"directions: shape \(3, 3\), that of V0, is needed, got \(2, 2\)"),
        ({"directions": -np.eye(3)}, "directions: not positive semi-definite"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_tangents_that_cannot_be_are_refused(sizes, message, V0, directions, key):
    with pytest.raises(ValueError, match=message):
        sample_tangents(LAYERS["mlp"](), V0, **{"directions": directions} | SIZES | sizes, key=key)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"width": 2}, "width: 3 tokens need a width of at least 3, got 2"),
        ({"cotangents": 0}, "cotangents: a whole number of at least 1 is needed, got 0"),
        ({"layers": []}, "layers: a list of whole numbers is needed"),
        ({"layers": [0.5]}, "layers: a list of whole numbers is needed"),
        ({"layers": [0, 5]}, r"layers: ascending numbers from 0 to the depth 4 are needed, got \[0, 5\]"),
        ({"layers": [2, 2]}, r"layers: ascending numbers from 0 to the depth 4 are needed, got \[2, 2\]"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_gradients_that_cannot_be_are_refused(sizes, message, V0, key):
    with pytest.raises(ValueError, match=message):
        sample_gradients(LAYERS["mlp"](), V0, **{"layers": [0]} | SIZES | sizes, key=key)


def test_networks_that_overflow_are_refused(key):
    V0 = 1e30 * np.eye(2, dtype=np.float32)
    with pytest.raises(ValueError, match="covariance: 3 of 3 networks overflow, the first of them network 0"):
        sample_gradients(si.ShapedMLP(1e15, -1e15), 1e8 * V0, layers=[0], width=4, depth=3, networks=3, key=key)


@pytest.mark.slow
def test_networks_have_the_sdes_tangents_and_gradients(key):
    """At T = ½ of width 96: D of every token from one that moves, and the mean squared gradient norm of that token."""
    width, depth, networks, paths, keys = 96, 48, 768, 2**12, jr.split(key, 3)
    layer = si.ShapedTransformer(gamma=0.4, tau0=1.0, c_plus=1.0, c_minus=-1.0)
    V0, D0 = si.equicorrelated(tokens=3, correlation=0.2), jnp.diag(jnp.array([1.0, 0.0, 0.0]))
    sizes: dict[str, Any] = {"width": width, "depth": depth, "networks": networks}
    single = V0.astype(jnp.float32)
    S = sample_tangents(layer, single, directions=D0, observe_every=depth, **sizes, key=keys[0])[:, -1]
    norms, _ = sample_gradients(layer, single, layers=[0], **sizes, key=keys[1])
    end = si.tangents(layer, V0, [depth / width], D0, paths=paths, key=keys[2])
    V, C, D = (np.asarray(x[:, -1]) for x in (end.covariance, end.cross, end.tangent))
    of_paths = np.block([[V, C], [C.mT, D]])
    for statistic in (
        lambda S: np.log(S[:, 3, 3]),
        lambda S: np.log(S[:, 4, 4]),
        lambda S: S[:, 0, 3] / np.sqrt(S[:, 0, 0] * S[:, 3, 3]),
        lambda S: S[:, 3, 4] / np.sqrt(S[:, 3, 3] * S[:, 4, 4]),
    ):
        print(f"mean {statistic(S).mean():.4f} in networks, {statistic(of_paths).mean():.4f} SDE")
        assert_same_distribution(statistic(S), statistic(of_paths))
    gradients, predicted = norms[:, 0, 0], np.trace(of_paths[:, 3:, 3:], axis1=1, axis2=2)
    print(f"squared gradient norm {gradients.mean():.4f} in networks, {predicted.mean():.4f} SDE")
    assert_mean(gradients - predicted[: len(gradients)], 0.0)
