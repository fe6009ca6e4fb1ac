"""Wide networks on tokens that are alike: closed recursions, and what the chain of covariances has instead.

T tokens have one mean square q and one product p with each other. A residual branch of strength g adds g² times the
mean Gram matrix of its features, whose entries are

- for attention that averages over all tokens, p + (q − p)/T for squares and products alike;
- for ReLU of projections with gain w and bias b, with Q = wq + b, P = wp + b, c = P/Q: Q/2, and the arc-cosine kernel
  Q/2 · (√(1 − c²) + c(π − arccos c))/π (Cho and Saul 2009).

At width n the mean over networks differs by a multiple of 1/n, which two widths remove.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

import jax.random as jr
import numpy as np
from helpers.budget import mean_and_error
from jaxtyping import PRNGKeyArray

import sdeinfer as si
from sdeinfer.blocks import Block

Position = Literal["pre", "post"] | None
"""Of a norm: before the branch, after the sum, or none."""


class Tokens(NamedTuple):
    """Mean square and product of T tokens, which may be infinitely many."""

    square: float
    product: float
    number: float = math.inf

    @property
    def correlation(self) -> float:
        return self.product / self.square

    def normalised(self) -> "Tokens":
        return self._replace(square=1.0, product=self.correlation)


Features = Callable[[Tokens], Tokens]


def average(tokens: Tokens) -> Tokens:
    """Features of attention with equal weights."""
    value = tokens.product + (tokens.square - tokens.product) / tokens.number
    return tokens._replace(square=value, product=value)


def relu(gain: float, bias: float) -> Features:
    """Features of ReLU."""

    def features(tokens: Tokens) -> Tokens:
        Q, P = gain * tokens.square + bias, gain * tokens.product + bias
        c = P / Q
        kernel = (np.sqrt(1 - c**2) + c * (np.pi - np.arccos(c))) / np.pi
        return tokens._replace(square=Q / 2, product=Q / 2 * kernel)

    return features


def residual(tokens: Tokens, features: Features, strength: float, position: Position, bias: float = 0.0) -> Tokens:
    """X + g h W/√u + b of wide networks, and its norm."""
    h = features(tokens.normalised() if position == "pre" else tokens)
    square = tokens.square + strength**2 * h.square + bias
    product = tokens.product + strength**2 * h.product + bias
    total = tokens._replace(square=square, product=product)
    return total.normalised() if position == "post" else total


def correlations(start: Tokens, layer: Callable[[Tokens], Tokens], depth: int) -> np.ndarray:
    """Correlation after 0, 1, …, `depth` layers."""

    def states() -> Iterator[Tokens]:
        tokens = start
        yield tokens
        for _ in range(depth):
            tokens = layer(tokens)
            yield tokens

    return np.array([tokens.correlation for tokens in states()])


def correlations_of_networks(layer: si.Stack | Block, start: Tokens, **sizes: Any) -> np.ndarray:
    """Mean correlation of tokens in each network and observed layer, by the chain of covariances."""
    V0 = si.equicorrelated(tokens=int(start.number), correlation=start.correlation, norm=start.square)
    V = si.sample_networks(layer, V0, method="chain", **sizes)["covariance"].values
    scale = np.sqrt(np.diagonal(V, axis1=-2, axis2=-1))
    a, b = np.triu_indices(int(start.number), 1)
    return (V / scale[..., :, None] / scale[..., None, :])[..., a, b].mean(-1)


def chain_correlations(
    layer: si.Stack | Block, start: Tokens, *, width: int, key: PRNGKeyArray, **sizes: int
) -> tuple[np.ndarray, np.ndarray]:
    """Mean correlation of tokens of infinitely wide networks, in each observed layer, and its Monte Carlo error.

    Chains of widths n and 2n give 2ρ(2n) − ρ(n), which is free of the term in 1/n.
    """
    key_narrow, key_wide = jr.split(key)
    narrow = mean_and_error(correlations_of_networks(layer, start, width=width, **sizes, key=key_narrow))
    wide = mean_and_error(correlations_of_networks(layer, start, width=2 * width, **sizes, key=key_wide))
    return 2 * wide[0] - narrow[0], np.hypot(2 * wide[1], narrow[1])
