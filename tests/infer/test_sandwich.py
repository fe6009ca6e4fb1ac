"""The adjustment of a likelihood of finite width: widened by as much as the scores scatter."""

import functools
import math

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from helpers import references
from helpers.internals import (
    ATTENTION_NEXT,
    Assumptions,
    FullPath,
    LawAt,
    Networks,
    Path,
    _dispersion,
    _matrix,
    _scatter,
    curvature_of_priors,
    found_from,
    observed_path,
    path_layout,
    posterior_mode,
    problem_of,
    sandwich,
)
from helpers.ranges import selected

import sdeinfer as si
from sdeinfer.infer import innovations, law_at
from sdeinfer.layers import template
from sdeinfer.networks import sample_layer

TRUTH = {"gamma": 0.9, "tau0": 0.8, "c_plus": 1.0, "c_minus": -3.0}
TRANSFORMER = template("transformer")
FULL_PATH = si.models.full_path
U = jnp.asarray(TRANSFORMER.coordinates.unconstrained(TRUTH))


def sampled(networks: int, width: int = 32, depth: int = 4, seed: int = 0):
    V0 = si.equicorrelated(tokens=3, correlation=0.2, norm=1.0)
    layer = si.ShapedTransformer(**TRUTH)
    return si.sample_networks(layer, V0, width=width, depth=depth, networks=networks, key=jr.key(seed))


NETWORKS = Networks(FULL_PATH, Assumptions(TRANSFORMER), TRANSFORMER)


@functools.cache
def path() -> Path:
    return observed_path(sampled(40))


def law_of(u=U) -> LawAt:
    return law_at(TRANSFORMER, u, widths=np.array([32.0]))


def exact_moments(law, terms):
    """Mean and variance of each increment with its own features."""
    of_variance, of_mixing = ((w[:, None] * terms.variance).sum(axis=1) for w in (law.variance, law.variance_mixing))
    variance = law.limit.linear_noise + of_variance + (law.limit.attention_noise + of_mixing) * terms.mixing
    return (law.drift[:, None] * terms.drift).sum(axis=1), variance


def exact(u, terms):
    """Log density of normals with all of v, but for the constant."""
    mean, variance = exact_moments(TRANSFORMER.with_coordinates(u).finite_width(32.0), terms)
    return -((terms.increments - mean) ** 2 / variance + jnp.log(variance)).sum(axis=1) / 2


@pytest.mark.one_case
@pytest.mark.parametrize("networks", [40, 1200])
def test_the_mode_is_that_of_the_uncompressed_law(networks):
    """At the shifted mode the naive exact score is that of the statistics at theirs, less that of the priors.

    What is left after the last step, which is shorter than a quarter, was at most 0.08 standard deviations for four
    keys, and 0.004 with thirty times the data.
    """
    path = selected(problem_of(FULL_PATH, Assumptions(TRANSFORMER)), sampled(networks)).path
    statistics = NETWORKS.statistics(path, path_layout(path), pooled=False)
    found, terms = NETWORKS.adjusted(statistics, path), path.terms(np.arange(len(path)))
    u, shift = np.asarray(found.adjustment.centre), np.asarray(found.adjustment.shift)

    def smooth_density(u):
        law = TRANSFORMER.with_coordinates(u).finite_width(np.float64(32.0))
        of_terms = terms.increments, terms.drift, terms.mixing, terms.variance
        return references.finite_width_terms(law, *of_terms, found).sum()

    def exact_score(u):
        return sum(here.score.sum(axis=0) for here in innovations(path, law_of(u)))

    smooth = np.array([smooth_density(u + along) - smooth_density(u - along) for along in 1e-5 * np.eye(4)]) / 2e-5
    of_data = sum(here.information for here in innovations(path, law_of(u + shift)))
    mode = posterior_mode(FULL_PATH, found.pooled())
    priors = curvature_of_priors(FULL_PATH, found.pooled(), mode)  # of the sites, which are the coordinates
    left = exact_score(u + shift) - smooth - priors @ shift

    def length(score):
        return float(np.sqrt(score @ np.linalg.solve(of_data + priors, score)))

    assert length(left) < (0.1 if networks == 40 else 0.02)
    # It does move: without the shift the score is not zero.
    assert length(exact_score(u) - smooth) > 2 * length(left)


def test_scores_are_the_derivatives_of_the_log_density():
    terms = path().terms(np.arange(len(path())))
    found = np.concatenate([here.score for here in innovations(path(), law_of())])
    expected = np.asarray(jax.jit(jax.jacfwd(exact))(U, terms))
    np.testing.assert_allclose(found, expected, rtol=1e-8, atol=1e-8 * np.abs(expected).max())


def test_much_information_gives_the_sandwich_and_none_gives_nothing():
    rng = np.random.default_rng(0)
    A, B = rng.normal(size=(2, 4, 6))
    information, scatter = 1e8 * A @ A.T, 1e8 * B @ B.T
    C = _matrix(information, scatter, np.eye(4))
    wanted = information @ np.linalg.inv(scatter) @ information
    np.testing.assert_allclose(C.T @ information @ C, wanted, rtol=1e-5, atol=1e-5 * np.abs(wanted).max())
    np.testing.assert_allclose(_matrix(1e-17 * information, 1e-17 * scatter, np.eye(4)), np.eye(4), atol=1e-7)
    half = np.zeros((4, 4))
    half[0, 0] = 1e8
    np.testing.assert_allclose(_matrix(half, 4 * half, np.eye(4)), np.diag([0.5, 1, 1, 1]), atol=1e-6)
    assert _dispersion(half, 4 * half, np.eye(4)) == pytest.approx(4, rel=4e-3)
    assert _dispersion(0 * half, 0 * half, np.eye(4)) == 1


