"""Networks with a modification taken away, against layers of the package that lack it too."""

import dataclasses

import jax.random as jr
import numpy as np
import pytest
from budget import assert_same_distribution

import sdeinfer as si
from sdeinfer.networks import Baseline, sample_baseline

WIDTH = 16
SIZES = {"width": WIDTH, "depth": 2, "networks": 4000}


def counterpart(baseline: Baseline) -> si.Stack:
    """The same layer of gains, temperature and slopes."""
    attention = si.ShapedAttention(
        baseline.gamma,
        tau0=baseline.tau0 if baseline.temperature == "shaped" else WIDTH**-0.5,
        gamma1=float(baseline.identity),
        gamma2=float(baseline.centred),
    )
    return si.Stack([attention, si.ResidualFeedForward(baseline.gamma, baseline.c, -baseline.c)])


@pytest.mark.parametrize(
    "switches", [{}, {"identity": False, "temperature": "usual"}, {"centred": False, "tau0": 0.5}], ids=str
)
def test_switches_are_gains_and_a_temperature_of_shaped_attention(switches, key):
    baseline, V0 = Baseline(gamma=0.7, c=1.0, **switches), si.equicorrelated(tokens=3, correlation=0.2)
    own = sample_baseline(baseline, V0, **SIZES, key=jr.fold_in(key, 0))
    other = si.sample_networks(counterpart(baseline), V0, **SIZES, key=jr.fold_in(key, 1))
    assert_same_distribution(own["covariance"].values[:, -1, 0, 1], other["covariance"].values[:, -1, 0, 1])


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
