"""The law of a path: the dense normal of its transitions, and what it does and does not depend on."""

import dataclasses

import numpy as np
import pytest
from helpers.cases import LAYERS
from helpers.internals import FullPath, densities_at, no_adjustment
from helpers.references import wishart_path
from likelihood.paths import (
    LAWS,
    WIDTH,
    assert_dense_normals,
    common_path,
    law_of,
    log_prob,
    log_prob_of_law,
    statistics_of,
)

import sdeinfer as si


def test_log_likelihood_is_the_dense_normal(layer, V):
    paths = common_path(len(V))
    assert_dense_normals(log_prob(layer, statistics_of(paths)), layer, paths, WIDTH)


def test_networks_of_several_widths_each_have_their_own_law(layer):
    widths = [15, 40, 300]
    paths = np.stack([wishart_path(3, 5, width=n, seed=n) for n in widths])
    statistics = statistics_of(paths, width=widths)
    assert_dense_normals(log_prob(layer, statistics), layer, paths, widths)
    law = FullPath(law_of(layer, statistics, "finite-width"), statistics)
    assert law.batch_shape == (3,)
    assert law.event_shape == statistics.weights.shape[1:]


@pytest.mark.parametrize("law", LAWS)
def test_densities_at_points_by_numpy_are_those_of_each_layer(layer, law):
    widths, coordinates = [15, 40, 300], layer.coordinates
    statistics = statistics_of(np.stack([wishart_path(3, 5, width=n, seed=n) for n in widths]), width=widths)
    assumed = dataclasses.replace(statistics, assumptions=dataclasses.replace(statistics.assumptions, law=law))
    here = np.asarray(coordinates.unconstrained(layer.parameters()))
    points = np.stack([here, here + 0.2, here - 0.3])
    expected = [log_prob(layer.with_coordinates(u), statistics, law) for u in points]
    np.testing.assert_allclose(densities_at(assumed, layer, points), expected, rtol=1e-9)
    adjusted = assumed.with_adjustment(no_adjustment(len(coordinates)))
    far = densities_at(adjusted, layer, points + 41.0)
    assert (far == -np.inf).all()


@pytest.mark.parametrize("law", LAWS)
def test_likelihood_does_not_depend_on_the_order_of_the_tokens(law):
    layer, paths, order = LAYERS["transformer"](), common_path(5), np.array([4, 2, 0, 1, 3])
    permuted = paths[:, :, order][:, :, :, order]
    one, other = (log_prob(layer, statistics_of(V), law) for V in (permuted, paths))
    np.testing.assert_allclose(one, other, rtol=1e-10)


def test_the_limit_knows_the_square_of_the_slopes_gap_and_finite_width_their_mean_but_no_order():
    statistics = statistics_of(common_path(3))

    def values(law, *slopes):
        return [log_prob(si.ShapedTransformer(0.5, 0.8, *each), statistics, law) for each in slopes]

    first, *others = values("limit", (1, -1), (-1, 1), (5, 3), (0, -2))
    np.testing.assert_array_equal(others, [first] * 3)
    one, exchanged, shifted = values("finite-width", (1, -1), (-1, 1), (2, 0))
    np.testing.assert_array_equal(one, exchanged)
    assert (np.abs(shifted - one) > 1e-6 * np.abs(one)).all()


def test_wide_networks_have_the_likelihood_of_the_limit():
    layer = LAYERS["transformer"]()
    gaps = []
    for n in (10**6, 10**8):
        # Steps of one size relative to the width's own.
        V = common_path(3)[:, 0]
        paths = np.stack([V, V * (1 + 1 / np.sqrt(n))], axis=1)
        statistics = statistics_of(paths, width=n)
        gaps.append(np.abs(log_prob(layer, statistics, "finite-width") - log_prob(layer, statistics)).max())
    # The He constant differs from 1 by 1/√n.
    assert gaps[0] < 1e-2
    assert gaps[1] < gaps[0] / 8


def test_tiny_covariances_are_those_without_attention():
    layer, relu = si.ShapedTransformer(0.5, 0.8, 1, -1), si.ResidualFeedForward(0.5, 1, -1)
    statistics = statistics_of(common_path(3) * 1e-200)
    limit = layer.limit()
    relu_limit, zero = relu.limit(), 0 * limit.relu_drift
    flat = si.layers.Limit(zero, relu_limit.relu_drift, limit.linear_noise, zero)
    np.testing.assert_allclose(log_prob(layer, statistics), log_prob_of_law(flat, statistics), rtol=1e-12)
