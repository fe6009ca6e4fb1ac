import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from helpers.budget import assert_distribution
from helpers.cases import random_covariance
from helpers.references import assert_agrees
from scipy import stats

import sdeinfer as si
from sdeinfer.networks import tokens_with_covariance


@pytest.mark.one_case("3-8-float32")
@pytest.mark.parametrize(
    ("tokens", "width", "dtype"), [(1, 1, jnp.float64), (3, 8, jnp.float32), (3, 8, jnp.float64), (4, 4, jnp.float64)]
)
def test_tokens_have_exactly_the_covariance(tokens, width, dtype, key):
    V = random_covariance(tokens)
    X = tokens_with_covariance(V.astype(dtype), width=width, key=key)
    assert X.shape == (len(V), width)
    assert X.dtype == dtype
    assert_agrees(X @ X.T / width, V, rtol=50 * float(jnp.finfo(dtype).eps))


def test_a_singular_covariance_gives_equal_tokens(key):
    X = tokens_with_covariance(si.equicorrelated(tokens=3, correlation=1.0), width=8, key=key)
    assert_agrees(X[1], X[0], rtol=1e-7)  # √eps: the size of a factor's zero eigenvalue
    assert_agrees(X @ X.T / 8, jnp.ones((3, 3)), rtol=1e-14)


def test_directions_are_uniform(key):
    # The first entry of a uniform direction in n dimensions: its square is Beta(1/2, (n−1)/2), its sign is even.
    width = 5
    draw = jax.jit(jax.vmap(lambda k: tokens_with_covariance(random_covariance(2), width=width, key=k)))
    X = np.asarray(draw(jr.split(key, 4_000)))
    entry = X[:, 1, 0] / np.linalg.norm(X[:, 1], axis=-1)
    assert_distribution(entry, lambda x: stats.beta((width - 1) / 2, (width - 1) / 2).cdf((x + 1) / 2))
