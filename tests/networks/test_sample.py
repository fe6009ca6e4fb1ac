import functools
import importlib
from typing import Any

import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
import xarray as xr
from helpers.budget import assert_estimate, assert_mean
from helpers.cases import LAYERS, random_covariance
from helpers.internals import power_of, truth_of
from helpers.references import assert_agrees

import sdeinfer as si
from sdeinfer.layers import OverDepth

SIZES: dict[str, Any] = {"width": 12, "depth": 6, "networks": 7}


def covariance(layer, V0, *, key, **sizes) -> np.ndarray:
    return si.sample_networks(layer, V0, **(SIZES | sizes), key=key)["covariance"].values


@functools.cache
def sampled(name: str, method="chain") -> xr.Dataset:
    """Networks of one architecture, sampled once: most of the time here goes into compilation."""
    return si.sample_networks(LAYERS[name](), random_covariance(3), **SIZES, method=method, key=jr.key(5))


@pytest.fixture
def V0():
    return random_covariance(3)


def test_outputs_have_the_covariance_of_the_last_layer(V0, key):
    data = si.covariance_dataset(np.stack([np.eye(3), V0])[None], width=8, layers=np.array([0, 1]))
    count = 20_000
    S = si.sample_outputs(data, outputs=count, key=key)["covariance"].values[0, 1]
    error = np.sqrt((np.outer(np.diag(V0), np.diag(V0)) + np.asarray(V0) ** 2) / count)
    assert_estimate(S, V0, error)


@pytest.mark.parametrize("name", LAYERS)
def test_networks_start_at_exactly_v0_and_differ_and_know_their_truth(name, V0):
    data = sampled(name)
    V = data["covariance"].values
    assert V.shape == (7, 7, 3, 3)
    assert V.dtype == np.float64
    assert_agrees(V[:, 0], np.broadcast_to(V0, (7, 3, 3)), rtol=1e-14)
    np.testing.assert_array_equal(V, np.swapaxes(V, -1, -2))
    assert len(np.unique(V[:, 1:].reshape(-1, 9).round(8), axis=0)) == 7 * 6
    assert truth_of(data.attrs) == {name: float(value) for name, value in LAYERS[name]().parameters().items()}
    assert data.attrs.get("architecture") == (None if name == "stack" else name)
    np.testing.assert_array_equal(data["width"], [SIZES["width"]] * SIZES["networks"])
    np.testing.assert_array_equal(data["layer"], range(SIZES["depth"] + 1))


@pytest.mark.one_case("chain-TOGETHER-1")
@pytest.mark.parametrize(
    ("method", "bound", "of_one"), [("weights", "ENTRIES_AT_ONCE", 12**2), ("chain", "BATCH_NETWORKS", 1)]
)
def test_networks_depend_neither_on_their_batches_nor_on_what_is_observed(method, bound, of_one, V0, monkeypatch):
    expected, module = sampled("mlp", method)["covariance"], importlib.import_module("sdeinfer.networks._sample")
    # Seven networks in batches of three: the last batch is filled up with networks already drawn.
    monkeypatch.setattr(module, bound, 3 * of_one)
    every = 4  # does not divide the depth: layers 0 and 4 are seen, 5 and 6 are not drawn
    sizes: dict[str, Any] = SIZES | {"observe_every": every, "method": method}
    thinned = si.sample_networks(LAYERS["mlp"](), V0, **sizes, key=jr.key(5))
    np.testing.assert_array_equal(thinned["layer"], [0, 4])
    assert_agrees(thinned["covariance"], expected[:, [0, 4]], rtol=1e-12)
    # A network that does not fit is drawn alone.
    monkeypatch.setattr(module, bound, 1)
    assert_agrees(covariance(LAYERS["mlp"](), V0, method=method, key=jr.key(5)), expected, rtol=1e-12)


def test_a_key_gives_one_set_of_networks(V0):
    layer, first = LAYERS["mlp"](), sampled("mlp")["covariance"].values
    np.testing.assert_array_equal(covariance(layer, V0, key=jr.key(5)), first)
    assert not np.allclose(covariance(layer, V0, key=jr.key(6))[:, 1:], first[:, 1:])


class PreLN(si.layers.AbstractLayer):
    """A layer without a limit, of which only the weights are known."""

    strength: Any = si.Parameter("strength", "s", "residual strength", "log").field()

    def forward(self, X, *, key):
        Z = (X - X.mean(axis=1, keepdims=True)) / X.std(axis=1, keepdims=True)
        return X + self.strength * Z @ jr.normal(key, (X.shape[1], X.shape[1]), X.dtype) / jnp.sqrt(X.shape[1])


def over_depth(stack: si.Stack) -> si.layers.AbstractLayer:
    return OverDepth(stack, **{"preln.strength": lambda t: 0.5 - 0 * t})


def test_a_layer_without_a_limit_is_sampled_and_refused_where_one_is_needed(V0, key):
    """Each token's norm grows by s² in the mean, whatever it is."""
    data = si.sample_networks(PreLN(0.5), V0, width=16, depth=3, networks=400, key=key)
    norms = np.diagonal(data["covariance"].values, axis1=2, axis2=3)
    assert_mean(np.diff(norms, axis=1).reshape(400, -1), 0.25)
    assert truth_of(data.attrs) == {"strength": 0.5}
    with pytest.raises(si.InputError, match="layer: PreLN has no limit; its networks can be sampled"):
        si.simulate(PreLN(0.5), V0, [0.0, 0.1], paths=4, key=key)
    with pytest.raises(si.InputError, match="layer: PreLN has no limit"):
        si.fit(si.models.full_path, data, architecture=PreLN(0.5), key=key)


@pytest.mark.one_case("over_depth")
@pytest.mark.parametrize("wrap", [lambda stack: stack, lambda stack: si.Stack((stack,)), over_depth])
def test_a_stack_with_a_part_of_which_only_the_weights_are_known_is_sampled_with_weights(wrap, V0, key):
    layer = wrap(si.Stack((LAYERS["mlp"](), PreLN(0.5))))
    sizes: dict[str, Any] = {"width": 12, "depth": 2, "networks": 2, "key": key}
    expected = si.sample_networks(layer, V0, **sizes, method="weights")
    np.testing.assert_array_equal(si.sample_networks(layer, V0, **sizes)["covariance"], expected["covariance"])


@pytest.mark.parametrize("count", [1, 2, 4])
def test_the_skewness_of_a_stack_is_that_of_a_product(count):
    """V′ of attention has two factors I + Y with normal Y; of p factors the skewness is 3 − 3/p, as of their power."""
    skewness = si.Stack((LAYERS["attention"](),) * count).skewness
    assert skewness == pytest.approx(3 - 3 / (2 * count))
    assert power_of(skewness) == 2 * count
