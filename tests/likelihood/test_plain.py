"""The plain likelihood: each transition's normal, its derivatives in the covariances, and networks sampled from it."""

import dataclasses

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from budget import assert_mean, assert_same_posterior
from conftest import LAYERS, PATTERNS, masked_layer_of
from likelihood.paths import (
    LAWS,
    assert_dense_normals,
    dense_log_likelihood,
    log_prob,
    statistics_of,
)
from numpyro.infer import Predictive
from references import wishart_path

import sdeinfer as si
from sdeinfer.covariance import EVERY_TOKEN
from sdeinfer.infer._densities import log_densities
from sdeinfer.likelihood import (
    USED,
    Assumptions,
    CovariancePath,
    Transitions,
    observed_path,
    path_statistics,
    transitions_of,
    with_pattern,
)
from sdeinfer.observation import covariance_dataset

WIDTHS = [30, 50, 30]


def paths(tokens: int = 3, layers: int = 3) -> np.ndarray:
    return np.stack([wishart_path(tokens, layers, width=n, seed=seed) for seed, n in enumerate(WIDTHS)])


def data_of(paths, *, pattern: si.Pattern = EVERY_TOKEN):
    return with_pattern(covariance_dataset(np.asarray(paths), width=WIDTHS), pattern)


@jax.jit
def density(layer, path: Transitions, V=None):
    return CovariancePath(layer, path).log_prob(path.observed if V is None else V)


@jax.jit
def slope_of(layer, path: Transitions, V):
    """The gradient of the sum over networks in V: one program for all tests of one law and shape."""
    return jax.grad(lambda V: density(layer, path, V).sum())(V)


def a_few_networks():
    return si.sample_networks(si.ShapedMLP(1.0, -1.0), np.eye(2) + 0.2, width=40, depth=3, networks=4, key=jr.key(0))


TRANSFORMER = si.ShapedTransformer(gamma=0.5, tau0=0.6, c_plus=0.3, c_minus=-1.5)


def test_the_limit_is_the_dense_normal(layer):
    found = density(layer, transitions_of(data_of(paths()), Assumptions(law="limit")))
    assert_dense_normals(found, layer, paths(), WIDTHS)


def test_a_layer_of_finite_width_is_the_dense_normal(layer):
    found = density(layer, transitions_of(data_of(paths())))
    for value, path, width in zip(found, paths(), WIDTHS, strict=True):
        np.testing.assert_allclose(value, dense_log_likelihood(layer, path, width), rtol=1e-8)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "causal" else pytest.mark.long) for name in PATTERNS]
)
def test_a_layer_of_finite_width_with_a_pattern_is_the_dense_normal(name):
    pattern = PATTERNS[name](3)
    layer = si.ShapedTransformer(gamma=0.6, tau0=0.7, c_plus=0.4, c_minus=-1.1, pattern=pattern)
    path = transitions_of(data_of(paths(), pattern=pattern))
    for value, own, width in zip(density(layer, path), paths(), WIDTHS, strict=True):
        np.testing.assert_allclose(value, dense_log_likelihood(layer, own, width), rtol=1e-8)


@pytest.mark.parametrize(
    "layer",
    [pytest.param(name, marks=() if name == "attention" else pytest.mark.long) for name in LAYERS],
    indirect=True,
)
def test_one_layer_for_each_network_is_the_density_of_each(layer):
    layers = jax.tree.map(lambda x: x * jnp.array([1.0, 0.9, 0.8]), layer)
    path = transitions_of(data_of(paths()))
    found = CovariancePath(layers, path).log_prob(path.observed)
    each = [density(jax.tree.map(lambda x, i=i: x[i], layers), path)[i] for i in range(3)]
    np.testing.assert_allclose(found, each, rtol=1e-10)


@pytest.mark.parametrize("pattern", [si.Pattern(), si.CAUSAL], ids=str)
def test_sufficient_statistics_are_a_compression_of_it(pattern):
    layer = si.ShapedAttention(gamma=0.7, tau0=0.8, pattern=pattern)
    found = density(layer, transitions_of(data_of(paths(), pattern=pattern), Assumptions(law="limit")))
    compressed = log_prob(layer, statistics_of(paths(), width=WIDTHS, pattern=pattern))
    np.testing.assert_allclose(found, compressed, rtol=1e-9)


@pytest.mark.parametrize(
    ("law", "name"),
    [
        pytest.param("limit", "transformer", marks=pytest.mark.long),
        ("finite-width", "transformer"),
        *(pytest.param("finite-width", name, marks=pytest.mark.long) for name in PATTERNS),
    ],
)
def test_derivatives_in_the_covariances_are_those_of_differences(law, name):
    layer = masked_layer_of(name, 3) if name in PATTERNS else TRANSFORMER
    path = transitions_of(data_of(paths(), pattern=layer.limit().pattern), Assumptions(law=law))
    V = np.asarray(path.observed)
    slope = np.asarray(slope_of(layer, path, V))
    along = np.random.default_rng(0).normal(size=(4, *V.shape))
    along += along.swapaxes(-1, -2)
    for direction in along:
        step = 1e-6 * direction
        difference = float((density(layer, path, V + step) - density(layer, path, V - step)).sum()) / 2e-6
        # Rounding of the difference, eps |log p|/step, and its own error.
        np.testing.assert_allclose((slope * direction).sum(), difference, rtol=1e-6, atol=1e-5)


