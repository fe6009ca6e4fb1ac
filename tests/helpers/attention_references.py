"""Attention by Monte Carlo, as the docstrings of `sdeinfer.blocks` state it: loops over heads, tokens and features.

Nothing here imports sdeinfer. Draws are along the first axis.
"""

import math

import numpy as np


def attention_gram(
    G: np.ndarray,
    mask: np.ndarray,
    *,
    heads: int,
    groups: int,
    size: int,
    temperature: float,
    base: float | None = None,
    rotated_size: int | None = None,
    norm: str | None = None,
    cap: float | None = None,
    sink: float | None = None,
    of_gates: np.ndarray | None = None,
    draws: int,
    rng: np.random.Generator,
) -> np.ndarray:
    """Draws of S of attention, with rotations of queries and keys if there is a base.

    Projections have the covariance G over tokens; those of the gates, where heads have gates, have another one.
    """

    def projected(covariance: np.ndarray, count: int) -> list[np.ndarray]:
        L = np.linalg.cholesky(covariance)
        return [L @ rng.standard_normal((draws, len(G), size)) for _ in range(count)]

    queries, keys, values = projected(G, heads), projected(G, groups), projected(G, groups)
    if norm is not None:
        queries, keys = normed(queries, norm), normed(keys, norm)
    if base is not None:
        turned = size if rotated_size is None else rotated_size
        queries, keys = ([partly_rotated(x, base, turned) for x in heads_of] for heads_of in (queries, keys))
    S = np.zeros((draws, *G.shape))
    for head in range(heads):
        group = head // (heads // groups)
        logits = products(queries[head], keys[group]) / (temperature * math.sqrt(size))
        if cap is not None:
            logits = cap * np.tanh(logits / cap)
        h = averaged(logits, mask, values[group], sink)
        if of_gates is not None:
            h = h / (1 + np.exp(-projected(of_gates, 1)[0]))
        S += products(h, h) / (heads * size)
    return S


def latent_gram(
    V: np.ndarray,
    mask: np.ndarray,
    *,
    gain: float,
    rotated_gain: float,
    heads: int,
    size: int,
    rotated_size: int,
    value_size: int,
    key_rank: int,
    query_rank: int | None,
    base: float,
    temperature: float,
    draws: int,
    rng: np.random.Generator,
) -> np.ndarray:
    """Draws of S of attention of compressed tokens, with weights after the compression."""
    L = np.linalg.cholesky(V)

    def compressed(rank: int) -> np.ndarray:
        return normed([L @ rng.standard_normal((draws, len(V), rank))], "head")[0]

    def mapped(tokens: np.ndarray, features: int) -> np.ndarray:
        rank = tokens.shape[-1]
        return math.sqrt(gain / rank) * tokens @ rng.standard_normal((draws, rank, features))

    of_keys = compressed(key_rank)
    # Tokens themselves, as m features whose mean products are V.
    plain = np.broadcast_to(math.sqrt(len(V)) * L, (draws, *V.shape))
    of_queries = plain if query_rank is None else compressed(query_rank)
    rotated_keys = rotated(math.sqrt(rotated_gain) * L @ rng.standard_normal((draws, len(V), rotated_size)), base)
    S = np.zeros((draws, *V.shape))
    for _ in range(heads):
        k, v = mapped(of_keys, size), mapped(of_keys, value_size)
        q, rotated_q = mapped(of_queries, size), rotated(mapped(of_queries, rotated_size), base)
        logits = (products(q, k) + products(rotated_q, rotated_keys)) / (temperature * math.sqrt(size + rotated_size))
        h = averaged(logits, mask, v)
        S += products(h, h) / (heads * value_size)
    return S


def products(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Products of the features of two tokens."""
    return np.einsum("dac,dbc->dab", x, y)


def averaged(logits: np.ndarray, mask: np.ndarray, v: np.ndarray, sink: float | None = None) -> np.ndarray:
    """Values weighted by the softmax of masked logits, which loses the probability of a sink."""
    h = np.zeros_like(v)
    for a in range(len(mask)):
        weights = np.exp(logits[:, a]) * mask[a]
        total = weights.sum(1) + (0.0 if sink is None else math.exp(sink))
        for b in range(len(mask)):
            h[:, a] += (weights[:, b] / total)[:, None] * v[:, b]
    return h


def normed(heads_of: list[np.ndarray], over: str) -> list[np.ndarray]:
    """Features with a mean square of 1 over one head ("head") or over all heads together ("all")."""
    squares = [(x**2).mean(-1, keepdims=True) for x in heads_of]
    if over == "all":
        squares = [sum(squares) / len(squares)] * len(squares)
    return [x / np.sqrt(square) for x, square in zip(heads_of, squares, strict=True)]


def partly_rotated(x: np.ndarray, base: float, size: int) -> np.ndarray:
    """The first features rotated, the others as they are."""
    return np.concatenate([rotated(x[..., :size], base), x[..., size:]], axis=-1)


def rotated(x: np.ndarray, base: float) -> np.ndarray:
    """Entries c and c + d_k/2 of token a, as a complex number, times e^{i a base^(−2c/d_k)}."""
    size = x.shape[-1]
    turned = np.empty_like(x)
    for a in range(x.shape[-2]):
        for c in range(size // 2):
            turn = complex(math.cos(a * base ** (-2 * c / size)), math.sin(a * base ** (-2 * c / size)))
            z = (x[..., a, c] + 1j * x[..., a, c + size // 2]) * turn
            turned[..., a, c], turned[..., a, c + size // 2] = z.real, z.imag
    return turned
