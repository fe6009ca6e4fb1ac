"""The adjustment of a likelihood of finite width: widened by as much as the scores scatter."""

import dataclasses
import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
import references
import xarray as xr
from budget import assert_estimate, assert_mean, mean_and_error

import sdeinfer as si
from sdeinfer.infer import LawAt, adjusted_statistics, innovations, law_at
from sdeinfer.infer._sandwich import FEWEST, _dispersion, _matrix, _one_layer, _score
from sdeinfer.layers import Architecture
from sdeinfer.likelihood import Assumptions, FullPath, Path, observed_path

TRUTH = {"gamma": 0.9, "tau0": 0.8, "c_plus": 1.0, "c_minus": -3.0}
TRANSFORMER = Architecture("transformer")
FULL_PATH = si.models.full_path
ASSUMPTIONS = Assumptions(TRANSFORMER)
U = jnp.asarray(TRANSFORMER.coordinates.unconstrained(TRUTH))


def sampled(networks: int, width: int = 32, depth: int = 4, seed: int = 0):
    V0 = si.equicorrelated(tokens=3, correlation=0.2, norm=1.0)
    layer = si.ShapedTransformer(**TRUTH)
    return si.sample_networks(layer, V0, width=width, depth=depth, networks=networks, key=jr.key(seed))


@functools.cache
def path() -> Path:
    return observed_path(sampled(40))


@functools.cache
def statistics(times: int = 1):
    """Statistics of the path, each of whose transitions is there several times."""
    each = {name: np.repeat(getattr(path(), name), times) for name in ("network", "layer")}
    return adjusted_statistics(FULL_PATH, dataclasses.replace(path(), **each), ASSUMPTIONS)


def law_of(statistics, u=None) -> LawAt:
    """The law at some parameters, or at the truth."""
    u = U if u is None else u
    return law_at(TRANSFORMER, u, widths=np.array([32.0]))


def exact(u, terms, centre):
    """Log density of normals with all of v, but for the constant."""
    law = TRANSFORMER.layer_at(u).finite_width(32.0)
    common, own = references.finite_width_variances(law, terms.mixing, terms.variance, centre, jnp)
    mean = (law.drift[:, None] * terms.drift).sum(axis=1)
    return -((terms.increments - mean) ** 2 / (common + own) + jnp.log(common + own)).sum(axis=1) / 2


@pytest.mark.parametrize("times", [1, 300])
def test_the_mode_is_that_of_the_exact_law(times):
    """At the shifted mode the naive exact score is that of the statistics at theirs, less that of the priors.

    With 300 times the data the shift is 17 times as many standard deviations long, and is still made.
    """
    found, terms = statistics(times), path().terms(np.arange(len(path())))
    adjustment = found.adjustment
    u, shift = np.asarray(adjustment.centre), np.asarray(adjustment.shift)

    def smooth(u):
        law = TRANSFORMER.layer_at(u).finite_width(32.0)
        of_terms = references.finite_width_terms(
            law, terms.increments, terms.drift, terms.mixing, terms.variance, found, xp=jnp
        )
        return times * of_terms.sum()

    exact_score = times * jax.grad(lambda u: exact(u, terms, found.centre).sum())(jnp.asarray(u + shift))
    of_data = sum(here.information for here in innovations(path(), law_of(found, u + shift)))
    information = times * of_data + np.eye(len(u))
    left = np.asarray(exact_score) - np.asarray(jax.grad(smooth)(jnp.asarray(u))) - shift

    def length(score):
        return float(np.sqrt(score @ np.linalg.solve(information, score)))

    assert length(left) < 0.05
    # It does move: without the shift the score is not zero.
    at_start = times * jax.grad(lambda u: exact(u, terms, found.centre).sum())(jnp.asarray(u))
    moved = length(np.asarray(at_start) - np.asarray(jax.grad(smooth)(jnp.asarray(u))))
    assert moved > 2 * length(left)


def test_scores_and_information_are_the_derivatives_of_the_log_density():
    u, centre = U, statistics().centre
    terms = path().terms(np.arange(len(path())))
    _, scatter, _ = _score(path(), law_of(statistics()), TRUTH["tau0"])
    scores = np.asarray(jax.jit(jax.jacfwd(exact))(u, terms, centre))
    expected = np.cov(scores.T, ddof=0) * len(scores)
    np.testing.assert_allclose(scatter, expected, rtol=1e-8, atol=1e-8 * np.abs(expected).max())


