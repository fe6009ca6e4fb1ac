"""The law of a path: the dense normal of its transitions, and what it does and does not depend on."""

import dataclasses
import functools

import numpy as np
import pytest
from helpers.cases import CAUSAL, LAYERS, PATTERNS, masked_layer_of
from helpers.internals import FullPath, densities_at, no_adjustment
from helpers.references import wishart_path
from likelihood.paths import (
    LAWS,
    assert_dense_normals,
    common_path,
    law_of,
    log_prob,
    log_prob_of_law,
    statistics_of,
)

import sdeinfer as si

WIDTHS = [15, 40, 300]


@functools.cache
def paths(tokens: int) -> np.ndarray:
    """Of networks of several widths."""
    return np.stack([wishart_path(tokens, 5, width=n, seed=n) for n in WIDTHS])


@pytest.mark.parametrize("tokens", [1, 2, 4])
@pytest.mark.parametrize("name", [*LAYERS, *CAUSAL, *list(PATTERNS)[1:]])
def test_log_likelihood_is_the_dense_normal(name, tokens):
    layer = LAYERS[name]() if name in LAYERS else masked_layer_of(name, tokens)
    statistics = statistics_of(paths(tokens), width=WIDTHS, pattern=layer.limit().pattern)
    assert_dense_normals(log_prob(layer, statistics), layer, paths(tokens), WIDTHS)
    law = FullPath(layer.limit(), statistics)
    assert law.batch_shape == (3,)
    assert law.event_shape == statistics.weights.shape[1:]


@pytest.mark.one_case("transformer-finite-width")
@pytest.mark.parametrize("law", LAWS)
def test_densities_at_points_by_numpy_are_those_of_each_layer(layer, law):
    statistics, coordinates = statistics_of(paths(3), width=WIDTHS), layer.coordinates
    assumed = dataclasses.replace(statistics, assumptions=dataclasses.replace(statistics.assumptions, law=law))
    here = np.asarray(coordinates.unconstrained(layer.parameters()))
    points = np.stack([here, here + 0.2, here - 0.3])
    layers = map(layer.with_coordinates, points)
    expected = [log_prob_of_law(law_of(each, statistics, law), statistics) for each in layers]
    np.testing.assert_allclose(densities_at(assumed, layer, points), expected, rtol=1e-9)
    adjusted = assumed.with_adjustment(no_adjustment(len(coordinates)))
    far = densities_at(adjusted, layer, points + 41.0)
    assert (far == -np.inf).all()


def test_tiny_covariances_are_those_without_attention():
    layer, relu = si.ShapedTransformer(0.5, 0.8, 1, -1), si.ResidualFeedForward(0.5, 1, -1)
    statistics = statistics_of(common_path(3) * 1e-200)
    limit = layer.limit()
    relu_limit, zero = relu.limit(), 0 * limit.relu_drift
    flat = si.layers.Limit(zero, relu_limit.relu_drift, limit.linear_noise, zero)
    np.testing.assert_allclose(log_prob(layer, statistics), log_prob_of_law(flat, statistics), rtol=1e-12)
