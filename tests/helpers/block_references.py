"""One branch by plain Monte Carlo, as `docs/theory/blocks.md` states it: loops over units, heads and tokens.

Nothing here imports sdeinfer. Draws are along the first axis.
"""

import math
from collections.abc import Callable

import numpy as np


def mlp_gram(
    G: np.ndarray, activation: Callable, units: int, *, gated: bool = False, draws: int, rng: np.random.Generator
) -> np.ndarray:
    """Draws of S = hhᵀ/u of an MLP, whose first projections have the covariance G over tokens."""
    L, S = np.linalg.cholesky(G), np.zeros((draws, *G.shape))
    for _ in range(units):
        h = activation(rng.standard_normal((draws, len(G))) @ L.T)
        if gated:
            h = h * (rng.standard_normal((draws, len(G))) @ L.T)
        S += h[:, :, None] * h[:, None, :] / units
    return S


def attention_gram(
    G: np.ndarray,
    mask: np.ndarray,
    *,
    heads: int,
    groups: int,
    size: int,
    temperature: float,
    base: float | None = None,
    draws: int,
    rng: np.random.Generator,
) -> np.ndarray:
    """Draws of S of attention, with rotations of queries and keys if there is a base."""
    L, S = np.linalg.cholesky(G), np.zeros((draws, *G.shape))

    def projected() -> np.ndarray:
        return L @ rng.standard_normal((draws, len(G), size))

    def turned(x: np.ndarray) -> np.ndarray:
        return x if base is None else rotated(x, base)

    for _ in range(groups):
        k, v = turned(projected()), projected()
        for _ in range(heads // groups):
            q = turned(projected())
            logits = np.einsum("dac,dbc->dab", q, k) / (temperature * math.sqrt(size))
            h = np.zeros_like(v)
            for a in range(len(G)):
                weights = np.exp(logits[:, a]) * mask[a]
                for b in range(len(G)):
                    h[:, a] += (weights[:, b] / weights.sum(1))[:, None] * v[:, b]
            S += np.einsum("dac,dbc->dab", h, h) / (heads * size)
    return S


def rotated(x: np.ndarray, base: float) -> np.ndarray:
    """Entries c and c + d_k/2 of token a, as a complex number, times e^{i a base^(−2c/d_k)}."""
    size = x.shape[-1]
    found = np.empty_like(x)
    for a in range(x.shape[-2]):
        for c in range(size // 2):
            turn = complex(math.cos(a * base ** (-2 * c / size)), math.sin(a * base ** (-2 * c / size)))
            z = (x[..., a, c] + 1j * x[..., a, c + size // 2]) * turn
            found[..., a, c], found[..., a, c + size // 2] = z.real, z.imag
    return found


def packed_moments(S: np.ndarray) -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """Mean and covariance of the entries on and above the diagonal, each with its Monte Carlo error."""
    a, b = np.triu_indices(S.shape[-1])
    x = S[:, a, b]
    difference = x - x.mean(0)
    products = difference[:, :, None] * difference[:, None, :]
    root = math.sqrt(len(x))
    return (x.mean(0), x.std(0, ddof=1) / root), (products.mean(0), products.std(0, ddof=1) / root)
