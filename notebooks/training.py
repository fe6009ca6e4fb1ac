"""Train shaped Transformers on characters over a grid of γ and τ0, and a Pre-LN Transformer of the same size.

All weights start from N(0, 1), with factors 1/√n in the forward pass; γ, τ0 and c± are not trained.
`tests/test_studies.py` compares the layers with `sdeinfer.ShapedTransformer`. `python notebooks/training.py` trains
every setting that `training.json` lacks, and writes the file after each. `4_training.ipynb` shows the results.
"""

import argparse
import dataclasses
import functools
import itertools
import json
import math
import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array, ArrayLike, Float, Int, PRNGKeyArray, Shaped

import sdeinfer as si

GAMMAS = (0.05, 0.1, 0.2, 0.35, 0.5, 0.7)
TAUS = (0.25, 0.5, 1.0, 2.0)
C_PLUS, C_MINUS = 0.0, -1.0
RATES = (0.003, 0.01, 0.03)
"""Learning rates of Adam; each setting is trained at the one that is best for its first seed."""

POINTS = 30
"""Largest number of points of a stored loss curve."""

RESULTS = Path(__file__).with_name("training.json")


@dataclasses.dataclass(frozen=True)
class Settings:
    """Sizes: `context` characters are the tokens, and the rate rises linearly over `warmup` steps."""

    depth: int = 32
    width: int = 48
    context: int = 32
    batch: int = 16
    steps: int = 300
    warmup: int = 40
    seeds: int = 3


def gaussian(rows: int, columns: int, *, rngs: nnx.Rngs) -> nnx.Param:
    """Weights N(0, 1)."""
    return nnx.Param(jr.normal(rngs.params(), (rows, columns)))


def causal(tokens: int) -> Float[Array, "m m"]:
    """Softmax of equal logits under a causal mask."""
    return jnp.tril(jnp.ones((tokens, tokens))) / jnp.arange(1, tokens + 1)[:, None]


class Attention(nnx.Module):
    """Weights of causal attention with one head, and its two residual branches."""

    def __init__(self, width: int, *, rngs: nnx.Rngs):
        self.W_Q, self.W_K, self.W_V = (gaussian(width, width, rngs=rngs) for _ in range(3))

    def softmax(self, X: Float[Array, "*batch m n"], tau: ArrayLike) -> Float[Array, "*batch m m"]:
        """Softmax(Y/τ) over the tokens that each token may see, Y = X W_Q W_Kᵀ Xᵀ/n."""
        width = X.shape[-1]
        Y = (X @ self.W_Q[...]) @ jnp.swapaxes(X @ self.W_K[...], -1, -2) / width
        return jax.nn.softmax(jnp.where(causal(X.shape[-2]) > 0, Y / tau, -jnp.inf))

    def values(self, X: Float[Array, "*batch m n"]) -> Float[Array, "*batch m n"]:
        """X W_V/√n."""
        return X @ self.W_V[...] / math.sqrt(X.shape[-1])

    def shaped(self, X: Float[Array, "*batch m n"], layer: si.ShapedTransformer) -> Float[Array, "*batch m n"]:
        """A X W_V/√n with A = I + softmax(Y/τ) − (1/m_α) and τ = τ0 n (Eq. 9)."""
        tokens, width = X.shape[-2:]
        A = jnp.eye(tokens) + self.softmax(X, layer.tau0 * width) - causal(tokens)
        return A @ self.values(X)

    def usual(self, X: Float[Array, "*batch m n"]) -> Float[Array, "*batch m n"]:
        """Softmax(Y/√n) X W_V/√n."""
        return self.softmax(X, math.sqrt(X.shape[-1])) @ self.values(X)


class FeedForward(nnx.Module):
    """Weights of a feed-forward layer with n hidden units, and its residual branch."""

    def __init__(self, width: int, *, rngs: nnx.Rngs):
        self.W_pre, self.W_post = (gaussian(width, width, rngs=rngs) for _ in range(2))

    def branch(
        self, X: Float[Array, "*batch m n"], c_plus: Float[Array, ""], c_minus: Float[Array, ""]
    ) -> Float[Array, "*batch m n"]:
        """σ_s(X W_pre/√n) √(c/n) W_post (Eq. 4)."""
        width = X.shape[-1]
        hidden = si.layers.shaped_relu(X @ self.W_pre[...] / math.sqrt(width), c_plus, c_minus, width)
        return hidden @ self.W_post[...] / math.sqrt(width)


