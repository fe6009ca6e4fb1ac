"""Eigenvectors of many small matrices against NumPy's, and their derivatives.

Tolerances: what is left of A = U diag(λ) Uᵀ is a few roundings of A's norm for each of m columns.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.internals import SWEEPS, eigh, matmul, transpose

SIZES = [1, 2, 3, 4, max(SWEEPS), max(SWEEPS) + 1]
TOGETHER = 500
"""Matrices of one size and type, in one program."""

compiled_eigh = jax.jit(eigh)


def symmetric(tokens: int, *batch: int, seed: int = 0) -> np.ndarray:
    G = np.random.default_rng(seed).normal(size=(tokens, tokens, *batch))
    return G + np.swapaxes(G, 0, 1)


def assert_decomposes(A) -> None:
    """Of up to TOGETHER matrices."""
    tokens, _, count = A.shape
    found = compiled_eigh(A[..., np.arange(TOGETHER) % count])
    values, vectors = (np.asarray(x, np.float64)[..., :count] for x in found)
    allowed = 16 * tokens * np.finfo(A.dtype).eps
    of_vectors = np.einsum("kib,kjb->ijb", vectors, vectors) - np.eye(tokens)[..., None]
    np.testing.assert_allclose(
        np.einsum("ikb,kb,jkb->ijb", vectors, values, vectors), A, atol=allowed * np.abs(A).max()
    )
    np.testing.assert_allclose(of_vectors, 0.0, atol=allowed)
    assert (np.diff(values, axis=0) >= 0).all()


@pytest.mark.one_case("4-float64")
@pytest.mark.parametrize(
    ("tokens", "dtype"),
    [(m, np.float64) for m in SIZES] + [(m, np.float32) for m in (1, 2, 3, 4, max(SWEEPS) + 1)],
)
def test_decomposes_what_it_is_given(tokens, dtype):
    assert_decomposes(symmetric(tokens, TOGETHER).astype(dtype))


@pytest.mark.one_case("4")
@pytest.mark.parametrize("tokens", SIZES)
def test_equal_zero_and_nearly_equal_eigenvalues(tokens):
    rng = np.random.default_rng(1)
    U, _ = np.linalg.qr(rng.normal(size=(tokens, tokens)))
    spectra = [np.ones(tokens), np.zeros(tokens), np.r_[0.0, np.ones(tokens - 1)], 1 + 1e-9 * np.arange(tokens)]
    spectra += [10.0 ** -np.arange(tokens)]
    assert_decomposes(np.stack([U * s @ U.T for s in spectra], axis=-1))
    assert_decomposes(np.stack([np.diag(s) for s in spectra], axis=-1))


@jax.jit
def root_and_slopes(A, dA, G):
    """√A; its derivative along dA; and the gradient of tr(G √A)."""

    def root(A):
        values, U = eigh(A)
        return matmul(U * jnp.sqrt(values)[None], transpose(U))

    return *jax.jvp(root, (A,), (dA,)), jax.grad(lambda A: jnp.sum(G * root(A)))(A)


@pytest.mark.one_case("3")
@pytest.mark.parametrize("tokens", [1, 2, 3, 4, max(SWEEPS) + 1])
def test_functions_of_a_matrix_have_their_derivatives(tokens):
    """Of √A, whose derivative solves X √A + √A X = dA; forwards and backwards."""
    A, dA = (
        np.einsum("ikb,jkb->ijb", *[symmetric(tokens, 5)] * 2) + 0.1 * np.eye(tokens)[..., None],
        symmetric(tokens, 5, seed=1),  # which does not commute with A: eigenvectors turn
    )
    G = symmetric(tokens, 5, seed=2)
    S, dS, slope = (np.asarray(x) for x in root_and_slopes(A, dA, G))
    product = np.einsum("ikb,kjb->ijb", S, dS)
    np.testing.assert_allclose(product + np.swapaxes(product, 0, 1), dA, atol=1e-10)
    # The cotangent of tr(G √A), projected on dA, is tr(G dS).
    np.testing.assert_allclose((slope * dA).sum(), (G * dS).sum(), rtol=1e-9)


def test_eigenvalues_that_repeat_leave_finite_derivatives():
    @jax.jit
    def slopes(A):
        of_all = jax.grad(lambda A: jnp.sum(eigh(A)[1] ** 3) + jnp.sum(eigh(A)[0]))
        return of_all(A), jax.grad(lambda A: jnp.sum(eigh(A)[0]))(A)

    of_all, of_values = slopes(np.eye(3)[..., None] * 2.0)
    assert np.isfinite(of_all).all()
    np.testing.assert_allclose(np.einsum("iib->ib", of_values), 1.0)
