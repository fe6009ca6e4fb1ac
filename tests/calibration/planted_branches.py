"""A Pre-LN Transformer written apart from the package, with what may be wrong with one, and the verdicts on it."""

from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax

import sdeinfer as si
from sdeinfer.blocks import MLP, Block, SelfAttention
from sdeinfer.observation import BranchObserver

WIDTH, HEADS, DEPTH, TOKENS, GAIN = 128, 4, 8, 4, 0.5
STEPS, RATE, BATCH = 100, 3e-3, 32


def weights(rng: np.random.Generator, *, uniform: bool = False) -> dict[str, np.ndarray]:
    """Weights of all layers: first projections of variance w/n, last ones scaled down by √(2L)."""
    n, sizes = WIDTH, {"q": 1, "k": 1, "v": 1, "o": 1, "up": 4, "down": 4}

    def draw(shape):
        return rng.uniform(-np.sqrt(3), np.sqrt(3), shape) if uniform else rng.standard_normal(shape)

    found = {}
    for name, times in sizes.items():
        shape = (DEPTH, times * n, n) if name == "down" else (DEPTH, n, times * n)
        sd = np.sqrt(GAIN / n) / (np.sqrt(2 * DEPTH) if name in ("o", "down") else 1)
        found[name] = sd * draw(shape)
    return found


def branches_of(p: dict, X: Any, name: str = "right", wrong_layer: int = 0) -> list[tuple[Any, Any]]:
    """What each branch reads and adds; the norm that may be left out is that of one layer's MLP."""
    found = []
    mask = jnp.tril(jnp.ones((TOKENS, TOKENS), bool))
    size = WIDTH // HEADS
    for layer in range(DEPTH):
        U = _norm(X)
        q, k, v = (jnp.stack(jnp.split(U @ p[name][layer], HEADS, axis=1)) for name in "qkv")
        logits = q @ jnp.swapaxes(k, -1, -2) / (1 if name == "no 1/√d_k" else np.sqrt(size))
        A = jax.nn.softmax(jnp.where(mask, logits, -jnp.inf), axis=-1)
        D = jnp.concatenate(list(A @ v), axis=1) @ p["o"][layer]
        found.append((U, D))
        X = X + D
        U = X if (name, wrong_layer) == ("a norm left out", layer) else _norm(X)
        D = jax.nn.gelu(U @ p["up"][layer], approximate=False) @ p["down"][layer]
        found.append((U, D))
        X = X + D
    return found


def _norm(X):
    X = X - X.mean(axis=1, keepdims=True)
    return X / jnp.sqrt(jnp.square(X).mean(axis=1, keepdims=True))


def trained(p: dict, rng: np.random.Generator) -> dict:
    """The weights after steps of Adam on random tokens and random targets."""
    X = jnp.asarray(rng.standard_normal((BATCH, TOKENS, WIDTH)))
    Y = jnp.asarray(rng.standard_normal((BATCH, TOKENS)))

    def loss(p):
        def one(X):
            return (X + sum(D for _, D in branches_of(p, X)))[:, 0]

        return jnp.mean(jnp.square(jax.vmap(one)(X) - Y))

    adam = optax.adam(RATE, b2=0.99)

    @jax.jit
    def step(p, state):
        change, state = adam.update(jax.grad(loss)(p), state)
        return optax.apply_updates(p, change), state

    state = adam.init(p)
    for _ in range(STEPS):
        p, state = step(p, state)
    return jax.tree.map(np.asarray, p)


def planted(name: str, rng: np.random.Generator) -> tuple[dict, int]:
    """Weights of a network with one thing wrong, or none, and the layer in which something may be."""
    p = weights(rng, uniform=name == "uniform weights")
    layer = int(rng.integers(DEPTH))
    match name:
        case "one layer × 1.5":
            p["o"][layer] *= 1.5
        case "no depth scaling":
            p["o"] *= np.sqrt(2 * DEPTH)
            p["down"] *= np.sqrt(2 * DEPTH)
        case "q and k scaled instead of o":
            p["o"] *= np.sqrt(2 * DEPTH)
            p["q"] /= np.sqrt(2 * DEPTH)
            p["k"] /= np.sqrt(2 * DEPTH)
        case "copied layers":
            p = {key: np.broadcast_to(W[:1], W.shape).copy() for key, W in p.items()}
        case "tied weights":
            p["down"] = np.swapaxes(p["up"], 1, 2) / np.sqrt(2 * DEPTH)
        case "100 steps of training":
            p = trained(p, rng)
    return p, layer


CAUSES = {
    "right": "",
    "uniform weights": "",
    "one layer × 1.5": "largest ratio of a layer's strength",
    "no depth scaling": "declared",
    "q and k scaled instead of o": "declared",
    "copied layers": "share of an increment in another branch's",
    "tied weights": "share of an increment in its input",
    "no 1/√d_k": "evidence for another block",
    "a norm left out": "mean squares after norms, less 1",
    "100 steps of training": "",
}
"""What `check` should name: a failed test, or a note on the declared strength."""


def layer_declared() -> si.Stack:
    """The architecture as it should be."""
    g = {"attention": np.sqrt(GAIN / (2 * DEPTH)), "mlp": np.sqrt(4 * GAIN / (2 * DEPTH))}
    attention = SelfAttention(gain=GAIN, heads=HEADS, pattern=si.CAUSAL)
    return si.Stack((Block(attention, g["attention"], "layer"), Block(MLP(GAIN), g["mlp"], "layer")))


def judged(name: str, seed: int) -> dict[str, Any]:
    """The verdict on one network, from one prompt."""
    rng = np.random.default_rng([*name.encode(), seed])
    p, layer = planted(name, rng)
    X = rng.standard_normal((TOKENS, WIDTH))
    observer = BranchObserver(pattern=si.CAUSAL)
    for number, (U, D) in enumerate(branches_of(p, jnp.asarray(X), name, layer)):
        observer.add(np.asarray(U), np.asarray(D), kind=("attention", "mlp")[number % 2])
    post = si.fit(si.models.branches, observer.dataset(), architecture=layer_declared(), key=jr.key(seed))
    check = si.check(post)
    failed = [each.name for each in check.verdicts if not each.passed and each.topic != "identified"]
    declared = [note for note in check.notes if "times the declared" in note]
    return {"name": name, "seed": seed, "cause": failed[0] if failed else "", "failed": failed, "declared": declared}
