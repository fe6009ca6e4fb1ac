"""MLPs and experts by Monte Carlo, as the docstrings of `sdeinfer.blocks` state them: loops over units and experts.

Nothing here imports sdeinfer. Draws are along the first axis.
"""

import math
from collections.abc import Callable

import numpy as np


def mlp_gram(
    G: np.ndarray,
    activation: Callable,
    units: int,
    *,
    gated: bool = False,
    offset: float = 0.0,
    draws: int,
    rng: np.random.Generator,
) -> np.ndarray:
    """Draws of S = hhᵀ/u of an MLP, whose first projections have the covariance G over tokens."""
    L, S = np.linalg.cholesky(G), np.zeros((draws, *G.shape))
    for _ in range(units):
        h = activation(rng.standard_normal((draws, len(G))) @ L.T)
        if gated:
            h = h * (rng.standard_normal((draws, len(G))) @ L.T + offset)
        S += h[:, :, None] * h[:, None, :] / units
    return S


def experts_gram(
    V: np.ndarray,
    activation: Callable,
    units: int,
    *,
    gain: float,
    router: float,
    experts: int,
    chosen: int,
    scores: str,
    scale: float = 1.0,
    shared_units: int = 0,
    gated: bool = True,
    offset: float = 0.0,
    draws: int,
    rng: np.random.Generator,
) -> np.ndarray:
    """Draws of S of a mixture of experts, each of so many units, and of units that all tokens share."""
    logits = np.linalg.cholesky(router * V) @ rng.standard_normal((draws, len(V), experts))
    p = scale * chosen_weights(logits, chosen, scores)

    def gram(count: int) -> np.ndarray:
        return mlp_gram(gain * V, activation, count, gated=gated, offset=offset, draws=draws, rng=rng)

    S = np.zeros((draws, *V.shape))
    for e in range(experts):
        S += p[:, :, None, e] * p[:, None, :, e] * gram(units)
    return S + gram(shared_units) * shared_units / units if shared_units else S


def chosen_weights(logits: np.ndarray, chosen: int, scores: str) -> np.ndarray:
    """Weights of the experts of each token: 0 beyond the largest logits."""
    p = np.zeros_like(logits)
    for rank in range(chosen):
        best = np.argsort(logits, axis=-1)[..., -1 - rank, None]
        logit = np.take_along_axis(logits, best, axis=-1)
        np.put_along_axis(p, best, 1 / (1 + np.exp(-logit)) if scores == "sigmoid" else np.exp(logit), axis=-1)
    total = np.exp(logits).sum(-1, keepdims=True) if scores == "all" else p.sum(-1, keepdims=True)
    return p / total


def packed_moments(S: np.ndarray) -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """Mean and covariance of the entries on and above the diagonal, each with its Monte Carlo error."""
    a, b = np.triu_indices(S.shape[-1])
    x = S[:, a, b]
    difference = x - x.mean(0)
    products = difference[:, :, None] * difference[:, None, :]
    root = math.sqrt(len(x))
    return (x.mean(0), x.std(0, ddof=1) / root), (products.mean(0), products.std(0, ddof=1) / root)
