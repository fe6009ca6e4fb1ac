"""Clusters, their plateaus and merging times, on tokens whose clusters are known."""

import jax.numpy as jnp
import numpy as np
import pytest

from sdeinfer import InputError, meanfield


def on_circle(angles):
    return np.stack([np.cos(angles), np.sin(angles)], axis=-1)


def test_neighbours_are_linked_by_chains():
    tokens = on_circle(np.deg2rad([0.0, 2.0, 4.0, 90.0, 180.0, 181.0]))
    labels = meanfield.clusters(tokens)
    assert [list(labels == label).count(True) for label in np.unique(labels)] == [3, 1, 2]
    assert len(np.unique(meanfield.clusters(tokens, close=0.9998))) == 5
    with pytest.raises(InputError, match=r"tokens: shape \(n, D\) is needed"):
        meanfield.clusters(tokens[0])


def test_counts_plateaus_and_merging_times():
    ts = np.arange(5.0)
    trajectory = on_circle(np.deg2rad([[0, 90, 180], [0, 90, 180], [0, 90, 91], [0, 90, 91], [0, 1, 2]]))
    counts = meanfield.cluster_counts(trajectory)
    assert counts.tolist() == [3, 3, 2, 2, 1]
    assert meanfield.merging_times(ts, trajectory).tolist() == [4, 2, 0]
    assert meanfield.merging_times(ts[:4], trajectory[:4]).tolist() == [np.inf, 2, 0]
    assert meanfield.plateaus(ts, counts) == [(3, 0.0, 2.0), (2, 2.0, 4.0), (1, 4.0, 4.0)]
    assert meanfield.plateaus(ts, counts, lasting=2.0) == [(2, 2.0, 4.0)]


def test_synchronisation_and_collapse(key):
    x = meanfield.random_tokens(6, 3, key=key)
    pairs = np.asarray(x @ x.T)[np.triu_indices(6, 1)]
    np.testing.assert_allclose(meanfield.mean_correlation(x), pairs.mean())
    np.testing.assert_allclose(meanfield.order_parameter(jnp.repeat(x[:1], 4, axis=0)), 1)
    found = meanfield.solve(meanfield.SelfAttentionFlow(1.0), x, [40.0])
    assert meanfield.mean_correlation(found)[-1] > 1 - 1e-6
    assert meanfield.cluster_counts(found)[-1] == 1


def test_observed_tokens_are_scaled_to_the_sphere(key):
    hidden = 3 * np.asarray(meanfield.random_tokens(24, 4, key=key)).reshape(2, 3, 4, 4)
    data = meanfield.tokens_dataset(hidden, layers=[0, 2, 3])
    assert data["tokens"].dims == ("network", "layer", "token", "component")
    np.testing.assert_allclose(data["tokens"], hidden / 3)
    assert data["layer"].values.tolist() == [0, 2, 3]
    for wrong, message in (
        (hidden[0], "shape .* is needed"),
        (hidden[:, :1], "at least two layers"),
        (hidden * [[[[1]], [[0]], [[1]]]], "network 0, layer 1, token 0 is zero or not finite"),
    ):
        with pytest.raises(InputError, match=message):
            meanfield.tokens_dataset(wrong)
    with pytest.raises(InputError, match="layers: 3 increasing numbers are needed"):
        meanfield.tokens_dataset(hidden, layers=[0, 2, 2])
