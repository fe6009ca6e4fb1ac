"""Shaped networks and others in plain NumPy, from the definitions of a layer (Eq. 1, 4, 9, 11).

Nothing here is of the package. A fresh Gaussian matrix W is seen only through the product XW/√k, whose columns are
independent N(0, XXᵀ/k) given X: `_product` draws these, or W itself, which is slower.
"""

import dataclasses
import math
from collections.abc import Iterator
from typing import Literal

import numpy as np


@dataclasses.dataclass(frozen=True)
class Network:
    """Layers of attention, feed-forward or both; the defaults are those of a shaped Transformer.

    `identity`, `centred`, `shaped_temperature`, `layer_norm`, `weights` (their standard deviation) and `plain_relu`
    make it an unshaped one. `explicit` draws weights, which layers or networks share by `shared_by`.
    """

    gamma: float = 0.5
    tau0: float = 1.0
    c_plus: float = 2.0
    c_minus: float = -2.0
    architecture: str = "transformer"
    heads: int = 1
    output_projection: bool = False
    expansion: int = 1
    causal: bool = False
    prompts: tuple[int, ...] = ()
    identity: bool = True
    centred: bool = True
    shaped_temperature: bool = True
    layer_norm: bool = False
    plain_relu: bool = False
    weights: float = 1.0
    explicit: bool = False
    shared_by: Literal["", "layers", "networks"] = ""

    @property
    def attends(self) -> bool:
        return self.architecture in ("transformer", "attention")

    def mask(self, tokens: int) -> np.ndarray:
        """Which tokens (columns) each token (row) attends to."""
        lengths = self.prompts or (tokens,)
        prompt = np.repeat(np.arange(len(lengths)), lengths)
        seen = prompt[:, None] == prompt
        return seen & np.tri(tokens, dtype=bool) if self.causal else seen


@dataclasses.dataclass(frozen=True, eq=False)
class Case:
    """The network, sizes and tokens of one data set; equal only to itself, as a static argument."""

    network: Network
    V0: np.ndarray
    width: int
    depth: int
    networks: int


def tokens_of(V0: np.ndarray, *, width: int, networks: int, rng: np.random.Generator) -> np.ndarray:
    """Tokens X with XXᵀ/n = V0 in directions that are random for each network, shape (networks, tokens, width)."""
    values, axes = np.linalg.eigh(V0)
    root = axes * np.sqrt(np.maximum(values, 0.0))
    directions = np.linalg.qr(rng.normal(size=(networks, width, len(root))))[0].swapaxes(1, 2)
    return math.sqrt(width) * root @ directions


def hidden_states(network: Network, X: np.ndarray, *, depth: int, rng: np.random.Generator) -> Iterator[np.ndarray]:
    """Hidden states after each layer, the initial ones X first; shape (networks, tokens, width)."""
    yield X
    state = rng.bit_generator.state
    for _ in range(depth):
        if network.shared_by == "layers":
            rng.bit_generator.state = state  # the same weights again
        X = _layer(network, X, rng)
        yield X


def covariances(network: Network, V0: np.ndarray, *, width: int, depth: int, networks: int, seed: int) -> np.ndarray:
    """XXᵀ/n after each layer, V0 first, shape (networks, 1 + depth, tokens, tokens)."""
    rng = np.random.default_rng([56, seed])
    X = tokens_of(V0, width=width, networks=networks, rng=rng)
    states = hidden_states(network, X, depth=depth, rng=rng)
    return np.stack([X @ X.swapaxes(1, 2) / width for X in states], axis=1)


def states_of(
    seed: int, *, networks=16, depth=12, tokens=4, width=96, norm=1.5, start="orthogonal", **fields
) -> np.ndarray:
    """Hidden states of `Network(**fields)`, shape (networks, 1 + depth, tokens, width).

    They start with the same "orthogonal" tokens for all networks, or with "prompts", others for each.
    """
    rng = np.random.default_rng([57, seed])
    if start == "prompts":
        X = norm * prompts_of(networks, tokens, width, rng)
    else:
        X = norm * math.sqrt(width) * np.linalg.qr(rng.normal(size=(width, tokens)))[0].T
        X = np.broadcast_to(X, (networks, tokens, width))
    return np.stack(list(hidden_states(Network(**fields), X, depth=depth, rng=rng)), axis=1)


