"""What one would write in an afternoon: the p×p form of Σ in JAX. The benchmarks measure against it."""

import jax.numpy as jnp

from sdeinfer.covariance import pairs


def dense_diffusions(V):
    """Σ_lin and 𝒜 on the upper triangle, by einsum."""
    tokens = V.shape[-1]
    i, j = pairs(tokens)
    H = jnp.eye(tokens, dtype=V.dtype) - 1 / tokens
    W = V @ H @ V @ H @ V

    def product(A, B):
        return A[..., i[:, None], i] * B[..., j[:, None], j] + A[..., i[:, None], j] * B[..., j[:, None], i]

    return product(V, V), (product(V, W) + product(W, V)) / tokens**2
