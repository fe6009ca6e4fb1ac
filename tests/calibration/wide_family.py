"""Random data sets of shaped networks, from the definitions of a layer (Eq. 1, 4, 9, 11), in NumPy alone.

Nothing here is from the package. A fresh Gaussian matrix W is seen only through the product XW/√n, whose n columns are
independent N(0, XXᵀ/n) given X: `_linear` draws these, or W itself, which is slower.
"""

import dataclasses
import math
from collections.abc import Iterator

import numpy as np

SHAPES = ("any", "equicorrelated", "near copies", "unequal norms", "nearly low rank", "low rank")
"""Kinds of initial Gram matrices."""

WORK = 3e8
"""Bound on networks × depth × tokens × width, which keeps a data set below some ten seconds."""


@dataclasses.dataclass(frozen=True)
class Family:
    """One data set: the architecture, its true parameters, its sizes and its tokens."""

    architecture: str
    gamma: float
    tau0: float
    c_plus: float
    c_minus: float
    V0: np.ndarray
    shape: str
    width: int
    depth: int
    networks: int
    heads: int = 1
    output_projection: bool = False
    expansion: int = 1
    causal: bool = False
    prompts: tuple[int, ...] = ()
    explicit: bool = False

    @property
    def attends(self) -> bool:
        return self.architecture in ("transformer", "attention")

    @property
    def truth(self) -> dict[str, float]:
        """The identified parameters."""
        names = {"transformer": "gamma tau0 c_gap", "attention": "gamma tau0", "feedforward": "gamma c_gap"}
        known = {"gamma": self.gamma, "tau0": self.tau0, "c_gap": self.c_plus - self.c_minus}
        return {name: known[name] for name in names.get(self.architecture, "c_gap").split()}

    @property
    def mask(self) -> np.ndarray:
        """Which tokens (columns) each token (row) attends to."""
        tokens = len(self.V0)
        lengths = self.prompts or (tokens,)
        prompt = np.repeat(np.arange(len(lengths)), lengths)
        seen = prompt[:, None] == prompt
        return seen & np.tri(tokens, dtype=bool) if self.causal else seen