def prompts_of(networks: int, tokens: int, width: int, rng: np.random.Generator) -> np.ndarray:
    """Tokens of norm 1 that are sums of one of 64 words and of a position, shape (networks, tokens, width)."""
    words, positions = rng.normal(size=(64, width)), rng.normal(size=(tokens, width))
    return (words[rng.integers(64, size=(networks, tokens))] + positions) / math.sqrt(2)


def _layer(network: Network, X: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    if network.architecture == "mlp":
        return _product(network, _relu(network, X), X.shape[-1], rng)
    shortcut = math.sqrt(1 - network.gamma**2)
    if network.attends:
        X = shortcut * X + network.gamma * _attention(network, _normalised(network, X), rng)
    if network.architecture in ("transformer", "feedforward"):
        X = shortcut * X + network.gamma * _feedforward(network, _normalised(network, X), rng)
    return X


def _product(network: Network, X: np.ndarray, outputs: int, rng: np.random.Generator) -> np.ndarray:
    """X W/√k for the k features of X and W of iid normals."""
    networks, tokens, features = X.shape
    if network.explicit or network.shared_by:
        count = 1 if network.shared_by == "networks" else networks
        return X @ rng.normal(size=(count, features, outputs)) * (network.weights / math.sqrt(features))
    gram = X @ X.swapaxes(1, 2) / features
    finite = np.isfinite(gram).all(axis=(1, 2))[:, None, None]  # a network that has exploded
    values, axes = np.linalg.eigh(np.where(finite, gram, 0.0))
    root = np.where(finite, axes, np.nan) * np.sqrt(np.maximum(values, 0.0))[:, None]
    return network.weights * root @ rng.normal(size=(networks, tokens, outputs))


def _relu(network: Network, x: np.ndarray) -> np.ndarray:
    if network.plain_relu:
        return math.sqrt(2) * np.maximum(x, 0.0)
    plus, minus = (1 + c / math.sqrt(x.shape[-1] / network.expansion) for c in (network.c_plus, network.c_minus))
    return math.sqrt(2 / (plus**2 + minus**2)) * np.where(x > 0, plus * x, minus * x)


def _normalised(network: Network, X: np.ndarray) -> np.ndarray:
    if not network.layer_norm:
        return X
    X = X - X.mean(axis=-1, keepdims=True)
    return X / np.sqrt((X**2).mean(axis=-1, keepdims=True))


def _feedforward(network: Network, X: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    width = X.shape[-1]
    return _product(network, _relu(network, _product(network, X, network.expansion * width, rng)), width, rng)


def _attention(network: Network, X: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Heads side by side; the logits of each are divided by τ0 √(n n_k), n_k = n/H, or as usual by √n_k."""
    width, mask = X.shape[-1], network.mask(X.shape[1])
    key_width = width // network.heads
    temperature = network.tau0 * math.sqrt(width * key_width) if network.shaped_temperature else math.sqrt(key_width)
    added = network.identity * np.eye(len(mask)) - network.centred * mask / mask.sum(axis=1, keepdims=True)
    # Queries, keys and values of all heads are columns of one product with independent weights.
    queries, keys, values = np.split(_product(network, X, 3 * width, rng), 3, axis=-1)
    heads = []
    for head in range(network.heads):
        mine = slice(head * key_width, (head + 1) * key_width)
        logits = queries[..., mine] @ keys[..., mine].swapaxes(1, 2) / temperature
        logits = np.where(mask, logits - logits.max(axis=-1, keepdims=True), -np.inf)
        softmax = np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)
        heads.append((softmax + added) @ values[..., mine])
    joined = np.concatenate(heads, axis=-1)
    return _product(network, joined, width, rng) if network.output_projection else joined
