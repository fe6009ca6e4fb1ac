"""Networks with a modification taken away, against their formulas with the same weights."""

import dataclasses

import jax.random as jr
import numpy as np
import pytest

import sdeinfer as si
from sdeinfer.networks import Baseline, sample_baseline, tokens_with_covariance

WIDTH = 16


def formula(baseline: Baseline, X, key) -> np.ndarray:
    """Eq. 9 and then Eq. 4 in residual branches, with switches."""
    of_attention, of_feedforward = (
        [np.asarray(jr.normal(own, (WIDTH, WIDTH))) / np.sqrt(WIDTH) for own in jr.split(branch, count)]
        for branch, count in zip(jr.split(key), (3, 2), strict=True)
    )
    X, tokens, gamma = np.asarray(X), len(X), baseline.gamma
    Q, K, values = (X @ W for W in of_attention)
    tau = np.sqrt(WIDTH) if baseline.temperature == "usual" else baseline.tau0 * WIDTH
    A = np.exp(Q @ K.T / tau)
    A = A / A.sum(axis=1, keepdims=True) + baseline.identity * np.eye(tokens) - baseline.centred / tokens
    X = np.sqrt(1 - gamma**2) * X + gamma * A @ values
    up, down = (1.0, 0.0) if baseline.c is None else (1 + sign * baseline.c / np.sqrt(WIDTH) for sign in (1, -1))
    h = X @ of_feedforward[0]
    hidden = np.where(h > 0, up, down) * h * np.sqrt(2 / (up**2 + down**2))
    return np.sqrt(1 - gamma**2) * X + gamma * hidden @ of_feedforward[1]


@pytest.mark.parametrize(
    "switches",
    [{}, {"identity": False}, {"centred": False, "tau0": 0.5}, {"temperature": "usual", "tau0": 0.5}, {"c": None}],
    ids=str,
)
def test_a_layer_is_its_formula(switches, key):
    baseline, X = Baseline(gamma=0.7, **switches), jr.normal(jr.fold_in(key, 1), (3, WIDTH))
    np.testing.assert_allclose(baseline.forward(X, key=key), formula(baseline, X, key), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("shared", [False, True])
def test_networks_repeat_the_layer_with_weights_of_their_own(shared, key):
    baseline, V0 = Baseline(gamma=0.7, shared=shared), si.equicorrelated(tokens=3, correlation=0.2)
    data = sample_baseline(baseline, V0, width=WIDTH, depth=2, networks=3, key=key)
    for V, own in zip(data["covariance"].values, jr.split(key, 3), strict=True):
        key_tokens, key_layers = jr.split(own)
        X = tokens_with_covariance(V0, width=WIDTH, key=key_tokens)
        np.testing.assert_array_equal(V[0], V0)
        for layer in range(2):
            X = formula(baseline, X, jr.fold_in(key_layers, 0 if shared else layer))
            np.testing.assert_allclose(V[1 + layer], X @ X.T / WIDTH, rtol=1e-10)


def test_shortcut_is_that_of_residual_branches_unless_it_is_given(key):
    X = jr.normal(key, (3, WIDTH))
    baseline = Baseline(gamma=0.6, weights=0.0)
    # Without branches, each of the two sublayers leaves the shortcut alone.
    np.testing.assert_allclose(baseline.forward(X, key=key), 0.8**2 * X, rtol=1e-12)
    common = dataclasses.replace(baseline, gamma=1.0, shortcut=1.0)
    np.testing.assert_array_equal(common.forward(X, key=key), X)


def test_layer_norm_makes_branches_independent_of_the_tokens_scale(key):
    X = jr.normal(key, (3, WIDTH))
    branches = Baseline(gamma=1.0, shortcut=0.0, layer_norm=True)
    np.testing.assert_allclose(branches.forward(5 * X, key=key), branches.forward(X, key=key), rtol=1e-10)
    without = dataclasses.replace(branches, layer_norm=False)
    assert not np.allclose(without.forward(5 * X, key=key), without.forward(X, key=key))