def draw_family(seed: int) -> Family:
    """A random data set: γ .1 to .9, τ0 .3 to 3, gap 0 to 6, m 2 to 6, n 48 to 512, d 8 to 128, 8 to 256 networks."""
    rng = np.random.default_rng([36, seed])
    architecture = str(rng.choice(["transformer", "attention", "feedforward", "mlp"], p=[0.4, 0.35, 0.15, 0.1]))
    attends = architecture in ("transformer", "attention")
    tokens = int(rng.integers(2, 7))
    heads = int(rng.choice([1, 2, 4], p=[0.7, 0.15, 0.15])) if attends else 1
    width = heads * round(float(np.exp(rng.uniform(np.log(48), np.log(512)))) / heads)
    width = max(width, heads * 2 * tokens)
    depth, networks = (
        round(float(np.exp(rng.uniform(np.log(low), np.log(high))))) for low, high in ((8, 128), (8, 256))
    )
    networks = max(8, min(networks, int(WORK / (depth * tokens * width))))
    gap, mean = rng.uniform(0, 6), rng.normal(0, math.sqrt(2))
    # Slopes 1 + c/√n that are not positive are no shaped ReLU.
    mean = max(mean, gap / 2 - 0.8 * math.sqrt(width))
    pattern = rng.choice(["all", "causal", "prompts", "causal prompts"], p=[0.6, 0.15, 0.15, 0.1]) if attends else "all"
    halves = (tokens // 2, tokens - tokens // 2)
    shape = str(rng.choice(SHAPES, p=[0.4, 0.15, 0.15, 0.15, 0.1, 0.05]))
    return Family(
        architecture,
        gamma=float(rng.uniform(0.1, 0.9)),
        tau0=float(np.exp(rng.uniform(np.log(0.3), np.log(3)))),
        c_plus=float(mean + gap / 2),
        c_minus=float(mean - gap / 2),
        V0=_initial(shape, tokens, rng),
        shape=shape,
        width=width,
        depth=depth,
        networks=networks,
        heads=heads,
        output_projection=bool(attends and rng.random() < 0.2),
        expansion=int(rng.choice([1, 2, 4], p=[0.7, 0.15, 0.15]))
        if architecture in ("transformer", "feedforward")
        else 1,
        causal="causal" in str(pattern),
        prompts=halves if "prompts" in str(pattern) else (),
        explicit=bool(rng.random() < 0.1 and width <= 96),
    )


def _initial(shape: str, tokens: int, rng: np.random.Generator) -> np.ndarray:
    """A Gram matrix of the initial tokens, whose largest norm is .3 to 4."""
    X = rng.normal(size=(tokens, tokens + 4))
    if shape == "equicorrelated":
        rho = rng.uniform(0, 0.9)
        V = (1 - rho) * np.eye(tokens) + rho
    elif shape == "near copies":
        copied = X[:1] + float(np.exp(rng.uniform(np.log(3e-3), np.log(0.2)))) * X
        copied[-1] = X[-1]
        V = copied @ copied.T / X.shape[1]
    elif shape in ("nearly low rank", "low rank"):
        rank = max(1, tokens - 1 - int(rng.integers(0, 2)))
        V = X[:, :rank] @ X[:, :rank].T / rank
        V += np.diag(np.full(tokens, 1e-4 if shape == "nearly low rank" else 0.0))
    else:
        V = X @ X.T / X.shape[1]
    if shape == "unequal norms":
        norms = np.exp(rng.uniform(0, np.log(10), tokens))
        norms[[0, -1]] = 1, 10
        V = V * np.outer(norms, norms) / 10
    size = float(np.exp(rng.uniform(np.log(0.3), np.log(4.0))))
    return size**2 * V / np.diag(V).max()


def hidden_states(family: Family, seed: int) -> Iterator[np.ndarray]:
    """Hidden states X after each layer, the initial ones first; shape (networks, tokens, width)."""
    rng = np.random.default_rng([37, seed])
    values, axes = np.linalg.eigh(family.V0)
    root = axes * np.sqrt(np.maximum(values, 0.0))
    directions = rng.normal(size=(family.networks, family.width, len(root)))
    orthonormal = np.linalg.qr(directions)[0].swapaxes(1, 2)
    X = math.sqrt(family.width) * root @ orthonormal
    yield X
    shortcut = math.sqrt(1 - family.gamma**2)
    for _ in range(family.depth):
        if family.attends:
            X = shortcut * X + family.gamma * _attention(family, X, rng)
        if family.architecture in ("transformer", "feedforward"):
            X = shortcut * X + family.gamma * _feedforward(family, X, rng)
        if family.architecture == "mlp":
            X = _linear(_shaped_relu(family, X), family.width, rng, explicit=family.explicit)
        yield X


def _linear(X: np.ndarray, outputs: int, rng: np.random.Generator, *, explicit: bool) -> np.ndarray:
    """X W/√k for the k features of X and W of iid standard normals."""
    networks, tokens, features = X.shape
    if explicit:
        return X @ rng.normal(size=(networks, features, outputs)) / math.sqrt(features)
    gram = X @ X.swapaxes(1, 2) / features
    finite = np.isfinite(gram).all(axis=(1, 2))[:, None, None]  # a network that has exploded
    values, axes = np.linalg.eigh(np.where(finite, gram, 0.0))
    root = np.where(finite, axes, np.nan) * np.sqrt(np.maximum(values, 0.0))[:, None]
    return root @ rng.normal(size=(networks, tokens, outputs))


def _shaped_relu(family: Family, x: np.ndarray) -> np.ndarray:
    plus, minus = (1 + c / math.sqrt(family.width) for c in (family.c_plus, family.c_minus))
    return math.sqrt(2 / (plus**2 + minus**2)) * np.where(x > 0, plus * x, minus * x)


def _feedforward(family: Family, X: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    hidden = _linear(X, family.expansion * family.width, rng, explicit=family.explicit)
    return _linear(_shaped_relu(family, hidden), family.width, rng, explicit=family.explicit)


def _attention(family: Family, X: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Heads side by side; the logits of each are divided by τ = τ0 √(n n_k), n_k = n/H."""
    key_width, mask = family.width // family.heads, family.mask
    centring = mask / mask.sum(axis=1, keepdims=True)
    # Queries, keys and values of all heads are columns of one product with independent weights.
    own = _linear(X, 3 * family.width, rng, explicit=family.explicit)
    queries, keys, values = np.split(own, 3, axis=-1)
    heads = []
    for head in range(family.heads):
        mine = slice(head * key_width, (head + 1) * key_width)
        logits = (
            queries[..., mine] @ keys[..., mine].swapaxes(1, 2) / (family.tau0 * math.sqrt(family.width * key_width))
        )
        logits = np.where(mask, logits - logits.max(axis=-1, keepdims=True), -np.inf)
        softmax = np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)
        heads.append((np.eye(len(mask)) + softmax - centring) @ values[..., mine])
    joined = np.concatenate(heads, axis=-1)
    return _linear(joined, family.width, rng, explicit=family.explicit) if family.output_projection else joined
