"""Batched linear algebra against NumPy, on both sides of `UNROLLED`.

The factorisations are compiled for `BATCH_NETWORKS` matrices of one size and type, and for two other shapes.

Tolerances: a factorisation of an m×m matrix leaves out at most 4m roundings of √(A_ii A_jj), and makes as many again
with its products; a sum of m products makes m.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.internals import UNROLLED, cholesky, is_positive_definite, matmul, semidefinite_cholesky, transpose

TOGETHER = 25
SIZES = [*((m, np.float64) for m in (1, 3, UNROLLED, UNROLLED + 1)), (3, np.float32), (UNROLLED + 1, np.float32)]
SHAPES = [(*size, (TOGETHER,)) for size in SIZES]
SHAPES += [(m, np.float64, batch) for m in (3, UNROLLED + 1) for batch in [(), (2, 3)]]
BOTH_SIDES = pytest.mark.parametrize(("tokens", "dtype"), SIZES[1:])


@pytest.fixture
def rng():
    return np.random.default_rng(20230630)


def gram(X) -> np.ndarray:
    """XXᵀ for every trailing index."""
    return np.einsum("ik...,jk...->ij...", X, X)


def definite(rng, tokens: int, *batch: int) -> np.ndarray:
    return gram(rng.normal(size=(tokens, tokens + 3, *batch)))


def scale_of(A) -> np.ndarray:
    """The √(A_ii A_jj) that bounds the entries of a covariance."""
    norms = np.sqrt(np.einsum("ii...->i...", A))
    return norms[:, None] * norms[None]


def assert_factor(L, A) -> None:
    """L Lᵀ = A, entry by entry, up to what a factorisation in A's type may leave."""
    assert L.dtype == A.dtype
    assert L.shape == A.shape
    error = np.abs(gram(np.asarray(L, np.float64)) - A.astype(np.float64))
    allowed = 8 * len(A) * np.finfo(A.dtype).eps * scale_of(A.astype(np.float64))
    assert (error <= allowed).all(), f"off by {(error / np.where(allowed > 0, allowed, 1)).max():.3g} times the allowed"


@jax.jit
def compiled_factorisations(A):
    return cholesky(A), semidefinite_cholesky(A), is_positive_definite(A)


def factorisations(A) -> list[np.ndarray]:
    """Of up to TOGETHER matrices; or of matrices of another shape, which is compiled for itself."""
    if A.ndim != 3:
        return [np.asarray(x) for x in compiled_factorisations(A)]
    many = np.take(A, np.arange(TOGETHER) % A.shape[-1], axis=-1)
    return [np.asarray(x)[..., : A.shape[-1]] for x in compiled_factorisations(many)]


@pytest.mark.one_case("17-float64-batch3")
@pytest.mark.parametrize(("tokens", "dtype", "batch"), SHAPES)
def test_definite_matrices_have_choleskys_factor(tokens, batch, dtype, rng):
    A = definite(rng, tokens, *batch).astype(dtype)
    L, semidefinite, is_definite = factorisations(A)
    assert is_definite.shape == batch
    assert is_definite.all()
    # Triangular with a positive diagonal: no other such factor exists.
    np.testing.assert_array_equal(L, np.einsum("ij...,ij->ij...", L, np.tri(tokens, dtype=dtype)))
    assert (np.einsum("ii...->i...", L) > 0).all()
    assert_factor(L, A)
    np.testing.assert_array_equal(semidefinite, L)


