"""Innovations of layers that obey the law, and of layers that do not."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy
import xarray as xr
from baselines import Baseline, sample_baseline
from diagnostics.one_token import GAMMA, WIDTH, innovations_of_one, one_token
from helpers import references
from helpers.budget import assert_within
from helpers.cases import LAYERS
from helpers.internals import attributes_of_layer, groups_of_data, pairs, successive, used_of
from helpers.references import assert_agrees

import sdeinfer as si
from sdeinfer.diagnostics import innovation_tests
from sdeinfer.infer import innovations, law_at
from sdeinfer.layers import template
from sdeinfer.likelihood import any_transitions
from sdeinfer.observation import covariance_dataset

V0 = si.equicorrelated(tokens=3, correlation=0.2, norm=1.2)
SIZES = {"width": 96, "depth": 16, "networks": 64}
TRANSFORMER = si.ShapedTransformer(gamma=0.5, tau0=1.0, c_plus=1.0, c_minus=-1.0)


def known(layer, data: xr.Dataset) -> xr.DataTree:
    """A posterior of data that is sure of the truth."""
    architecture = template(layer)
    posterior = xr.Dataset({name: (("chain", "draw"), [[float(x)]]) for name, x in layer.parameters().items()})
    layers = xr.Dataset(
        {name: ("network", np.full(data.sizes["network"], float(x))) for name, x in layer.parameters().items()}
    )
    tree = xr.DataTree.from_dict({"posterior": posterior, "layers": layers, **groups_of_data(data, used_of(data))})
    tree.attrs = {**attributes_of_layer(architecture), "law": "finite-width", "every_layer": 1.0}
    return tree


def one_layer(layer, tokens: int, width: int = 64):
    """One transition, and the limit's law at it."""
    V, after = references.wishart_path(tokens, 1, width=width, seed=tokens)
    path = any_transitions(covariance_dataset(np.stack([V, after])[None], width=width))
    u = layer.coordinates.unconstrained(layer.parameters())
    law = law_at(template(layer), u, widths=np.array([float(width)]), law="limit")
    return V, after, next(innovations(path, law)), u


@pytest.mark.one_case
@pytest.mark.parametrize("name", ["transformer", "attention", "feedforward", "mlp"])
def test_score_is_the_gradient_of_the_naive_log_density(name):
    layer, width = LAYERS[name](), 64
    V, V_next, found, u = one_layer(layer, 3)

    def log_density(u):
        there = template(name).with_coordinates(jnp.asarray(u))
        return references.log_density(there, V, V_next, width=width)

    step = 1e-5
    slopes = [(log_density(u + e) - log_density(u - e)) / (2 * step) for e in step * np.eye(len(u))]
    np.testing.assert_allclose(found.score[0], slopes, rtol=1e-5, atol=1e-6)


def layer_information(layer, V, width):
    """Fisher information of one layer from V by the limit's law, with dense matrices.

    I = h b′ᵀ Ω⁻¹ b′ + ½ tr(Ω⁻¹ Ω′ Ω⁻¹ Ω′) for dV in the coordinates L⁻¹ dV L⁻ᵀ, with ⟨S, Ω T⟩ = 2a⟨S, T⟩ +
    2κ²⟨S, MT + TM⟩ and M = (LᵀHL)²/m².
    """
    names, u = layer.coordinates, layer.coordinates.unconstrained(layer.parameters())

    def coefficients(u):
        limit = layer.with_parameters(names.constrained(u)).limit()
        return jnp.stack([limit.attention_drift, limit.relu_drift, limit.linear_noise, limit.attention_noise])

    (_, _, a, kappa2), slopes = map(np.asarray, (coefficients(u), jax.jacfwd(coefficients)(u)))
    m, L, unit = len(V), np.linalg.cholesky(V), np.eye(len(V))
    basis = [(np.outer(unit[i], unit[j]) + np.outer(unit[j], unit[i])) / 2 for i in range(m) for j in range(i + 1)]
    centred = L - L.mean(axis=0)
    M = np.linalg.matrix_power(centred.T @ centred, 2) / m**2
    linear = 2 * np.array([[np.sum(S * T) for T in basis] for S in basis])
    mixing = 2 * np.array([[np.sum(S * (M @ T + T @ M)) for T in basis] for S in basis])
    R = np.linalg.inv(L)
    drifts = (references.attention_drift(V), references.relu_drift(V, 1.0, 0.0))
    drift = np.array([[np.sum(S * (R @ B @ R.T)) for S in basis] for B in drifts])
    inverse = np.linalg.inv(a * linear + kappa2 * mixing)
    of_mean = slopes[:2].T @ drift @ inverse @ drift.T @ slopes[:2] / width
    scaled = (inverse @ linear, inverse @ mixing)
    of_variance = np.array([[np.trace(A @ B) for B in scaled] for A in scaled])
    return of_mean + slopes[2:].T @ of_variance @ slopes[2:] / 2


@pytest.mark.one_case
@pytest.mark.parametrize("name", ["transformer", "attention", "feedforward", "mlp"])
def test_information_in_spectral_coordinates_is_that_of_dense_matrices(name):
    layer = LAYERS[name]()
    V, _, found, _ = one_layer(layer, 4)
    information = layer_information(layer, np.asarray(V), 64)
    assert_agrees(found.information, information, rtol=1e-7)


