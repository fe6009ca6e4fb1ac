"""The primitive for products of small matrices, its derivatives and its maps, against `einsum`.

Tolerance: a sum of k products makes k roundings, relative to the sum of their absolute values.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.internals import UNROLLED, product, total

ROWS, INNER, COLUMNS = 2, 3, 4
BATCHES = pytest.mark.parametrize(
    ("left", "right"), [((), ()), ((5,), (5,)), ((5,), ()), ((5,), (2, 5)), ((2, 1), (1, 5))]
)


@pytest.fixture
def rng():
    return np.random.default_rng(20230630)


def reference(A, B):
    return jnp.einsum("mk...,kl...->ml...", A, B, precision="highest")


def pair(rng, left: tuple[int, ...], right: tuple[int, ...]):
    """A and B with these batch axes."""
    return rng.normal(size=(ROWS, INNER, *left)), rng.normal(size=(INNER, COLUMNS, *right))


def assert_close(found, expected) -> None:
    assert jax.tree.map(jnp.shape, found) == jax.tree.map(jnp.shape, expected)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-12)


@BATCHES
@pytest.mark.parametrize("types", [(np.float32, np.float32), (np.float64, np.float64), (np.float32, np.float64)])
def test_values_and_types_are_those_of_einsum(left, right, types, rng):
    A, B = (x.astype(dtype) for x, dtype in zip(pair(rng, left, right), types, strict=True))
    found, dtype = product(jnp.asarray(A), jnp.asarray(B)), np.result_type(*types)
    assert found.dtype == dtype
    exact, size = (np.einsum("mk...,kl...->ml...", f(A).astype(float), f(B).astype(float)) for f in (np.array, np.abs))
    assert found.shape == exact.shape
    assert (np.abs(found - exact) <= INNER * np.finfo(dtype).eps * size).all()


def derivatives(multiply):
    """First derivatives forwards and backwards; and, of a function that is not bilinear, the second."""

    @jax.jit
    def of(A, B, dA, dB, weights):
        def third_power(A, B):
            return jnp.sum(weights * multiply(A, B) ** 3)

        forwards = jax.jvp(multiply, (A, B), (dA, dB))
        backwards = jax.vjp(multiply, A, B)[1](weights)
        over_reverse = jax.jvp(jax.grad(third_power, (0, 1)), (A, B), (dA, dB))
        over_forwards = jax.grad(lambda A, B: jax.jvp(third_power, (A, B), (dA, dB))[1], (0, 1))(A, B)
        return forwards, backwards, over_reverse, over_forwards

    return of


@pytest.mark.one_case("left3-right3")
@BATCHES
def test_derivatives_are_those_of_einsum(left, right, rng):
    (A, B), (dA, dB) = pair(rng, left, right), pair(rng, left, right)
    arguments = A, B, dA, dB, rng.normal(size=(ROWS, COLUMNS, *np.broadcast_shapes(left, right)))
    assert_close(derivatives(product)(*arguments), derivatives(reference)(*arguments))


@pytest.mark.one_case("axes3")
@pytest.mark.parametrize("axes", [(0, None), (None, 0), (0, 0), (1, 2), (3, 3), (None, 1)])
def test_maps_are_those_of_einsum(axes, rng):
    A, B = (
        rng.normal(size=shape if axis is None else np.insert(shape, axis, 6))
        for shape, axis in zip(((ROWS, INNER, 5), (INNER, COLUMNS, 5)), axes, strict=True)
    )

    def mapped(multiply):
        def gradient(A, B):
            return jax.grad(lambda A, B: jnp.sum(jnp.sin(multiply(A, B))), (0, 1))(A, B)

        return jax.jit(jax.vmap(gradient, in_axes=axes))

    assert_close(mapped(product)(A, B), mapped(reference)(A, B))


@pytest.mark.one_case("shape1")
@pytest.mark.parametrize("shape", [(3,), (UNROLLED + 1, 2)])
def test_totals_and_their_derivatives_are_those_of_sums(shape, rng):
    A, direction = rng.normal(size=(2, *shape))

    @jax.jit
    def along(A, direction):
        def derivatives(of, axis):
            gradient = jax.grad(lambda A: jnp.sum(jnp.sin(of(A, axis))))
            return jax.jvp(lambda A: of(A, axis), (A,), (direction,)), jax.jvp(gradient, (A,), (direction,))

        return [[derivatives(of, axis) for axis in range(A.ndim)] for of in (total, jnp.sum)]

    assert_close(*along(A, direction))
