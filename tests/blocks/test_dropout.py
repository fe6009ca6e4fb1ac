"""Dropout of what branches add: moments by enumeration of masks, and what needs networks without it."""

import dataclasses
import itertools

import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from block_references import isserlis
from conftest import random_covariance
from references import assert_agrees, packed

import sdeinfer as si
from sdeinfer.blocks import MLP, Block, MatrixMoments, increment_moments, moments_over_depth, nodes_of, output_moments

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


BLOCK = Block(MLP(expansion=1.0), 0.5, bias=0.1, dropout=DROPPED)


def test_moments_over_depth_have_dropout():
    """Those of one block are what `test_moments` compares with networks."""
    V0, block, width = random_covariance(3), BLOCK, 64
    found = moments_over_depth(block, V0, width=width, depth=1, log2=6)
    hidden = block.branch.moments(V0, nodes_of(block, 3, width, log2=6), width=width)
    hidden = MatrixMoments(hidden.mean + block.bias / block.strength**2, hidden.covariance)
    increment = increment_moments(hidden, width=width, dropout=block.dropout)
    expected = output_moments(V0, increment, strength=block.strength, width=width)
    assert_agrees(found.mean[1], expected.mean)
    assert_agrees(found.covariance[1], expected.covariance)


def test_what_needs_networks_without_dropout(key):
    V0 = random_covariance(3)
    data, same = (
        si.sample_branches(block, V0, width=16, depth=1, key=key)
        for block in (BLOCK, dataclasses.replace(BLOCK, dropout=0.0))
    )
    np.testing.assert_array_equal(data["input"][0, 0], same["input"][0, 0])
    assert not np.allclose(data["increment"], same["increment"])
    calls = {
        "dropout: the chain has none: use method='weights', got 0.3": lambda: si.sample_networks(
            BLOCK, V0, width=16, depth=1, networks=2, key=key
        ),
        "dropout: the density of increments has none: observe networks in evaluation mode, got 0.3": lambda: si.fit(
            si.models.branches, data, architecture=BLOCK, key=jr.key(0)
        ),
    }
    for match, call in calls.items():
        with pytest.raises(si.InputError, match=match) as raised:
            call()
        assert "\n" not in str(raised.value)
