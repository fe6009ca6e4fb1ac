import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.internals import centre, covariance_fault, factor, safe_sqrt, unvech, validate_covariance, vech
from helpers.references import assert_agrees, packed

import sdeinfer as si

DTYPES = pytest.mark.parametrize("dtype", [np.float32, np.float64])


@pytest.mark.one_case("m4-float32")
@DTYPES
def test_a_matrix_is_packed_centred_and_factorised(V, dtype):
    """By rows of the upper triangle, by the projection H, and by a square root."""
    V, H, eps = np.asarray(V, dtype), np.eye(len(V)) - 1 / len(V), float(np.finfo(dtype).eps)
    entries, unpacked, centred, X = jax.jit(lambda V: (vech(V), unvech(vech(V)), centre(V), factor(V)))(V)
    assert {x.dtype for x in (entries, unpacked, centred, X)} == {np.dtype(dtype)}
    np.testing.assert_array_equal(entries, packed(V))
    np.testing.assert_array_equal(unpacked, V)
    np.testing.assert_allclose(centred, H @ V @ H, atol=20 * eps)
    assert_agrees(X @ X.T, V, rtol=50 * eps)


def test_safe_sqrt_has_a_finite_derivative_at_zero_and_the_usual_one_elsewhere():
    assert jax.grad(safe_sqrt)(0.0) == 0
    assert jax.grad(safe_sqrt)(4.0) == 0.25
    assert jnp.isnan(safe_sqrt(jnp.array(-1.0)))


@pytest.mark.parametrize(("tokens", "rho"), [(1, 0.3), (2, -1.0), (4, 0.2), (4, -1 / 3), (3, 1.0)])
def test_equicorrelated_has_one_norm_and_one_correlation(tokens, rho):
    V = np.asarray(si.equicorrelated(tokens=tokens, correlation=rho, norm=1.5))
    np.testing.assert_allclose(np.diagonal(V), 2.25)
    np.testing.assert_allclose(V[np.triu_indices(tokens, 1)], 2.25 * rho)
    validate_covariance(V)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tokens": 0, "correlation": 0.0}, "tokens: a whole number of at least 1 is needed, got 0"),
        ({"tokens": 4, "correlation": -0.5}, "correlation: 4 tokens allow -0.3333 to 1 .* got -0.5"),
        ({"tokens": 2, "correlation": 1.1}, "correlation: 2 tokens allow -1 to 1 .* got 1.1"),
        ({"tokens": 2, "correlation": float("nan")}, "correlation: .* got nan"),
        ({"tokens": 2, "correlation": 0.1, "norm": 0.0}, "norm: must be positive, from 1e-15 to 1e15, got 0.0"),
        ({"tokens": 2, "correlation": 0.1, "norm": float("inf")}, "norm: .* got inf"),
        ({"tokens": 2, "correlation": 0.1, "norm": 1e200}, r"norm: .* got 1e\+200"),
    ],
)
def test_equicorrelated_refuses_what_does_not_exist(arguments, message):
    with pytest.raises(ValueError, match=message):
        si.equicorrelated(**arguments)


@pytest.mark.parametrize(
    ("V", "message"),
    [
        (np.ones(3), r"a square matrix .* got shape \(3,\)"),
        (np.ones((2, 3)), r"a square matrix .* got shape \(2, 3\)"),
        (np.ones((0, 0)), r"a square matrix .* got shape \(0, 0\)"),
        (np.eye(2) * (1 + 0j), "real numbers are needed, got complex128"),
        (np.array([[1.0, np.nan], [np.nan, 1.0]]), "2 entries are NaN or infinite"),
        (np.array([[1.0, 0.25], [0.0, 1.0]]), "not symmetric: .* reaches 0.25"),
        (np.array([[1, 2], [2, 1]]), "not positive semi-definite: smallest eigenvalue -1"),
    ],
)
def test_a_matrix_that_is_no_covariance_is_refused_with_what_and_how_much(V, message):
    with pytest.raises(ValueError, match=f"^start: {message}"):
        validate_covariance(V, name="start")


@DTYPES
def test_rounding_is_no_fault(V, dtype):
    same = np.arange(len(V)) % max(len(V) - 1, 1)  # the last token is the first
    singular = np.asarray(V, dtype)[same][:, same]
    np.testing.assert_array_equal(validate_covariance(singular), singular)


def test_the_first_fault_of_a_stack_is_located():
    stack = np.broadcast_to(np.eye(2), (2, 3, 2, 2)).copy()
    assert covariance_fault(stack) is None
    stack[1, 2, 0, 0] = -0.5
    assert covariance_fault(stack) == ((1, 2), "not positive semi-definite: smallest eigenvalue -0.5")
