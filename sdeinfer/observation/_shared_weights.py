"""Whether the networks of one array share weights, by their hidden states.

A layer adds D to the hidden states X of a network, with D Dᵀ/n ≈ c XXᵀ/n. If networks r and s have the same weights,
D_r D_sᵀ ≈ c X_r X_sᵀ as well; if each has its own, D_r D_sᵀ has mean 0. The slope of D_r D_sᵀ on c X_r X_sᵀ is about 1
or 0, whatever the strength of the layers and however small the products of different tokens.
"""

import math

import numpy as np
from jaxtyping import Float

SHARED_WEIGHTS = "shared_weights"
"""Attribute of data whose networks share weights."""

NETWORKS, TOKENS = 16, 16
"""Largest number of networks, and of tokens of each, that are compared."""

SLOPE, ERRORS = 0.25, 4.0
"""Slope, and its distance from 0 in standard errors, above which networks share weights."""


class SharedWeightsWarning(UserWarning):
    """The networks of one array have the same weights, as prompts of one network have."""


class SharedWeights:
    """The slope, with weights of each layer by its standard error."""

    def __init__(self):
        self._before: np.ndarray | None = None
        self._total = self._information = 0.0

    def add(self, state: Float[np.ndarray, "networks tokens width"]) -> None:
        """Take the hidden states of the next layer."""
        X = np.array(state[:NETWORKS, :TOKENS], np.float64)
        before, self._before = self._before, X
        if before is None or len(X) < 2:
            return
        networks, tokens, width = X.shape
        squares = np.sum(before**2, axis=-1, keepdims=True)
        # A final normalisation rescales each token, whatever the weights.
        D = X - before * (np.sum(X * before, axis=-1, keepdims=True) / np.where(squares > 0, squares, 1.0))
        if not (before.any() and D.any()):
            return
        states, increments = (x.reshape(-1, width) / np.linalg.norm(x) for x in (before, D))
        number = np.repeat(np.arange(networks), tokens)
        same = number[:, None] == number
        expected = np.where(same, 0.0, states @ states.T)
        found = increments @ increments.T
        own = np.where(same, found, 0.0) @ expected
        slope, variance = np.sum(expected**2), 2 * np.sum(own * own.T) / width
        if variance > 0:
            self._total += slope * np.sum(expected * found) / variance
            self._information += slope**2 / variance

    @property
    def found(self) -> bool:
        """Whether networks share weights."""
        if self._information == 0:
            return False
        slope = self._total / self._information
        return bool(slope > max(SLOPE, ERRORS / math.sqrt(self._information)))
