"""Logits of normalised queries and keys (Loshchilov et al. 2024, nGPT, arXiv 2410.01131, Section 2.3.2).

They state: "the expected variance of the dot product between normalized query and key vectors is 1/d_k. To restore a
variance of 1, the softmax scaling factor should instead be √d_k", and that it is d_k without norms. Queries and keys
are independent here, so that the first holds exactly, for any tokens; the second holds for tokens with mean squares
of 1 and weights of variance 1/n.

What a softmax sees are differences of logits of one query. Their variance is 2(1 − r)/d_k, with r the expected cosine
of two keys, whose features have the correlation ρ of the tokens. For d = d_k (Anderson 2003, Theorem 4.2.4, without
means)

    r = ρ (2/d) [Γ((d + 1)/2) / Γ(d/2)]² ₂F₁(½, ½; d/2 + 1; ρ²).
"""

import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from helpers.budget import assert_mean, mean_and_error
from helpers.internals import NetworkKeys, plain_products, wishart_draws, wishart_factor
from scipy.special import gammaln, hyp2f1

NETWORKS = 40_000


def chain_products(size: int, correlation: float, key):
    """q_a · k_b of two tokens in the chain of covariances, for one head of each network."""
    L = jnp.linalg.cholesky(jnp.eye(2) * (1 - correlation) + correlation)
    L = jnp.broadcast_to(L[:, :, None, None], (2, 2, 1, NETWORKS))
    freedom = [size, size - 2]
    keys = NetworkKeys.numbered(key, jnp.arange(NETWORKS, dtype=jnp.uint32))
    drawn = wishart_draws(freedom, tokens=2, blocks=1, normals=1, dtype=L.dtype, keys=keys)
    B, outside = (wishart_factor(nu, drawn.normals[k], drawn.chi[k]) for k, nu in enumerate(freedom))
    return plain_products(L, L, size=size, B=B, inside=drawn.normals[2:], outside=[outside])


def expected_cosine(size: int, correlation: float) -> float:
    """r."""
    ratio = np.exp(2 * (gammaln((size + 1) / 2) - gammaln(size / 2)))
    return correlation * 2 / size * ratio * hyp2f1(0.5, 0.5, size / 2 + 1, correlation**2)


@pytest.mark.slow
@pytest.mark.parametrize("correlation", [0.0, 0.9])
@pytest.mark.parametrize("size", [16, 64, 128])
def test_variances_of_logits(size, correlation, key):
    products = chain_products(size, correlation, key)
    cosines = np.asarray(products.normed("head", size))[0, 0, :, 0] / size  # of the first query with each key
    plain = np.asarray(products.products)[0, 0, :, 0]
    squares, differences = np.square(cosines[1]), np.square(cosines[1] - cosines[0])
    expected = 2 * (1 - expected_cosine(size, correlation)) / size
    (variance, error), (difference, its_error) = mean_and_error(squares), mean_and_error(differences)
    print(
        f"d_k = {size}, ρ = {correlation}: variance of a product {variance * size:.4f} ± {error * size:.4f} (stated 1) "
        f"over d_k, without norms {np.square(plain[1]).mean() / size:.3f} d_k (stated 1); of a difference of logits by "
        f"√d_k {difference * size:.4f} ± {its_error * size:.4f}, derived {expected * size:.4f}"
    )
    assert_mean(squares, 1 / size)
    assert_mean(np.square(plain[1]), size)
    assert_mean(differences, expected)


@pytest.mark.slow
def test_weights_have_the_same_cosines(key):
    """Queries and keys are those of drawn weights, in NumPy."""
    size, correlation, width, networks = 16, 0.9, 32, 4_000
    rng = np.random.default_rng(int(jr.randint(key, (), 0, 2**31)))
    U = np.linalg.cholesky([[1, correlation], [correlation, 1]]) @ np.linalg.qr(rng.standard_normal((width, 2)))[0].T
    W = rng.standard_normal((2, networks, width, size))
    q, k = (U @ of_kind for of_kind in W)
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    cosines = np.einsum("rc,rbc->rb", q[:, 0], k)
    assert_mean(np.square(cosines[:, 1]), 1 / size)
    assert_mean(np.square(cosines[:, 1] - cosines[:, 0]), 2 * (1 - expected_cosine(size, correlation)) / size)
