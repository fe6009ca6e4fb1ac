"""Eigenvectors of many small matrices against NumPy's, and their derivatives.

Tolerances: what is left of A = U diag(λ) Uᵀ is a few roundings of A's norm for each of m columns.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sdeinfer.covariance import diagonal, eigh, matmul, transpose
from sdeinfer.covariance._eigen import SWEEPS

TOKENS = pytest.mark.parametrize("tokens", [1, 2, 3, 4, 6, max(SWEEPS), max(SWEEPS) + 1])


def symmetric(tokens: int, *batch: int, seed: int = 0) -> np.ndarray:
    G = np.random.default_rng(seed).normal(size=(tokens, tokens, *batch))
    return G + np.swapaxes(G, 0, 1)


def assert_decomposes(A, tokens: int) -> None:
    values, vectors = (np.asarray(x, np.float64) for x in eigh(jnp.asarray(A)))
    allowed = 16 * tokens * np.finfo(A.dtype).eps * np.abs(A).max()
    np.testing.assert_allclose(np.einsum("ik...,k...,jk...->ij...", vectors, values, vectors), A, atol=allowed)
    np.testing.assert_allclose(
        np.einsum("ki...,kj...->ij...", vectors, vectors),
        np.broadcast_to(np.eye(tokens).reshape(tokens, tokens, *[1] * (A.ndim - 2)), A.shape),
        atol=16 * tokens * np.finfo(A.dtype).eps,
    )
    assert (np.diff(values, axis=0) >= 0).all()


@TOKENS
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_decomposes_what_it_is_given(tokens, dtype):
    assert_decomposes(symmetric(tokens, 500).astype(dtype), tokens)
    assert_decomposes(symmetric(tokens).astype(dtype), tokens)


@TOKENS
def test_equal_zero_and_nearly_equal_eigenvalues(tokens):
    rng = np.random.default_rng(1)
    U, _ = np.linalg.qr(rng.normal(size=(tokens, tokens)))
    spectra = [np.ones(tokens), np.zeros(tokens), np.r_[0.0, np.ones(tokens - 1)], 1 + 1e-9 * np.arange(tokens)]
    spectra += [10.0 ** -np.arange(tokens)]
    assert_decomposes(np.stack([U * s @ U.T for s in spectra], axis=-1), tokens)
    assert_decomposes(np.stack([np.diag(s) for s in spectra], axis=-1), tokens)


@pytest.mark.parametrize("tokens", [1, 2, 3, 4, max(SWEEPS) + 1])
def test_functions_of_a_matrix_have_their_derivatives(tokens):
    """Of √A, whose derivative solves X √A + √A X = dA; forwards and backwards."""
    A, dA = (
        np.einsum("ikb,jkb->ijb", *[symmetric(tokens, 5)] * 2) + 0.1 * np.eye(tokens)[..., None],
        symmetric(tokens, 5),
    )

    def root(A):
        values, U = eigh(A)
        return matmul(U * jnp.sqrt(values)[None], transpose(U))

    S, dS = jax.jvp(root, (jnp.asarray(A),), (jnp.asarray(dA),))
    np.testing.assert_allclose(matmul(S, dS) + matmul(dS, S), dA, atol=1e-10)
    # The cotangent of tr(G √A), projected on dA, is tr(G dS).
    G = symmetric(tokens, 5, seed=2)
    slope = jax.grad(lambda A: jnp.sum(G * root(A)))(jnp.asarray(A))
    np.testing.assert_allclose((slope * dA).sum(), (G * dS).sum(), rtol=1e-9)


def test_eigenvalues_that_repeat_leave_finite_derivatives():
    A = jnp.eye(3)[..., None] * 2.0
    assert jnp.isfinite(jax.grad(lambda A: jnp.sum(eigh(A)[1] ** 3) + jnp.sum(eigh(A)[0]))(A)).all()
    np.testing.assert_allclose(diagonal(jax.grad(lambda A: jnp.sum(eigh(A)[0]))(A)), 1.0)