def test_statistics_for_a_law_of_finite_width_are_refused_by_the_limit():
    statistics = NETWORKS.statistics(path(), path_layout(path()), pooled=True)
    with pytest.raises(ValueError, match="path: these data were prepared for a law of finite width"):
        FullPath(si.ShapedTransformer(**TRUTH).limit(), statistics)


def test_the_scatter_is_the_mean_of_products_of_the_scores_of_its_draws():
    """Draws from one start, whose scores are naive derivatives of the density."""
    one, layer, draws = observed_path(sampled(1, depth=1)), si.ShapedTransformer(**TRUTH), 512
    starts, number = np.repeat(one.starts(slice(None)), draws, axis=0), np.arange(draws)
    ends = sample_layer(layer, starts, width=np.full(draws, 32.0), key=jr.key(0))
    steps = Path(np.stack([starts, ends], axis=1), np.full(draws, 32.0), number, 0 * number, gap=np.ones(1, int))
    scores = np.asarray(jax.jit(jax.jacfwd(exact))(U, steps.terms(number)))
    found = _scatter(one, law_of(), layer, np.eye(4), draws).parts.mean(axis=0)
    expected = scores.T @ scores / draws
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6 * np.abs(expected).max())


def test_information_and_omitted_order_are_derivatives_of_the_mean_density():
    """The mean score moves with u by the information, and by more of the last retained terms of attention, by s²."""
    terms, V = path().terms(np.arange(len(path()))), path().starts(slice(None))
    centred = V - V.mean(axis=1, keepdims=True)
    centred = centred - centred.mean(axis=2, keepdims=True)
    norms = np.diagonal(V, axis1=1, axis2=2).max(axis=1)
    squares = norms * np.trace(centred, axis1=1, axis2=2) / (len(V[0]) - 1) / (32 * TRUTH["tau0"] ** 2)
    assert squares.max() < 1

    def mean_density(u, size):
        law, more = TRANSFORMER.with_coordinates(U).finite_width(32.0), size * squares[:, None]
        mean, variance = exact_moments(law, terms)
        mean += more * law.attention_drift_next * terms.drift[:, 3]
        variance += more * law.variance[ATTENTION_NEXT] * terms.variance[:, ATTENTION_NEXT]
        own_mean, own_variance = exact_moments(TRANSFORMER.with_coordinates(u).finite_width(32.0), terms)
        return -(((mean - own_mean) ** 2 + variance) / own_variance + jnp.log(own_variance)).sum() / 2

    found = _scatter(path(), law_of(), si.ShapedTransformer(**TRUTH), np.eye(4), 16)
    change, bias = map(np.asarray, jax.jit(jax.jacfwd(jax.grad(mean_density), (0, 1)))(U, 0.0))
    np.testing.assert_allclose(found.information, -change, rtol=1e-8, atol=1e-8 * np.abs(change).max())
    np.testing.assert_allclose(found.bias, bias, rtol=1e-8, atol=1e-8 * np.abs(bias).max())


def test_the_adjustment_does_not_depend_on_the_order():
    """Of networks, and of tokens with different norms: with equal ones the spectral coordinates are not unique."""
    norms = np.sqrt([0.7, 1.0, 1.5])
    V0 = si.equicorrelated(tokens=3, correlation=0.2, norm=1.0) * np.outer(norms, norms)
    data = si.sample_networks(si.ShapedTransformer(**TRUTH), V0, width=32, depth=4, networks=12, key=jr.key(7))
    networks, tokens = np.random.default_rng(1).permutation(12), [2, 0, 1]
    one, two = (
        sandwich(
            observed_path(each),
            TRANSFORMER,
            np.asarray(U),
            priors=np.eye(4),
            free=np.ones(4, bool),
            data_per_sample=1.0,
        )
        for each in (data, data.isel(network=networks, token_a=tokens, token_b=tokens))
    )
    assert float(one.error) < 0.05
    np.testing.assert_allclose(two.dispersion, one.dispersion, rtol=1e-8)
    np.testing.assert_allclose(two.matrix, one.matrix, rtol=1e-7, atol=1e-8)


def test_the_curvature_at_a_mode_is_the_second_derivative_of_the_potential():
    rng = np.random.default_rng(0)
    factor, centre = rng.normal(size=(3, 3)), rng.normal(size=3)
    hessian = factor @ factor.T + np.eye(3)

    def quadratic(x):
        return float((x - centre) @ hessian @ (x - centre) / 2), hessian @ (x - centre)

    mode = found_from(quadratic, {"a": (), "b": (), "c": ()}, None)
    assert quadratic(mode.x)[0] < 1e-10
    np.testing.assert_allclose(mode.curvature, hessian, rtol=1e-8)
    np.testing.assert_allclose(mode.covariance, np.linalg.inv(hessian), rtol=1e-7)


@pytest.mark.parametrize("size", [1.0, 1e3, 1e6])
def test_the_mode_is_found_where_the_potential_has_no_slope_far_from_it(size):
    """Of much data a first step along the gradient ends at a bound."""
    centre = np.array([0.7, -1.2])

    def potential(x):
        value, slope = size * np.log(np.cosh(x - centre)).sum(), size * np.tanh(x - centre)
        return (float(value), slope) if abs(x).max() < 4 else (math.nan, np.full(2, math.nan))

    mode = found_from(potential, {"a": (), "b": ()}, None)
    np.testing.assert_allclose(mode.x, centre, atol=1e-4 / math.sqrt(size))