def singular_tokens(rng, tokens: int) -> dict[str, np.ndarray]:
    """Tokens X of which XXᵀ is singular, for two or more of them."""
    X = rng.normal(size=(tokens, tokens))
    first, last = X[:1], np.arange(tokens)[:, None] == tokens - 1
    deficient = rng.normal(size=(tokens, max(tokens // 2, 1)))
    return {
        "one direction": X[:, :1] * first,
        "half the rank": np.pad(deficient, ((0, 0), (0, tokens - deficient.shape[1]))),
        "one dimension short": X * (np.arange(tokens) > 0),
        "equal": np.where(last, first, X),
        "opposite": np.where(last, -first, X),
        "all equal": np.broadcast_to(first, X.shape),
        "zero": np.where(last, 0.0, X),
        "nothing": np.zeros_like(X),
        "many scales": np.where(last, first, X) * np.geomspace(1e-6, 1e6, tokens)[:, None],
        "many scales, upside down": np.where(last, first, X) * np.geomspace(1e6, 1e-6, tokens)[:, None],
    }


@pytest.mark.one_case("3-float32")
@pytest.mark.parametrize(("tokens", "dtype"), SIZES)
def test_singular_matrices_have_a_factor_of_their_rank(tokens, dtype, rng):
    kinds = singular_tokens(rng, tokens) if tokens > 1 else {"nothing": np.zeros((1, 1))}
    A = gram(np.stack(list(kinds.values()), axis=-1)).astype(dtype)
    plain, L, is_definite = factorisations(A)
    assert not is_definite.any()
    assert np.isnan(plain).all()
    assert_factor(L, A)
    of = dict(zip(kinds, np.moveaxis(L, -1, 0), strict=True))
    np.testing.assert_array_equal(of["nothing"], 0)
    if tokens > 1:
        np.testing.assert_array_equal(of["equal"][-1], of["equal"][0])
        np.testing.assert_array_equal(of["opposite"][-1], -of["opposite"][0])
        np.testing.assert_array_equal(of["all equal"], np.broadcast_to(of["all equal"][0], (tokens, tokens)))
        np.testing.assert_array_equal(of["zero"][-1], 0)
        ranks = {name: np.any(factor != 0, axis=0).sum() for name, factor in of.items()}
        assert ranks["one direction"] == ranks["all equal"] == 1
        assert ranks["half the rank"] == max(tokens // 2, 1)


@pytest.mark.one_case("3-float32")
@BOTH_SIDES
def test_tokens_that_almost_coincide_keep_what_others_see_of_their_difference(tokens, dtype, rng):
    """x₁ and x₂ at ρ = 1 − g, and x₃ along x₁ − x₂: what elimination leaves of x₂ is as small as its rounding."""
    eps = np.finfo(dtype).eps
    gaps = np.concatenate([eps * np.geomspace(0.25, 1e4, 24), [1e-7]])
    X = np.zeros((tokens, tokens, len(gaps)))
    half = np.sqrt(gaps / 2)  # sin θ/2 for cos θ = 1 − g
    X[0, 0] = X[1, 0] = np.sqrt(1 - half**2)
    X[0, 1], X[1, 1], X[2, 1] = half, -half, 1.0
    X[3:] = rng.normal(size=(tokens - 3, tokens, 1))
    norms = rng.uniform(0.1, 10, size=(tokens, 1, len(gaps)))
    A = gram(X * norms).astype(dtype)
    assert_factor(factorisations(A)[1], A)


@pytest.mark.one_case("17-float64")
@BOTH_SIDES
def test_indefinite_and_broken_matrices_are_not_definite(tokens, dtype, rng):
    A = definite(rng, tokens)
    lowest = np.linalg.eigvalsh(A)[0]
    broken = A.copy()
    broken[-1, -1] = np.nan
    shifted = [A - shift * lowest * np.eye(tokens) for shift in (0.9, 1.1, 3.0)]
    batch = np.stack([*shifted, -A, broken, A * np.inf, A], axis=-1).astype(dtype)
    plain, _, is_definite = factorisations(batch)
    np.testing.assert_array_equal(is_definite, [True, False, False, False, False, False, True])
    np.testing.assert_array_equal(np.isnan(plain).all(axis=(0, 1)), ~is_definite)
    np.testing.assert_array_equal(np.isnan(plain).any(axis=(0, 1)), ~is_definite)


def product(A):
    L = semidefinite_cholesky(A)
    return matmul(L, transpose(L))


@jax.jit
def derivatives(A, direction, weights):
    """Forwards, d L Lᵀ along a direction; backwards, the gradient of ⟨weights, L Lᵀ⟩."""
    _, forwards = jax.jvp(product, (A,), (direction,))
    return forwards, jax.grad(lambda A: jnp.sum(weights * product(A)))(A)


@pytest.mark.one_case("17")
@pytest.mark.parametrize("tokens", [1, 3, UNROLLED + 1])
def test_derivative_of_l_lt_is_the_identity_on_symmetric_directions(tokens, rng):
    A, direction, weights = definite(rng, 3 * tokens, 2)[:tokens, :tokens], *rng.normal(size=(2, tokens, tokens, 2))
    direction, weights = (S + np.swapaxes(S, 0, 1) for S in (direction, weights))
    forwards, backwards = derivatives(A, direction, weights)
    # The inverse factors in between amplify rounding by the condition number.
    allowed = 8 * tokens * np.finfo(float).eps * np.linalg.cond(np.moveaxis(A, -1, 0)).max()
    np.testing.assert_allclose(forwards, direction, atol=allowed * np.abs(direction).max(), rtol=0)
    slope, scale = ((f(weights) * f(direction)).sum(axis=(0, 1)) for f in (np.asarray, np.abs))
    np.testing.assert_allclose(np.sum(backwards * direction, axis=(0, 1)), slope, atol=allowed * scale.max(), rtol=0)


@pytest.mark.one_case
@pytest.mark.parametrize("tokens", [3, UNROLLED + 1])
def test_gradients_are_finite_in_a_batch_that_holds_singular_matrices(tokens, rng):
    kinds = list(singular_tokens(rng, tokens).values())
    A = np.concatenate([gram(np.stack(kinds, axis=-1)), definite(rng, tokens, 2)], axis=-1).astype(np.float32)
    weights = rng.normal(size=A.shape).astype(np.float32)
    forwards, backwards = derivatives(A, weights + np.swapaxes(weights, 0, 1), weights)
    assert np.isfinite(forwards).all()
    assert np.isfinite(backwards).all()
