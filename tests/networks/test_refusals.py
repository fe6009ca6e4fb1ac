"""Networks that cannot be sampled: one line that says why."""

from typing import Any

import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from helpers.cases import LAYERS, random_covariance

import sdeinfer as si
from sdeinfer.networks import sample_gradients, sample_tangents, tokens_with_covariance

SIZES: dict[str, Any] = {"width": 8, "depth": 4, "networks": 2, "key": jr.key(0)}
V0, MLP = random_covariance(3), LAYERS["mlp"]()
HEADS = si.ShapedTransformer(0.7, 0.4, 1.0, -1.5, heads=4)


def networks(layer=MLP, V=V0, **sizes):
    return si.sample_networks(layer, V, **(SIZES | sizes))


def tangents(**sizes):
    return sample_tangents(MLP, V0, **({"directions": V0} | SIZES | sizes))


def gradients(layer=MLP, V=V0, **sizes):
    return sample_gradients(layer, V, **({"layers": [0]} | SIZES | sizes))


CALLS = [
    (lambda: networks(width=5), "width: 3 tokens need a width of at least 6, got 5; method='weights' allows less"),
    (lambda: networks(width=2, method="weights"), "width: 3 tokens need a width of at least 3, got 2"),
    (lambda: networks(HEADS, width=20), "width: 3 tokens in 4 heads need a width of at least 24, got 20"),
    (lambda: networks(HEADS, width=30), "heads: the width 30 is not a multiple of 4"),
    (
        lambda: networks(si.ResidualFeedForward(0.5, 0.0, 0.0, expansion=0.3), width=12),
        "expansion: times the width 12 must be a whole",
    ),
    (lambda: networks(method="exact"), "method: must be 'chain' or 'weights', got 'exact'"),
    (lambda: networks(observe_every=0), "observe_every: a whole number of at least 1 is needed, got 0"),
    (lambda: networks(observe_every=5), "observe_every: must not exceed the depth 4, got 5"),
    (lambda: networks(method="weights", first_network=2), "first_network: an ensemble is drawn in parts by the chain"),
    (lambda: networks(V=jnp.array([[1.0, 2.0], [2.0, 1.0]])), "V0: not positive semi-definite: smallest eigenvalue -1"),
    (lambda: tokens_with_covariance(random_covariance(4), width=3, key=jr.key(0)), "width: 4 tokens need a width of"),
    (lambda: tangents(width=5), "width: 3 tokens and their tangents need a width of at least 6, got 5"),
    (lambda: tangents(directions=np.eye(2)), r"directions: shape \(3, 3\), that of V0, is needed, got \(2, 2\)"),
    (lambda: tangents(directions=-np.eye(3)), "directions: not positive semi-definite"),
    (lambda: gradients(cotangents=0), "cotangents: a whole number of at least 1 is needed, got 0"),
    (lambda: gradients(layers=[]), "layers: a list of whole numbers is needed"),
    (lambda: gradients(layers=[0, 5]), r"layers: ascending numbers from 0 to the depth 4 are needed, got \[0, 5\]"),
    (
        lambda: gradients(si.ShapedMLP(1e15, -1e15), np.float32(1e38) * np.eye(2, dtype=np.float32)),
        "covariance: 2 of 2 networks overflow, the first of them network 0",
    ),
]


@pytest.mark.parametrize(("call", "message"), CALLS, ids=[message[:50] for _, message in CALLS])
@pytest.mark.usefixtures("unchecked")
def test_networks_that_cannot_be_are_refused(call, message):
    with pytest.raises(si.InputError, match=f"^{message}"):
        call()
