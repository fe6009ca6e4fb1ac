"""The plain likelihood: each transition's normal, its derivatives in the covariances, and networks sampled from it."""

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from helpers.cases import LAYERS, PATTERNS, masked_layer_of
from helpers.internals import (
    EVERY_TOKEN,
    USED,
    FullPath,
    Transitions,
    log_likelihoods,
    observed_path,
    of_limits,
    path_statistics,
    potential_and_slope,
    transitions_of,
)
from helpers.references import wishart_path
from likelihood.paths import LAWS, assert_dense_normals, dense_log_likelihood, law_of, log_prob

import sdeinfer as si
from sdeinfer.likelihood import CovariancePath, with_pattern
from sdeinfer.observation import covariance_dataset

WIDTHS = [30, 50, 30]


def paths(tokens: int = 3, layers: int = 3) -> np.ndarray:
    return np.stack([wishart_path(tokens, layers, width=n, seed=seed) for seed, n in enumerate(WIDTHS)])


def data_of(paths, *, pattern: si.Pattern = EVERY_TOKEN):
    return with_pattern(covariance_dataset(np.asarray(paths), width=WIDTHS), pattern)


@jax.jit
def _density(law, path: Transitions):
    return path.log_density(law, path.observed)


@jax.jit
def _density_and_slope(law, path: Transitions, V):
    def total(V):
        density = path.log_density(law, V)
        return density.sum(), density

    slope, density = jax.grad(total, has_aux=True)(V)
    return density, slope


def law_of_widths(layer, path: Transitions, law: str):
    """Of one structure: one program for all layers and laws of a pattern."""
    own = law_of(layer, path, law)
    return of_limits(own, len(path.widths)) if law == "limit" else own


def density_and_slope(layer, path: Transitions, V=None, law: str = "finite-width") -> list[np.ndarray]:
    """Densities of networks, and the gradient of the sum in V; it compiles for seconds."""
    V = path.observed if V is None else V
    return [np.asarray(x) for x in _density_and_slope(law_of_widths(layer, path, law), path, V)]


@jax.jit
def density(layer, path: Transitions):
    return CovariancePath(layer, path).log_prob(path.observed)


@pytest.mark.parametrize("law", LAWS)
def test_it_is_the_dense_normal(layer, law):
    path = transitions_of(data_of(paths()))
    found = _density(law_of_widths(layer, path, law), path)
    if law == "limit":
        assert_dense_normals(found, layer, paths(), WIDTHS)
    else:
        expected = [dense_log_likelihood(layer, *own) for own in zip(paths(), WIDTHS, strict=True)]
        np.testing.assert_allclose(found, expected, rtol=1e-8)


@pytest.mark.long
@pytest.mark.parametrize("name", PATTERNS)
def test_with_a_pattern_it_is_the_dense_normal(name):
    layer = masked_layer_of(name, 3)
    found = density(layer, transitions_of(data_of(paths(), pattern=layer.limit().pattern)))
    expected = [dense_log_likelihood(layer, *own) for own in zip(paths(), WIDTHS, strict=True)]
    np.testing.assert_allclose(found, expected, rtol=1e-8)


@pytest.mark.long
def test_one_layer_for_each_network_is_the_density_of_each():
    layers = jax.tree.map(lambda x: x * jnp.array([1.0, 0.9, 0.8]), LAYERS["transformer"]())
    path = transitions_of(data_of(paths()))
    each = [density_and_slope(jax.tree.map(lambda x, i=i: x[i], layers), path)[0][i] for i in range(3)]
    np.testing.assert_allclose(density(layers, path), each, rtol=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["transformer", *PATTERNS])
@pytest.mark.parametrize("law", LAWS)
def test_derivatives_in_the_covariances_are_those_of_differences(law, name):
    layer = masked_layer_of(name, 3) if name in PATTERNS else LAYERS[name]()
    path = transitions_of(data_of(paths(), pattern=layer.limit().pattern))
    V = np.asarray(path.observed)
    slope = density_and_slope(layer, path, V, law)[1]
    along = np.random.default_rng(0).normal(size=(4, *V.shape))
    along += along.swapaxes(-1, -2)
    for direction in along:
        step = 1e-6 * direction
        up, down = (density_and_slope(layer, path, V + sign * step, law)[0].sum() for sign in (1, -1))
        # Rounding of the difference, eps |log p|/step, and its own error.
        np.testing.assert_allclose((slope * direction).sum(), (up - down) / 2e-6, rtol=1e-6, atol=1e-5)


@pytest.mark.long
def test_equal_correlations_have_no_derivative():
    V0 = np.asarray(si.equicorrelated(tokens=3, correlation=0.2))
    V = np.stack([np.stack([V0, *path[1:]]) for path in paths()])
    _, slope = density_and_slope(LAYERS["transformer"](), transitions_of(data_of(V)))
    assert np.isnan(slope[:, 0]).any()
    assert np.isfinite(slope[:, 1:]).all()


@pytest.mark.long
def test_transitions_that_are_not_used_have_no_part():
    V, used = paths(), np.ones((3, 4), bool)
    used[0, 1], used[2, 2] = False, False
    V[0, 1], V[2, 2] = 1.0, 1.0  # singular
    path = transitions_of(data_of(V).assign({USED: (("network", "layer"), used)}))
    for found in density_and_slope(LAYERS["transformer"](), path):
        assert np.isfinite(found).all()


def data_of_mlps():
    return covariance_dataset(paths(tokens=2), width=WIDTHS, architecture=si.layers.template("mlp"))


@pytest.mark.long
def test_the_packages_models_have_the_posterior_of_compressed_data():
    """The potential and its gradient, which samplers take, and the densities of networks at draws of the sites."""
    data = data_of_mlps()
    path = si.transitions(data, law="limit")
    model, statistics = si.models.full_path, path_statistics(observed_path(data), assumptions=path.assumptions)
    for z in ({"c_gap": 0.3, "c_mean": 1.0}, {"c_gap": 1.5, "c_mean": -2.0}):
        at = {name: jnp.asarray(value) for name, value in z.items()}
        found, expected = (potential_and_slope(model, each, at) for each in (path, statistics))
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-9, atol=1e-12), found, expected)
    gaps = np.array([[0.5, 2.0, 4.0]])
    densities = log_likelihoods(model, path, {"c_gap": gaps, "c_mean": 0 * gaps}, None)["covariance"]
    expected = [log_prob(si.ShapedMLP(gap / 2, -gap / 2), statistics) for gap in gaps[0]]
    np.testing.assert_allclose(densities[0], expected, rtol=1e-10)


def test_a_finite_network_is_not_sampled_without_a_chain():
    class Unsampled(si.ShapedMLP):
        forward_covariance = si.layers.AbstractLayer.forward_covariance

    with pytest.raises(si.InputError, match="Unsampled needs forward_covariance to sample finite networks"):
        CovariancePath(Unsampled(1.0, -1.0), si.transitions(data_of(paths()), law="limit")).sample(jr.key(0))


def test_values_of_another_shape_are_one_line():
    law, path = LAYERS["mlp"]().limit(), transitions_of(data_of(paths()))
    for shape in ((3, 4, 2, 2), (2, 4, 3, 3), (3, 3, 3, 3), (4, 3, 3), ()):
        with pytest.raises(si.InputError, match=r"value: path.observed is needed, or .* shape \(3, 4, 3, 3\)"):
            FullPath(law, path).log_prob(np.ones(shape))
