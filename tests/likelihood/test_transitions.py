import jax
import numpy as np
import pytest
from helpers.internals import USED, observed_path, used_of
from helpers.references import wishart_path
from likelihood.paths import WIDTH, dense_log_likelihood, path_of

import sdeinfer as si
from sdeinfer.observation import covariance_dataset


def test_terms_of_finite_width_are_the_dense_normal(layer):
    path = wishart_path(3, 3, width=WIDTH, seed=4)
    terms, law = path_of(path[None]).terms(slice(None)), jax.tree.map(np.asarray, layer.finite_width(WIDTH))
    variance = law.limit.linear_noise + law.limit.attention_noise * terms.mixing
    coefficients = law.variance[:, None] + law.variance_mixing[:, None] * terms.mixing[:, None]
    variance += (coefficients * terms.variance).sum(axis=1)
    residual = terms.increments - np.tensordot(terms.drift, law.drift, (1, 0))
    logs = -(residual**2 / variance + np.log(2 * np.pi * variance)) / 2
    found = (logs.sum(axis=1) + terms.log_jacobian).sum()
    np.testing.assert_allclose(found, dense_log_likelihood(layer, path, WIDTH), rtol=1e-8)


def test_transitions_that_are_not_used_are_left_out():
    paths = np.stack([wishart_path(3, 4, width=WIDTH, seed=s) for s in range(2)])
    data = covariance_dataset(paths, width=WIDTH)
    assert used_of(data).all()
    used = np.array([[1, 0, 0, 1, 1], [0, 0, 1, 0, 0]], bool)  # the last layer starts no transition
    path = observed_path(data.assign({USED: (("network", "layer"), used)}))
    np.testing.assert_array_equal(path.network, [0, 0, 1])
    np.testing.assert_array_equal(path.layer, [0, 3, 2])
    whole = path_of(paths)
    chosen = path.terms(np.arange(3)), whole.terms(np.array([0, 3, 6]))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-12), *chosen)


def test_no_transition_and_skipped_layers_are_refused():
    path = wishart_path(2, 3, width=9, seed=0)
    unused = covariance_dataset(path[None], width=9).assign({USED: (("network", "layer"), np.zeros((1, 4), bool))})
    with pytest.raises(ValueError, match="used: no transition is left"):
        observed_path(unused)
    with pytest.raises(ValueError, match="layer: the full path needs every layer, got layers 0, 2, 4, 6, …"):
        path_of(path[None], width=9, layers=[0, 2, 4, 6])


def singular_path() -> np.ndarray:
    """Two networks, of which the second has coincident tokens after layer 2."""
    path = wishart_path(3, 4, width=20, seed=1)
    path[2, 2], path[2, :, 2] = path[2, 1], path[2, :, 1]
    path[2, 2, 2] = path[2, 1, 1]
    return np.stack([wishart_path(3, 4, width=20, seed=2), path])


def test_a_singular_covariance_is_refused_with_its_place_where_a_transition_starts_there():
    with pytest.raises(ValueError, match="covariance: network 1, layer 2: singular"):
        path_of(singular_path(), width=20)
    used = np.ones((2, 5), bool)
    used[1, 2] = False
    data = covariance_dataset(singular_path(), width=20).assign({USED: (("network", "layer"), used)})
    at_the_end = wishart_path(2, 2, width=20, seed=1)
    at_the_end[-1] = si.equicorrelated(tokens=2, correlation=1.0)
    for path in (observed_path(data), path_of(at_the_end[None], width=20)):
        assert np.isfinite(path.terms(slice(None)).increments).all()
