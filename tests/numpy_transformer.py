"""Shaped Transformers in plain NumPy, with weights that are drawn; nothing here is of the package (Eq. 9 and 11)."""

import math

import numpy as np


def hidden_states(
    seed: int,
    *,
    networks: int = 16,
    depth: int = 12,
    tokens: int = 4,
    width: int = 96,
    gamma: float = 0.5,
    tau0: float = 1.0,
    gap: float = 4.0,
    norm: float = 1.5,
    start: str = "orthogonal",
    shared: bool = False,
    causal: bool = False,
) -> np.ndarray:
    """Hidden states of shape (networks, 1 + depth, tokens, width).

    Arguments:
        seed: seed of weights and tokens.
        networks: number of networks.
        depth: number of layers, each of attention and feed-forward.
        tokens: number of tokens.
        width: number of features n.
        gamma: residual strength.
        tau0: temperature of the softmax.
        gap: c₊ − c₋ of the shaped ReLU; c₊ = −c₋.
        norm: root mean square of the features.
        start: "orthogonal" tokens, the same for all networks; or "prompts": others for each, of words and positions.
        shared: whether all have the weights of one network.
        causal: whether tokens attend only to themselves and those before.
    """
    rng = np.random.default_rng([57, seed])
    X = math.sqrt(width) * np.linalg.qr(rng.normal(size=(width, tokens)))[0].T
    X = np.broadcast_to(X, (networks, tokens, width))
    if start == "prompts":
        words, positions = rng.normal(size=(64, width)), rng.normal(size=(tokens, width))
        X = (words[rng.integers(64, size=(networks, tokens))] + positions) / math.sqrt(2)
    shortcut, states = math.sqrt(1 - gamma**2), [norm * X]
    mask = np.tri(tokens, dtype=bool) if causal else np.ones((tokens, tokens), bool)
    shape = (1 if shared else networks, width, width)

    def linear(X: np.ndarray) -> np.ndarray:
        return X @ rng.normal(size=shape) / math.sqrt(width)

    for _ in range(depth):
        X = states[-1]
        logits = linear(X) @ linear(X).swapaxes(1, 2) / (tau0 * width)
        weights = np.where(mask, np.exp(logits - logits.max(axis=-1, keepdims=True)), 0.0)
        softmax = weights / weights.sum(axis=-1, keepdims=True)
        X = shortcut * X + gamma * (np.eye(tokens) + softmax - mask / mask.sum(axis=-1, keepdims=True)) @ linear(X)
        hidden = linear(X)
        up, down = 1 + gap / 2 / math.sqrt(width), 1 - gap / 2 / math.sqrt(width)
        hidden = math.sqrt(2 / (up**2 + down**2)) * np.where(hidden > 0, up, down) * hidden
        states.append(shortcut * X + gamma * linear(hidden))
    return np.stack(states, axis=1)
