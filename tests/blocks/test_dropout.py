"""Dropout of what branches add: moments by enumeration of masks, and networks with weights."""

import dataclasses
import itertools

import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from block_references import isserlis
from budget import assert_estimate, mean_and_error
from conftest import random_covariance
from references import packed

import sdeinfer as si
from sdeinfer.blocks import MLP, Block, MatrixMoments, SelfAttention, increment_moments, moments_over_depth
from sdeinfer.covariance import vech

DROPPED = 0.3


def test_moments_are_those_over_masks():
    """For S with two values, by all masks of four tokens: the fourth moments of tokens repeated in every way."""
    tokens, width = 4, 5
    each = [np.asarray(random_covariance(tokens, seed=seed)) for seed in (1, 2)]
    flat = np.stack([packed(S) for S in each])
    first, second = np.zeros_like(flat[0]), np.zeros((flat.shape[1],) * 2)
    given = np.zeros_like(second)
    for S in each:
        mean, products = np.zeros_like(first), np.zeros_like(second)
        for mask in itertools.product((0.0, 1.0), repeat=tokens):
            kept = np.array(mask)
            probability = np.prod(np.where(kept, 1 - DROPPED, DROPPED)) / 2
            masked = S * np.outer(kept, kept) / (1 - DROPPED) ** 2
            mean += probability * packed(masked)
            products += probability * (isserlis(masked) + np.outer(packed(masked), packed(masked)))
        # The n columns are independent given S.
        first += mean
        second += products / width + (1 - 1 / width) * 2 * np.outer(mean, mean)
        given += np.outer(packed(S), packed(S)) / 2
    hidden = MatrixMoments(
        jnp.asarray((each[0] + each[1]) / 2), jnp.asarray(given - np.outer(flat.mean(0), flat.mean(0)))
    )
    found = increment_moments(hidden, width=width, dropout=DROPPED)
    np.testing.assert_allclose(packed(found.mean), first, rtol=1e-12)
    np.testing.assert_allclose(found.covariance, second - np.outer(first, first), rtol=1e-10, atol=1e-12)


LAYER = si.Stack(
    [
        Block(SelfAttention(heads=2, pattern=si.CAUSAL), 0.5, "rms", dropout=DROPPED),
        Block(MLP(expansion=1.0), 0.5, "rms", bias=0.1, dropout=0.5),
    ]
)


def test_networks_have_the_moments_over_depth(key):
    """Up to the next order in 1/n, which is allowed as an error bar of 1/n, of variances as one of 1/√n of them."""
    V0, width, networks = random_covariance(3), 64, 1_000
    sizes = {"width": width, "depth": 2}
    data = si.sample_networks(LAYER, V0, **sizes, networks=networks, method="weights", key=key)
    exact = moments_over_depth(LAYER, V0, **sizes)
    for number in (1, 2):
        V = np.asarray(vech(data["covariance"].values[:, number]))
        mean, variance = np.asarray(vech(exact.mean[number])), np.diagonal(exact.covariance[number])
        estimate, error = mean_and_error(V)
        assert_estimate(estimate, mean, np.hypot(error, np.abs(mean) / width))
        estimate, error = mean_and_error((V - mean) ** 2)
        assert_estimate(estimate, variance, np.hypot(error, variance / np.sqrt(width)))


def test_what_needs_networks_without_dropout(key):
    V0 = random_covariance(3)
    plain = si.Stack([dataclasses.replace(block, dropout=0.0) for block in LAYER.layers])
    data = si.sample_branches(LAYER, V0, width=16, depth=1, key=key)
    same = si.sample_branches(plain, V0, width=16, depth=1, key=key)
    np.testing.assert_array_equal(data["input"][0, 0], same["input"][0, 0])
    assert not np.allclose(data["increment"], same["increment"])
    calls = {
        "dropout: the chain has none: use method='weights', got 0.3": lambda: si.sample_networks(
            LAYER, V0, width=16, depth=1, networks=2, key=key
        ),
        "dropout: the density of increments has none: observe networks in evaluation mode, got 0.3": lambda: si.fit(
            si.models.branches, data, architecture=LAYER, key=jr.key(0)
        ),
    }
    for match, call in calls.items():
        with pytest.raises(si.InputError, match=match) as raised:
            call()
        assert "\n" not in str(raised.value)
