"""What NumPy computes of data is what JAX computes of traced matrices, in stacks as well."""

from functools import partial

import jax
import numpy as np
import pytest
from conftest import random_covariance
from references import assert_agrees

from sdeinfer.covariance import Pattern, coordinates
from sdeinfer.terms._attention import attention_drift
from sdeinfer.terms._relu import relu_drift


def stack(tokens: int) -> np.ndarray:
    return np.stack([random_covariance(tokens, seed=seed) for seed in range(3)])


@pytest.mark.parametrize("pattern", [Pattern(), Pattern(causal=True)], ids=str)
@pytest.mark.parametrize("tokens", [1, 4])
def test_coordinates_of_data_are_those_of_traced_matrices(tokens, pattern):
    V, S = stack(tokens), stack(tokens)[::-1]

    @jax.jit
    def traced(V, S):
        at = coordinates(V, pattern)
        return at.mixing, at.log_volume, at.colour(at.whiten(S)), (at.whiten(S) ** 2).sum()

    at = coordinates(V, pattern)
    for number, (mixing, log_volume, returned, norm) in enumerate(traced(*each) for each in zip(V, S, strict=True)):
        assert_agrees(at.mixing[number], mixing)
        assert_agrees(at.log_volume[number], log_volume)
        assert_agrees(at.colour(at.whiten(S))[number], returned)
        assert_agrees((at.whiten(S)[number] ** 2).sum(), norm)  # eigenvectors are free to turn where values repeat
    assert_agrees(at.colour(at.whiten(S)), S)


@pytest.mark.parametrize("drift", [attention_drift, partial(attention_drift, pattern=Pattern(causal=True)), relu_drift])
def test_drifts_of_data_are_those_of_traced_matrices(drift):
    V = np.moveaxis(stack(4), 0, -1)
    found = drift(V)
    assert isinstance(found, np.ndarray)
    assert_agrees(found, jax.jit(drift)(V))


@pytest.mark.parametrize("pattern", [Pattern(), Pattern(causal=True)], ids=str)
def test_a_matrix_without_a_factor_leaves_the_others_alone(pattern):
    V = stack(3)
    V[1] = 1.0
    with np.errstate(all="ignore"):
        at = coordinates(V, pattern)
    assert np.isnan(at.cholesky[1]).all()
    assert np.isnan(at.mixing[1][-1])
    whole = coordinates(V[[0, 2]], pattern)
    np.testing.assert_array_equal(at.mixing[[0, 2]], whole.mixing)