def test_information_is_the_variance_of_the_score_of_normals(key):
    """Terms drawn from the law: their scores have mean zero, and the information for their covariance."""
    u, centre = U, statistics().centre
    at = law_of(statistics())
    terms = path().terms(np.arange(len(path())))
    law = TRANSFORMER.layer(**TRUTH).finite_width(32.0)
    common, own = references.finite_width_variances(law, terms.mixing, terms.variance, centre, jnp)
    mean = (law.drift[:, None] * terms.drift).sum(axis=1)

    @jax.jit
    def score(key):
        z = mean + jnp.sqrt(common + own) * jr.normal(key, mean.shape)
        drawn = eqx.tree_at(lambda terms: terms.increments, terms, z)
        return jax.grad(lambda u: exact(u, drawn, centre).sum())(u)

    scores = np.asarray(jax.lax.map(score, jr.split(key, 2000)))
    information, *_ = _score(path(), at, TRUTH["tau0"])
    root = np.linalg.cholesky(np.linalg.inv(information[:3, :3]))
    white = scores[:, :3] @ root
    assert_mean(white, np.zeros(3))
    assert_mean(white[:, :, None] * white[:, None], np.eye(3))


def test_much_information_gives_the_sandwich_and_none_gives_nothing():
    rng = np.random.default_rng(0)
    A, B = rng.normal(size=(2, 4, 6))
    information, scatter = 1e8 * A @ A.T, 1e8 * B @ B.T
    C = _matrix(information, scatter)
    wanted = information @ np.linalg.inv(scatter) @ information
    np.testing.assert_allclose(C.T @ information @ C, wanted, rtol=1e-5, atol=1e-5 * np.abs(wanted).max())
    np.testing.assert_allclose(_matrix(1e-9 * information / 1e8, 1e-9 * scatter / 1e8), np.eye(4), atol=1e-7)
    half = np.zeros((4, 4))
    half[0, 0] = 1e8
    np.testing.assert_allclose(_matrix(half, 4 * half), np.diag([0.5, 1, 1, 1]), atol=1e-6)
    assert _dispersion(half, 4 * half) == pytest.approx(4, rel=4e-3)
    assert _dispersion(0 * half, 0 * half) == 1


@pytest.mark.slow
def test_wide_networks_need_less_widening():
    dispersions = [
        float(
            adjusted_statistics(FULL_PATH, observed_path(sampled(400, width=width)), ASSUMPTIONS).adjustment.dispersion
        )
        for width in (32, 512)
    ]
    print(f"\ndispersion at n = 32 and 512: {dispersions[0]:.2f}, {dispersions[1]:.2f}")
    assert dispersions[0] > 1.3
    assert 0.9 < dispersions[1] < 1.15


def test_statistics_for_a_law_of_finite_width_are_refused_by_the_limit():
    with pytest.raises(ValueError, match="path: these data were prepared for a law of finite width"):
        FullPath(si.ShapedTransformer(**TRUTH).limit(), statistics())


@pytest.mark.slow
def test_drawn_transitions_start_where_those_of_the_data_do():
    data = xr.concat([sampled(3), sampled(2, width=64)], "network", combine_attrs="override")
    mixed, layer = observed_path(data), si.ShapedTransformer(**TRUTH)
    drawn = _one_layer(mixed, layer, FEWEST)
    assert drawn is not None
    assert len(drawn) == FEWEST
    chosen = np.resize(np.arange(len(mixed)), FEWEST)
    np.testing.assert_array_equal(drawn.starts(slice(None)), mixed.starts(chosen))
    np.testing.assert_array_equal(drawn.width, mixed.width[mixed.network[chosen]])
    # At width n an increment has a variance of order 1/n: relative to it, both widths move alike.
    moved = (np.diff(drawn.covariance, axis=1)[:, 0] * np.sqrt(drawn.width)[:, None, None]) ** 2
    ratio = np.mean(moved[drawn.width == 32]) / np.mean(moved[drawn.width == 64])
    assert 0.5 < ratio < 2
    assert _one_layer(mixed, si.ShapedAttention(0.5, 1.0, heads=8), FEWEST) is None


def test_the_scatter_of_few_transitions_is_that_of_many():
    """Drawn at the mode of few data, it does not depend on where those happened to go."""
    few, many = observed_path(sampled(40, depth=1, seed=3)), observed_path(sampled(40_000, depth=1, seed=4))
    law = law_of(statistics())
    drawn = _one_layer(few, si.ShapedTransformer(**TRUTH), FEWEST)
    squares = []
    for path in (drawn, many):
        scores = np.concatenate([here.score for here in innovations(path, law)])
        squares.append((scores - scores.mean(axis=0)) ** 2)
        np.testing.assert_allclose(np.diag(_score(path, law, TRUTH["tau0"])[1]), squares[-1].sum(axis=0), rtol=1e-8)
    (one, its_error), (other, error) = map(mean_and_error, squares)
    assert_estimate(one, other, np.hypot(its_error, error))