class ShapedBlock(nnx.Module):
    """The layer of `sdeinfer.ShapedTransformer`: X′ = λX + γ branch(X), attention and then feed-forward (Eq. 11)."""

    def __init__(self, width: int, *, rngs: nnx.Rngs):
        self.attention, self.feedforward = Attention(width, rngs=rngs), FeedForward(width, rngs=rngs)

    def __call__(self, X: Float[Array, "*batch m n"], layer: si.ShapedTransformer) -> Float[Array, "*batch m n"]:
        shortcut = jnp.sqrt(1 - layer.gamma**2)
        X = shortcut * X + layer.gamma * self.attention.shaped(X, layer)
        return shortcut * X + layer.gamma * self.feedforward.branch(X, layer.c_plus, layer.c_minus)


class PreLNBlock(nnx.Module):
    """X′ = X + branch(LN(X)) with the usual temperature and a plain ReLU; LN has no gain and no bias."""

    def __init__(self, width: int, *, rngs: nnx.Rngs):
        self.attention, self.feedforward = Attention(width, rngs=rngs), FeedForward(width, rngs=rngs)

    def __call__(self, X: Float[Array, "*batch m n"], layer: si.ShapedTransformer | None) -> Float[Array, "*batch m n"]:
        X = X + self.attention.usual(jax.nn.standardize(X))
        slopes_1_and_0 = jnp.array([0.0, -math.sqrt(X.shape[-1])])
        return X + self.feedforward.branch(jax.nn.standardize(X), *slopes_1_and_0)


class Network(nnx.Module):
    """Embedding of characters and positions, `depth` blocks, LayerNorm and a linear readout.

    Embedded tokens have ‖x‖²/n of about 1. LayerNorm makes the first logits N(0, 1) at every setting.
    """

    def __init__(self, block: type[nnx.Module], settings: Settings, *, characters: int, rngs: nnx.Rngs):
        self.characters = gaussian(characters, settings.width, rngs=rngs)
        self.positions = gaussian(settings.context, settings.width, rngs=rngs)
        self.readout = gaussian(settings.width, characters, rngs=rngs)

        @nnx.split_rngs(splits=settings.depth)
        @nnx.vmap
        def stacked(rngs):
            return block(settings.width, rngs=rngs)

        self.blocks = stacked(rngs)

    def __call__(self, text: Int[Array, "batch m"], layer: si.ShapedTransformer | None) -> Float[Array, "batch m k"]:
        """Logits of the next character, from each character and those before it."""

        @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        def apply(block, X):
            return block(X, layer)

        X = apply(self.blocks, (self.characters[...][text] + self.positions[...]) / math.sqrt(2))
        return jax.nn.standardize(X) @ self.readout[...] / math.sqrt(X.shape[-1])


def text() -> tuple[Int[np.ndarray, " length"], str]:
    """Python's own help topics as numbers of characters, and the characters."""
    joined = "\n".join(topics[name] for name in sorted(topics))
    alphabet = "".join(sorted(set(joined)))
    number = {character: place for place, character in enumerate(alphabet)}
    return np.array([number[character] for character in joined], np.int32), alphabet


@functools.partial(jax.jit, static_argnames=("block", "settings", "characters"))
def train(
    layer: si.ShapedTransformer | None,
    rate: Float[ArrayLike, ""],
    text: Int[Array, " length"],
    *,
    block: type[nnx.Module],
    settings: Settings,
    characters: int,
    key: Shaped[PRNGKeyArray, ""],
) -> Float[Array, " steps"]:
    """Cross-entropy of each step's batch, in nats a character. γ, τ0 and the rate are data of one program."""
    key_network, key_batches = jr.split(key)
    graph, initial = nnx.split(Network(block, settings, characters=characters, rngs=nnx.Rngs(key_network)))

    def loss(parameters, windows):
        logits = nnx.merge(graph, parameters)(windows[:, :-1], layer)
        return optax.softmax_cross_entropy_with_integer_labels(logits, windows[:, 1:]).mean()

    return losses_of(loss, initial, rate, text, settings=settings, key=key_batches)


