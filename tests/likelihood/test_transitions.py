import jax.numpy as jnp
import numpy as np
import pytest
import references
from references import assert_agrees, wishart_path

import sdeinfer as si
from sdeinfer.likelihood import Transitions, transitions
from sdeinfer.observe import covariance_dataset

WIDTH = 40


def gaussian_terms(path: Transitions, layer) -> np.ndarray:
    """Log density of each network as a sum over independent normals z ~ N(θ₁b₁ + θ₂b₂, a + κ²e)."""
    limit = layer.limit()
    variance = limit.linear_noise + limit.attention_noise * path.mixing
    residual = path.increments - limit.attention_drift * path.attention_drift - limit.relu_drift * path.relu_drift
    terms = -(residual**2 / variance + jnp.log(2 * jnp.pi * variance)) / 2
    return np.asarray(terms.sum(axis=(1, 2)) + path.log_jacobian)


def test_independent_normals_are_the_dense_normal(layer):
    path = wishart_path(4, 4, width=WIDTH, seed=4)
    expected = references.log_likelihood(layer, path, width=WIDTH)
    np.testing.assert_allclose(
        gaussian_terms(transitions(covariance_dataset(path[None], width=WIDTH)), layer), [expected], rtol=1e-10
    )


def test_every_network_has_its_own_width_and_its_own_row(layer):
    paths, widths = [wishart_path(3, 4, width=n, seed=n) for n in (20, 70)], [20, 70]
    found = gaussian_terms(transitions(covariance_dataset(np.stack(paths), width=widths)), layer)
    expected = [references.log_likelihood(layer, path, width=n) for path, n in zip(paths, widths, strict=True)]
    np.testing.assert_allclose(found, expected, rtol=1e-10)


def test_shapes_say_networks_transitions_and_entries():
    path = transitions(covariance_dataset(np.stack([wishart_path(3, 4, width=9, seed=s) for s in range(2)]), width=9))
    assert path.networks == 2
    for field in (path.increments, path.attention_drift, path.relu_drift, path.mixing):
        assert field.shape == (2, 4, 6)
    assert path.log_jacobian.shape == (2,)


def test_one_token_has_no_drift_and_no_mixing():
    path = transitions(covariance_dataset(wishart_path(1, 5, width=9, seed=0)[None], width=9))
    for field in (path.attention_drift, path.relu_drift, path.mixing):
        np.testing.assert_array_equal(field, 0)
    # z = dV √n/(√2 V): the relative increment.
    V = wishart_path(1, 5, width=9, seed=0)[:, 0, 0]
    np.testing.assert_allclose(path.increments[0, :, 0], np.diff(V) / V[:-1] * np.sqrt(9 / 2), rtol=1e-12)


def test_mixing_is_the_spectrum_of_the_centred_covariance():
    path = wishart_path(4, 1, width=9, seed=3)
    found = np.asarray(transitions(covariance_dataset(path[None], width=9)).mixing)
    # δ are the eigenvalues of V H, in rising order, whatever the factor.
    delta = np.sort(np.real(np.linalg.eigvals(path[0] @ (np.eye(4) - 1 / 4))))
    rows, columns = np.triu_indices(4)
    assert_agrees(found[0, 0], (delta[rows] ** 2 + delta[columns] ** 2) / 16, rtol=1e-12)


def test_rounding_asymmetry_is_averaged_away():
    path = wishart_path(3, 2, width=9, seed=0)
    crooked = path + 1e-12 * np.triu(np.ones((3, 3)), 1)
    straight = (crooked + np.swapaxes(crooked, -1, -2)) / 2
    one, other = (transitions(covariance_dataset(V[None], width=9)) for V in (crooked, straight))
    np.testing.assert_array_equal(one.increments, other.increments)


def test_skipped_layers_are_refused():
    data = covariance_dataset(wishart_path(2, 3, width=9, seed=0)[None], width=9, layers=[0, 2, 4, 6])
    with pytest.raises(ValueError, match="layer: the full path needs every layer, got layers 0, 2, 4, 6, …"):
        transitions(data)


def test_a_singular_covariance_is_refused_with_its_place():
    path = wishart_path(3, 4, width=20, seed=1)
    path[2, 2], path[2, :, 2] = path[2, 1], path[2, :, 1]
    path[2, 2, 2] = path[2, 1, 1]
    stack = np.stack([wishart_path(3, 4, width=20, seed=2), path])
    with pytest.raises(ValueError, match="covariance: network 1, layer 2: singular"):
        transitions(covariance_dataset(stack, width=20))


def test_a_singular_last_layer_is_no_obstacle():
    # Only the layers from which a transition starts need a density.
    path = wishart_path(2, 2, width=20, seed=1)
    path[-1] = si.equicorrelated(tokens=2, correlation=1.0)
    assert jnp.isfinite(transitions(covariance_dataset(path[None], width=20)).increments).all()
