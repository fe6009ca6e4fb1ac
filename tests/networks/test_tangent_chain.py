"""The chain of tokens and their tangents has the law of gradients in networks with weights."""

import functools

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from helpers.budget import assert_same_distribution
from helpers.internals import NetworkKeys, sample_tangents
from scipy.linalg import block_diag

import sdeinfer as si
from sdeinfer.networks import covariance_chain

SLOPES = {"c_plus": 2.0, "c_minus": -3.0}
CHAINS = {
    "transformer": si.ShapedTransformer(0.6, 0.7, **SLOPES),
    "attention, H = 2": si.ShapedAttention(0.6, 0.7, heads=2),
    "attention, H = 2, W_O": si.ShapedAttention(0.6, 0.7, heads=2, output_projection=True),
    "causal attention": si.ShapedAttention(0.6, 0.7, pattern=si.CAUSAL),
    "feedforward, r = 2": si.ResidualFeedForward(0.6, **SLOPES, expansion=2),
    "mlp": si.ShapedMLP(1.0, -2.0),
}
STATISTICS = {
    "log norm of a token": lambda S: np.log(S[:, 0, 0]),
    "correlation of tokens": lambda S: S[:, 0, 1] / np.sqrt(S[:, 0, 0] * S[:, 1, 1]),
    "log norm of a tangent": lambda S: np.log(S[:, 3, 3]),
    "log norm of all tangents": lambda S: np.log(S[:, 2, 2] + S[:, 3, 3]),
    "correlation of tangents": lambda S: S[:, 2, 3] / np.sqrt(S[:, 2, 2] * S[:, 3, 3]),
    "correlation of a token and its tangent": lambda S: S[:, 0, 2] / np.sqrt(S[:, 0, 0] * S[:, 2, 2]),
    "log determinant": lambda S: np.linalg.slogdet(S)[1],
}
V0, D0 = si.equicorrelated(tokens=2, correlation=0.3, norm=1.2), np.eye(2) / 2


@pytest.mark.one_case
@pytest.mark.parametrize("name", CHAINS)
def test_the_chain_of_tangents_has_the_law_of_the_weights(name, key):
    layer, networks, sizes = CHAINS[name], 2000, {"width": 16, "observe_every": 6}
    expected = sample_tangents(layer, V0, directions=D0, depth=6, networks=networks, **sizes, key=key)[:, -1]
    chain = jax.jit(functools.partial(covariance_chain, layers=6, tangents=True, **sizes))
    keys = NetworkKeys.numbered(jr.fold_in(key, 1), jnp.arange(networks, dtype=jnp.uint32))
    found = np.asarray(chain(layer, block_diag(V0, D0), keys=keys))[:, -1]
    for statistic in STATISTICS.values():
        assert_same_distribution(statistic(found), statistic(expected))