def losses_of(
    loss: Callable[[Any, Int[Array, "batch m"]], Float[Array, ""]],
    parameters: Any,
    rate: Float[ArrayLike, ""],
    text: Int[Array, " length"],
    *,
    settings: Any,
    key: Shaped[PRNGKeyArray, ""],
) -> Float[Array, " steps"]:
    """The loss of each step's batch, before the step: Adam with a linear warm-up, on windows drawn anew."""

    def schedule(count):
        return rate * jnp.minimum(1.0, (count + 1) / settings.warmup)

    optimiser = optax.adam(schedule)

    def step(carry, key):
        parameters, state = carry
        starts = jr.randint(key, (settings.batch, 1), 0, text.size - settings.context)
        windows = text[starts + jnp.arange(settings.context + 1)]
        value, gradient = jax.value_and_grad(loss)(parameters, windows)
        updates, state = optimiser.update(gradient, state, parameters)
        return (optax.apply_updates(parameters, updates), state), value

    return jax.lax.scan(step, (parameters, optimiser.init(parameters)), jr.split(key, settings.steps))[1]


def final_loss(losses: Float[ArrayLike, " steps"]) -> float:
    """Mean of the last fifth of the steps; infinite for a run that diverged."""
    mean = float(np.mean(losses[-max(1, len(losses) // 5) :]))
    return round(mean, 4) if math.isfinite(mean) else math.inf


def thinned(losses: Float[ArrayLike, " steps"]) -> list[float]:
    """Means of at most `POINTS` blocks of consecutive steps; infinite from where the run diverged."""
    means = [float(np.mean(block)) for block in np.array_split(losses, min(POINTS, len(losses)))]
    return [round(mean, 4) if math.isfinite(mean) else math.inf for mean in means]


def trained(layer: si.ShapedTransformer | None, settings: Settings, *, rates: Sequence[float]) -> dict[str, Any]:
    """Losses of one setting, or of Pre-LN if there is no layer, at the rate that is best for its first seed."""
    characters, alphabet = text()
    block = PreLNBlock if layer is None else ShapedBlock
    sizes = {"block": block, "settings": settings, "characters": len(alphabet)}
    started = time.monotonic()

    def run(seed, rate):
        return np.asarray(train(layer, rate, jnp.asarray(characters), **sizes, key=jr.key(seed)))

    first = {rate: run(0, rate) for rate in rates}
    best = min(rates, key=lambda rate: final_loss(first[rate]))
    losses = [first[best], *(run(seed, best) for seed in range(1, settings.seeds))]
    return {
        "rate": best,
        "loss_at_rates": [final_loss(first[rate]) for rate in rates],
        "loss": [final_loss(each) for each in losses],
        "curves": [thinned(each) for each in losses],
        "elapsed_s": round(time.monotonic() - started, 1),
    }


def study(
    path: Path,
    settings: Settings,
    *,
    gammas: Sequence[float] = GAMMAS,
    taus: Sequence[float] = TAUS,
    rates: Sequence[float] = RATES,
) -> dict[str, Any]:
    """Train what the file lacks, and write it after each setting; a diverged loss is `Infinity`."""
    characters, _ = text()
    made_by = {
        **dataclasses.asdict(settings),
        "c_plus": C_PLUS,
        "c_minus": C_MINUS,
        "rates": list(rates),
        "text": f"pydoc_data.topics, {len(characters)} characters, CRC-32 {zlib.crc32(characters.tobytes()):08x}",
    }
    results = json.loads(path.read_text("utf-8")) if path.exists() else {"settings": made_by, "runs": []}
    if results["settings"] != made_by:
        raise ValueError(f"path: {path} holds results of {results['settings']}, which are not {made_by}")
    for gamma, tau0 in [(None, None), *itertools.product(gammas, taus)]:
        if any((run["gamma"], run["tau0"]) == (gamma, tau0) for run in results["runs"]):
            continue
        layer = None if gamma is None else si.ShapedTransformer(gamma, tau0, C_PLUS, C_MINUS, pattern=si.CAUSAL)
        run = {"gamma": gamma, "tau0": tau0} | trained(layer, settings, rates=rates)
        results["runs"].append(run)
        write_whole(path, as_json(results))
        print({name: value for name, value in run.items() if name != "curves"}, flush=True)
    return results


def write_whole(path: Path, text: str) -> None:
    """Write a file under another name, and rename it, so that one that was stopped is not damaged."""
    written = path.with_name(path.name + ".part")
    written.write_text(text, "utf-8")
    written.replace(path)


def as_json(results: dict[str, Any]) -> str:
    """JSON with one line a setting, so that versions of the file can be compared."""
    runs = ",\n".join(json.dumps(run) for run in results["runs"])
    return f'{{"settings": {json.dumps(results["settings"], ensure_ascii=False)},\n"runs": [\n{runs}\n]}}\n'


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=RESULTS, help="results; settings that it has are not run again")
    study(parser.parse_args().out, Settings())