def test_layers_of_the_law_are_not_flagged(key):
    data = si.sample_networks(TRANSFORMER, V0, **SIZES, key=key)
    table = innovation_tests(known(TRANSFORMER, data))
    assert len(table) == 8
    assert_within(table["z"])


@pytest.mark.long
@pytest.mark.parametrize("switch", ["identity", "centred"])
def test_what_breaks_the_law_is_named(switch, key):
    """Networks without an identity or without a mean taken off are so far from the law that few of them show it."""
    data = sample_baseline(Baseline(**{switch: False}), V0, **(SIZES | {"networks": 24}), key=key)
    table = innovation_tests(known(TRANSFORMER, data))
    assert "growth" in table["z"].abs().nlargest(2).index
    assert table.loc["growth", "p"] < 1e-6


def test_shared_weights_leave_a_memory(key):
    """Every direction fails where one matrix acts again and again; one of them is that layers are correlated."""
    data = sample_baseline(Baseline(shared=True), V0, **SIZES, key=key)
    assert innovation_tests(known(TRANSFORMER, data)).loc["memory", "p"] < 1e-6


def test_the_memory_of_one_token_by_hand():
    """Products of successive y, in the second's coordinates, without those of their means.

    The product of two sums has what both have in common: each y that one pair ends with and the next begins with.
    """
    y, row = innovations_of_one(), innovation_tests(*one_token()).loc["memory"]
    before, now = (y / (1 + 2 * GAMMA * y / np.sqrt(WIDTH)))[:, :-1], y[:, 1:]
    common = np.sum(before[:, 1:] * now[:, :-1])
    found = np.sum(before * now) - (before.sum() * now.sum() - common) / now.size
    np.testing.assert_allclose(row["effect"], found / np.sqrt(now.size * y.size), rtol=1e-5)
    np.testing.assert_allclose(row["z"], found / np.sqrt(np.square(before * now).sum()), rtol=1e-5)


def test_the_memory_of_tokens_by_hand(key):
    """Innovations of successive layers as matrices V^(−½) dV V^(−½), without a part for their common mean."""
    data = si.sample_networks(TRANSFORMER, V0, width=64, depth=4, networks=5, key=key)
    path = any_transitions(data)
    u = TRANSFORMER.coordinates.unconstrained(TRANSFORMER.parameters())
    (here,) = innovations(path, law_at(template(TRANSFORMER), u, widths=np.array([64.0]), law="limit"))
    at, V = path.coordinates(here.transitions), data["covariance"].values
    m, y = 3, np.zeros((5, 4, 3, 3))  # as changes of V
    for k, (network, layer) in enumerate(zip(path.network, path.layer, strict=True)):
        Z = np.zeros((m, m))
        for value, i, j in zip(here.y[k], *pairs(m), strict=True):
            Z[i, j] = Z[j, i] = value * (np.sqrt(2) if i == j else 1)
        Q = at.cholesky[k] @ at.rotation[k]
        y[network, layer] = Q @ Z @ Q.T
    both, expected = [], 0.0
    for network in range(5):
        for layer in range(1, 4):
            R = np.linalg.inv(scipy.linalg.sqrtm(V[network, layer]).real)
            before, now = (R @ y[network, each] @ R for each in (layer - 1, layer))
            both.append((before, now))
            expected += np.sum(before * now) / 2
    found = successive(path, here, at)
    kept = np.abs(found[1]).sum(axis=1) > 0
    for place in (0, 1):
        by_hand = np.stack([each[place] for each in both]).reshape(-1, m * m) / np.sqrt(2)
        np.testing.assert_allclose(found[place][kept], by_hand, rtol=1e-8, atol=1e-10)
    np.testing.assert_allclose(np.sum(found[0] * found[1]), expected, rtol=1e-8)


def test_a_growth_of_all_layers_is_no_memory(key):
    """Each layer scales V down by .8 of its increment's sd."""
    data = si.sample_networks(TRANSFORMER, V0, **SIZES, key=key)
    data = data.assign(covariance=data["covariance"] * (1 - 0.8 * np.sqrt(0.5 / SIZES["width"])) ** data["layer"])
    table = innovation_tests(known(TRANSFORMER, data))
    assert table.loc["growth", "p"] < 1e-6
    assert_within(table.loc[["memory"], "z"])


def test_the_noise_of_one_token_by_hand():
    """γ absorbs nearly all of it, and of the sum and of its standard deviation alike."""
    excess = innovations_of_one() ** 2 - 1
    z = innovation_tests(*one_token()).loc["noise of variances", "z"]
    np.testing.assert_allclose(z, excess.sum() / np.sqrt(np.square(excess).sum()), rtol=1e-5)


def test_networks_of_one_token_have_the_directions_that_one_token_can_show(key):
    layer = LAYERS["feedforward"]()
    data = si.sample_networks(layer, jnp.eye(1), **SIZES, key=key)
    table = innovation_tests(known(layer, data))
    assert {"growth", "noise of variances", "memory"} <= set(table.index)
    assert "noise of correlations" not in table.index