def test_equal_correlations_have_no_derivative():
    V0 = np.asarray(si.equicorrelated(tokens=3, correlation=0.2))
    V = np.stack([np.stack([V0, *path[1:]]) for path in paths()])
    path = transitions_of(data_of(V))
    slope = slope_of(TRANSFORMER, path, path.observed)
    assert np.isnan(slope[:, 0]).any()
    assert np.isfinite(slope[:, 1:]).all()


def test_transitions_that_are_not_used_have_no_part():
    V, used = paths(), np.ones((3, 4), bool)
    used[0, 1], used[2, 2] = False, False
    V[0, 1], V[2, 2] = 1.0, 1.0  # singular
    path = transitions_of(data_of(V).assign({USED: (("network", "layer"), used)}))
    slope = slope_of(TRANSFORMER, path, path.observed)
    assert np.isfinite(density(TRANSFORMER, path)).all()
    assert np.isfinite(slope).all()


@pytest.mark.parametrize("law", [pytest.param("limit", marks=pytest.mark.long), "finite-width"])
def test_the_packages_models_run_on_them(law):
    data = a_few_networks()
    path = si.transitions(data, law=law)
    drawn = Predictive(si.models.full_path, num_samples=2)(jr.key(1), path.unobserved())["covariance"]
    assert drawn.shape == (2, *path.observed.shape) == (2, 4, 4, 2, 2)
    assert np.isfinite(density(si.ShapedMLP(1.0, -1.0), path, drawn[0])).all()


def test_a_layer_without_a_chain_is_sampled_by_steps_of_the_solver():
    class Linear(si.layers.AbstractLayer):
        def forward(self, X, *, key):
            return X @ jr.normal(key, (X.shape[1],) * 2, X.dtype) / jnp.sqrt(X.shape[1])

        def limit(self):
            return si.layers.Limit(jnp.zeros(()), jnp.zeros(()), jnp.ones(()), jnp.zeros(()))

    path = transitions_of(data_of(paths(layers=2)), Assumptions(law="limit"))
    drawn = np.asarray(CovariancePath(Linear(), path).sample(jr.key(0), (4000,)))
    assert drawn.shape == (4000, *path.observed.shape)
    np.testing.assert_allclose(drawn[:, :, 0], np.broadcast_to(paths()[:, 0], (4000, 3, 3, 3)), rtol=1e-10)
    assert_mean(drawn[:, :, 1:], paths()[:, :1])


def test_a_finite_network_is_not_sampled_without_a_chain():
    class Unsampled(si.ShapedMLP):
        forward_covariance = si.layers.AbstractLayer.forward_covariance

    with pytest.raises(si.InputError, match="Unsampled needs forward_covariance to sample finite networks"):
        CovariancePath(Unsampled(1.0, -1.0), transitions_of(data_of(paths()))).sample(jr.key(0))


def test_draws_of_a_fit_have_the_density_of_compressed_data():
    data, model, assumptions = a_few_networks(), si.models.full_path, Assumptions(si.Architecture("mlp"), "limit")
    drawn = si.NUTS(chains=1, draws=40, warmup=20).sample(model, transitions_of(data, assumptions), key=jr.key(1))
    sites = {name: drawn.samples[name] for name in ("c_gap", "c_mean")}
    statistics = path_statistics(observed_path(data), assumptions=assumptions)
    expected = log_densities(model, statistics, sites)[0]["covariance"]
    np.testing.assert_allclose(drawn.log_likelihood["covariance"], expected, rtol=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("law", LAWS)
def test_a_fit_has_the_posterior_of_the_compressed_one(law):
    """Of the sampler's own posteriors; `test_draws_of_a_fit_have_the_density_of_compressed_data` compares densities."""
    layer = si.ResidualFeedForward(gamma=0.6, c_plus=1.0, c_minus=-1.0)
    V0 = si.equicorrelated(tokens=2, correlation=0.2)
    data = si.sample_networks(layer, V0, width=48, depth=8, networks=8, key=jr.key(0))
    prepared = si.prepare(si.models.full_path, data, law=law)
    plain = transitions_of(data, prepared.assumptions)
    if prepared.adjustment is not None:  # the plain likelihood has its mode where the adjustment moves the other's
        own = prepared.adjustment
        exact = dataclasses.replace(own, centre=own.centre + own.shift, shift=jnp.zeros_like(own.shift))
        plain = plain.with_adjustment(exact)
    drawn = [si.NUTS().sample(si.models.full_path, path, key=jr.key(1)).samples for path in (plain, prepared)]
    for name in ("gamma", "c_gap"):
        assert_same_posterior(drawn[0][name], drawn[1][name])
