"""Layers, attention patterns and covariances that tests share."""

import functools
import math

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from helpers.internals import vech

import sdeinfer as si

LAYERS = {
    "transformer": lambda: si.ShapedTransformer(gamma=0.5, tau0=0.6, c_plus=0.3, c_minus=-1.5),
    "attention": lambda: si.ShapedAttention(gamma=0.7, tau0=0.8),
    "feedforward": lambda: si.ResidualFeedForward(gamma=0.6, c_plus=0.5, c_minus=-1.0),
    "mlp": lambda: si.ShapedMLP(c_plus=0.2, c_minus=-1.2),
    "stack": lambda: si.Stack(
        (
            si.ShapedAttention(gamma=0.4, tau0=1.1),
            si.ResidualFeedForward(gamma=0.9, c_plus=1.0, c_minus=-0.5),
        )
    ),
}
"""One of each architecture: the shared property tests run over all of them."""


def halves(tokens: int) -> tuple[int, ...]:
    return (tokens,) if tokens == 1 else (tokens // 2, tokens - tokens // 2)


def any_mask(tokens: int) -> si.Pattern:
    """A mask without structure, in which not every token attends to itself."""
    if tokens == 2:
        return si.Pattern.of_mask([[0, 1], [1, 1]])
    chosen = np.random.default_rng(tokens).random((tokens, tokens)) < 0.6
    return si.Pattern.of_mask(chosen | np.eye(tokens, k=-1, dtype=bool) | np.eye(tokens, k=tokens - 1, dtype=bool))


PATTERNS = {
    "causal": lambda tokens: si.CAUSAL,
    "prompts": lambda tokens: si.Pattern(prompts=halves(tokens)),
    "causal prompts": lambda tokens: si.Pattern(causal=True, prompts=halves(tokens)),
    "mask": lambda tokens: any_mask(tokens) if tokens > 1 else si.Pattern(),
}
"""Attention patterns of a number of tokens."""

CAUSAL = {
    "causal attention": lambda: si.ShapedAttention(gamma=0.7, tau0=0.8, pattern=si.CAUSAL),
    "causal transformer": lambda: si.ShapedTransformer(
        gamma=0.5, tau0=0.6, c_plus=0.3, c_minus=-1.5, heads=2, pattern=si.CAUSAL
    ),
    "causal stack": lambda: si.Stack(
        (si.ShapedMLP(c_plus=0.2, c_minus=-1.2), si.ShapedAttention(gamma=0.6, tau0=0.9, pattern=si.CAUSAL))
    ),
}
"""With a causal mask; tokens are not exchangeable then."""


def masked_layer_of(name: str, tokens: int) -> si.layers.AbstractLayer:
    """One of `CAUSAL`, or a Transformer with one of `PATTERNS`."""
    if name in CAUSAL:
        return CAUSAL[name]()
    return si.ShapedTransformer(gamma=0.6, tau0=0.7, c_plus=0.4, c_minus=-1.1, pattern=PATTERNS[name](tokens))


def layer_of(kind, **parameters):
    """The layer of a template with those of some parameters that it has."""
    return kind.with_parameters({name: parameters[name] for name in kind.declared()})


@functools.cache
def random_covariance(tokens: int, seed: int = 0):
    """A well-conditioned covariance with unequal norms."""
    with jax.ensure_compile_time_eval():  # also where a traced function asks first
        X = np.asarray(jr.normal(jr.key(seed), (tokens, tokens + 3)))
        return jnp.asarray(X @ X.T / (tokens + 3))


def matrix_of(move, *shape: int, dtype=float):
    """A linear map from normals of this shape to symmetric matrices, as the matrix of their packed entries."""
    normals = jnp.eye(math.prod(shape), dtype=dtype).reshape(-1, *shape)
    return vech(jax.vmap(move)(normals)).T
