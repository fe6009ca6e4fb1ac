"""How likelihoods are widened: the parameters move as affine maps of their unconstrained values say."""

import jax.numpy as jnp
import numpy as np
import pytest
from helpers.cases import layer_of
from helpers.internals import Adjustment
from numpyro.distributions import biject_to, constraints

from sdeinfer.layers import template

PARAMETERS = {"gamma": 0.3, "tau0": 2.0, "c_plus": 1.0, "c_minus": -3.0}
COORDINATES = template("transformer").coordinates


def adjusted(adjustment: Adjustment, parameters: dict[str, float]) -> dict:
    return adjustment(layer_of(template("transformer"), **parameters)).parameters()


def test_unconstrained_values_are_those_of_numpyro():
    supports = (constraints.unit_interval, constraints.positive, constraints.positive, constraints.real)
    values = (0.3, 2.0, 4.0, -1.0)
    expected = [biject_to(support).inv(value) for support, value in zip(supports, values, strict=True)]
    np.testing.assert_allclose(COORDINATES.unconstrained(PARAMETERS), expected, rtol=1e-12)


def test_an_adjustment_is_affine():
    matrix = np.random.default_rng(1).normal(size=(4, 4)) / 4
    centre = jnp.array([0.1, -0.2, 0.3, 0.4])
    shift = jnp.array([0.05, 0.1, -0.1, 0.2])
    moved = Adjustment(jnp.ones(()), jnp.zeros(()), centre, jnp.asarray(matrix), shift, jnp.zeros(()))
    expected = centre + matrix @ (COORDINATES.unconstrained(PARAMETERS) - centre - shift)
    np.testing.assert_allclose(COORDINATES.unconstrained(adjusted(moved, PARAMETERS)), expected, rtol=1e-10)


def test_below_the_least_tau0_nothing_changes_any_more():
    u = jnp.asarray(COORDINATES.unconstrained(PARAMETERS))
    adjustment = Adjustment(jnp.ones(()), jnp.asarray(0.5), u, jnp.eye(4), jnp.zeros(4), jnp.zeros(()))
    found = [float(adjusted(adjustment, PARAMETERS | {"tau0": tau0})["tau0"]) for tau0 in (1e-3, 0.1, 0.5, 0.75, 2.0)]
    np.testing.assert_allclose(found, [0.5, 0.5, 0.5 * 2 ** (1 / 8), 0.75, 2.0], rtol=6e-3)
    assert found == sorted(found)
    whole = adjusted(adjustment, PARAMETERS)
    assert all(float(whole[name]) == pytest.approx(PARAMETERS[name]) for name in ("gamma", "c_plus"))
