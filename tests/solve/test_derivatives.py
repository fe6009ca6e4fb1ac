"""Derivatives in a few numbers are computed forwards, in every mode and to any order."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.internals import FORWARD_SCALARS, along_few_numbers

import sdeinfer as si


def geometric(a, b, M):
    """exp(a b) M by a loop that JAX cannot differentiate backwards."""
    _, found = jax.lax.while_loop(
        lambda s: s[0] < 2, lambda s: (s[0] + 1, s[1] * jnp.exp(a * b / 2)), (0, M * (1 + 0 * a))
    )
    return found


M = jnp.array([[1.0, 2.0], [0.5, -1.0]])
AT = 0.3, 0.7
by_tangents = along_few_numbers(geometric)


def mean(a, b):
    return by_tangents(a, b, M).sum()


def closed(a, b):
    return jnp.exp(a * b) * M.sum()


@pytest.mark.parametrize("mode", [jax.grad, jax.jacfwd, jax.hessian, lambda f, argnums: jax.grad(jax.grad(f))])
@pytest.mark.parametrize("argnums", [0, (0, 1)], ids=["one", "both"])
def test_derivatives_are_exact_in_every_mode_and_to_the_second_order(mode, argnums):
    found, expected = (jax.jit(mode(f, argnums=argnums))(*AT) for f in (mean, closed))
    for pair in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(*pair, rtol=1e-12)


def test_batches_have_the_derivatives_of_their_members():
    found = jax.vmap(jax.grad(mean), (0, None))(jnp.array([0.3, 0.5]), AT[1])
    np.testing.assert_allclose(found, [jax.grad(closed)(a, AT[1]) for a in (0.3, 0.5)], rtol=1e-12)


def test_arrays_and_many_numbers_have_the_derivatives_of_jax():
    with pytest.raises(ValueError, match="Reverse-mode differentiation does not work"):
        jax.grad(lambda M: by_tangents(*AT, M).sum())(M)
    many = along_few_numbers(lambda *x: geometric(x[0], sum(x), M).sum())
    with pytest.raises(ValueError, match="Reverse-mode differentiation does not work"):
        jax.grad(lambda x: many(*x))(jnp.ones(FORWARD_SCALARS + 1))
    np.testing.assert_allclose(
        jax.grad(lambda x: many(*x))(jnp.ones(FORWARD_SCALARS))[1], np.exp(FORWARD_SCALARS) * M.sum(), rtol=1e-12
    )
    _, slope = jax.jvp(lambda M: by_tangents(*AT, M), (M,), (M,))
    np.testing.assert_allclose(slope, np.exp(AT[0] * AT[1]) * M, rtol=1e-12)


def test_the_gradient_of_paths_is_their_difference(key):
    def mean_square(gamma):
        layer = si.ResidualFeedForward(gamma, 1.0, -1.0)
        return (si.simulate(layer, np.eye(2), [0.1], paths=4, step=0.05, key=key) ** 2).mean()

    h = 1e-5
    difference = (mean_square(0.5 + h) - mean_square(0.5 - h)) / (2 * h)
    np.testing.assert_allclose(jax.grad(mean_square)(0.5), difference, rtol=1e-6)
