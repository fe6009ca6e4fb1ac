"""Pretrain the Transformer encoders of Appendix D at a size that one core trains: Tab. 1, Tab. 2 and Fig. 6.

The models predict masked characters of Python's help topics, and some are fine-tuned on three tasks; `encoders.py` has
the networks and the sizes. `python notebooks/pretraining.py` trains every model that `pretraining.json` lacks, and
writes the file after each. `4_training.ipynb` shows the results.
"""

import argparse
import dataclasses
import functools
import itertools
import json
import math
import time
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
from encoders import BLOCKS, Network, Settings
from flax import nnx
from help_topics import TASKS, texts
from jaxtyping import Array, ArrayLike, Float, Int, PRNGKeyArray, Shaped
from training import as_json, thinned

RESULTS = Path(__file__).with_name("pretraining.json")

OBSERVED = (1, 7)
"""Numbers of the layers whose entropy is stored (Fig. 6)."""


class Model(NamedTuple):
    """One row of Tab. 1: "Baseline", "Recover" or "Learn", the number of blocks, and γ (1 for the baseline)."""

    variant: str
    depth: int
    gamma: float


DEPTHS, GAMMAS = (18, 24), (0.05, 0.1, 0.2)
MODELS = tuple(
    Model(variant, depth, gamma)
    for depth in DEPTHS
    for gamma, variant in [(1.0, "Baseline"), *itertools.product(GAMMAS, ("Recover", "Learn"))]
)
FIGURE = (Model("Baseline", 18, 1.0), Model("Recover", 18, 0.2))
"""Models of Fig. 6, of which every seed is trained at every rate."""

FINE_TUNED = tuple(
    Model(variant, depth, gamma)
    for depth, shaped in ((18, 0.2), (24, 0.05))
    for variant, gamma in (("Baseline", 1.0), ("Learn", shaped), ("Recover", shaped))
)
"""Models of Tab. 2."""


def masks(key: Shaped[PRNGKeyArray, ""], shape: tuple[int, ...], settings: Settings) -> Shaped[Array, "..."]:
    """True where a character is masked."""
    return jr.bernoulli(key, settings.masked, shape)


def masked_loss(
    network: Network, windows: Int[Array, "batch m"], masked: Shaped[Array, "batch m"], remaining: ArrayLike
) -> tuple[Float[Array, ""], Float[Array, " depth"]]:
    """Mean cross-entropy of the masked characters in nats, and each block's entropy."""
    mask = network.characters.shape[0] - 1
    logits, entropies = network(jnp.where(masked, mask, windows), remaining)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, windows)
    return jnp.sum(losses * masked) / jnp.maximum(1, masked.sum()), entropies


class Pretrained(NamedTuple):
    """Results of one network: its parameters, each step's entropies, and the losses after the last step."""

    parameters: Any
    entropies: Float[Array, "steps depth"]
    train: Float[Array, ""]
    test: Float[Array, ""]


@functools.partial(jax.jit, static_argnames=("block", "depth", "settings", "characters"))
def pretrain(
    gamma: Float[ArrayLike, ""],
    rate: Float[ArrayLike, ""],
    text: Int[Array, " length"],
    test: Int[Array, " test_length"],
    *,
    block: type[nnx.Module],
    depth: int,
    settings: Settings,
    characters: int,
    key: Shaped[PRNGKeyArray, ""],
) -> Pretrained:
    """Train a network on masked characters by Adam with a linear warm-up, and evaluate it on windows of both texts.

    One key draws the same batches and masks for every model. γ and the rate are data of one program.
    """
    optimiser = optax.adam(lambda count: rate * jnp.minimum(1.0, (count + 1) / settings.warmup))
    key_network, key_batches = jr.split(key)
    network = Network(block, depth, gamma, settings, characters=characters, rngs=nnx.Rngs(key_network))
    graph, initial = nnx.split(network)

    def loss(parameters, windows, masked, remaining):
        return masked_loss(nnx.merge(graph, parameters), windows, masked, remaining)

    def step(carry, inputs):
        (parameters, state, _), (count, key) = carry, inputs
        key_starts, key_masks = jr.split(key)
        starts = jr.randint(key_starts, (settings.batch, 1), 0, text.size - settings.context + 1)
        windows = text[starts + jnp.arange(settings.context)]
        remaining = jnp.maximum(0.0, 1 - count / settings.warmup)
        masked = masks(key_masks, windows.shape, settings)
        (value, entropies), gradient = jax.value_and_grad(loss, has_aux=True)(parameters, windows, masked, remaining)
        updates, state = optimiser.update(gradient, state, parameters)
        return (optax.apply_updates(parameters, updates), state, value), entropies

    def diverged(carry, _):
        return carry, jnp.full(depth, jnp.nan)

    def step_unless_diverged(carry, inputs):
        return jax.lax.cond(jnp.isfinite(carry[2]), step, diverged, carry, inputs)

    steps = (jnp.arange(settings.steps), jr.split(key_batches, settings.steps))
    start = (initial, optimiser.init(initial), 0.0)
    (parameters, *_), entropies = jax.lax.scan(step_unless_diverged, start, steps)

    batches = test.size // (settings.batch * settings.context)
    shape = (batches, settings.batch, settings.context)

    def evaluated(text):
        windows = text[: math.prod(shape)].reshape(shape)
        masked = masks(jr.key(0), shape, settings)
        losses = jax.lax.scan(lambda kept, each: (kept, loss(kept, *each, 0.0)[0]), parameters, (windows, masked))[1]
        return losses.mean()

    stride = text.size // (batches * settings.batch)  # windows of all parts of the text to train on
    spread = text[jnp.arange(batches * settings.batch)[:, None] * stride + jnp.arange(settings.context)].ravel()
    return Pretrained(parameters, entropies, evaluated(spread), evaluated(test))


@functools.partial(jax.jit, static_argnames=("block", "depth", "settings"))
def fine_tune(
    parameters: Any,
    examples: Int[Array, "count m"],
    labels: Int[Array, " count"],
    test: Int[Array, "count m"],
    *,
    block: type[nnx.Module],
    depth: int,
    settings: Settings,
    key: Shaped[PRNGKeyArray, ""],
) -> Int[Array, " count"]:
    """Fine-tune all parameters of a pretrained network, with Adam of constant rate, and classify the test examples."""
    characters = parameters["readout"][...].shape[-1]
    abstract = nnx.eval_shape(lambda: Network(block, depth, 1.0, settings, characters=characters, rngs=nnx.Rngs(0)))
    graph, _ = nnx.split(abstract)
    optimiser = optax.adam(settings.fine_rate)

    def loss(parameters, chosen):
        logits = nnx.merge(graph, parameters).classify(examples[chosen])
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels[chosen]).mean()

    def step(carry, chosen):
        parameters, state = carry
        updates, state = optimiser.update(jax.grad(loss)(parameters, chosen), state, parameters)
        return (optax.apply_updates(parameters, updates), state), None

    orders = jax.vmap(lambda key: jr.permutation(key, len(examples)))(jr.split(key, settings.epochs))
    carry = (parameters, optimiser.init(parameters))
    (parameters, _), _ = jax.lax.scan(step, carry, orders.reshape(-1, settings.batch))
    batches = test.reshape(-1, settings.batch, test.shape[-1])

    def classified(parameters, batch):
        return parameters, nnx.merge(graph, parameters).classify(batch).argmax(-1)

    return jax.lax.scan(classified, parameters, batches)[1].ravel()


def score(task: str, predicted: Int[np.ndarray, " count"], labels: Int[np.ndarray, " count"]) -> float:
    """Matthews correlation for corruption, as for CoLA (0 if only one class is predicted); else accuracy."""
    if task != "corruption":
        return float(np.mean(predicted == labels))
    return 0.0 if np.ptp(predicted) == 0 else float(np.corrcoef(predicted, labels)[0, 1])


def fine_tuned(parameters: Any, model: Model, settings: Settings, *, seed: int) -> dict[str, float]:
    """Score of one pretrained network at each task, on examples of held-out topics; one seed draws the same ones."""
    sizes = {"block": BLOCKS[model.variant], "depth": model.depth, "settings": settings}
    scores = {}
    for task, examples in TASKS.items():
        rng = np.random.default_rng(seed)
        labels = [rng.integers(0, 2, settings.examples) for _ in range(2)]
        train, test = (examples(text, settings.context, y, rng) for text, y in zip(texts()[:2], labels, strict=True))
        predicted = fine_tune(parameters, train, labels[0], test, **sizes, key=jr.key(seed))
        scores[task] = round(score(task, np.asarray(predicted), labels[1]), 4)
    return scores


def trained(model: Model, settings: Settings) -> dict[str, Any]:
    """Results of one model: of its first seed at every rate, and of all seeds at the rate with its smallest loss."""
    train, test, alphabet = texts()
    sizes = {"block": BLOCKS[model.variant], "depth": model.depth, "settings": settings, "characters": len(alphabet)}
    started = time.monotonic()

    @functools.cache
    def run(seed, rate):
        return pretrain(
            jnp.asarray(model.gamma),
            rate,
            jnp.asarray(train.characters),
            jnp.asarray(test.characters),
            **sizes,
            key=jr.key(seed),
        )

    def loss(seed, rate):
        value = float(run(seed, rate).train)
        return value if math.isfinite(value) else math.inf

    best = min(settings.rates, key=lambda rate: loss(0, rate))
    seeds = range(settings.seeds)
    pairs = [(seed, rate) for rate in settings.rates for seed in seeds if seed == 0 or rate == best]
    if model in FIGURE:
        pairs = [(seed, rate) for rate in (*settings.rates, settings.large_rate) for seed in seeds]
    networks = [
        {
            "seed": seed,
            "rate": rate,
            **{name: thinned(np.array([getattr(run(seed, rate), name)]))[0] for name in ("train", "test")},
            "entropy": [thinned(run(seed, rate).entropies[:, layer - 1]) for layer in OBSERVED if layer <= model.depth],
        }
        for seed, rate in pairs
    ]
    scores = None
    if model in FINE_TUNED:
        scores = [fine_tuned(run(seed, best).parameters, model, settings, seed=seed) for seed in seeds]
    elapsed = round(time.monotonic() - started, 1)
    return {**model._asdict(), "rate": best, "fine_tuned": scores, "networks": networks, "elapsed_s": elapsed}


def study(path: Path, settings: Settings, *, models: tuple[Model, ...] = MODELS) -> dict[str, Any]:
    """Train what the file lacks, and write it after each model; a diverged loss is `Infinity`."""
    joined = np.concatenate([part.characters for part in texts()[:2]])
    made_by = {
        **dataclasses.asdict(settings),
        "rates": list(settings.rates),
        "text": f"pydoc_data.topics, {len(joined)} characters, CRC-32 {zlib.crc32(joined.tobytes()):08x}",
    }
    results = json.loads(path.read_text("utf-8")) if path.exists() else {"settings": made_by, "runs": []}
    if results["settings"] != made_by:
        raise ValueError(f"path: {path} holds results of {results['settings']}, which are not {made_by}")
    for model in models:
        if any((run["variant"], run["depth"], run["gamma"]) == model for run in results["runs"]):
            continue
        results["runs"].append(trained(model, settings))
        written = path.with_name(path.name + ".part")
        written.write_text(as_json(results), "utf-8")
        written.replace(path)
        print(summary(results["runs"][-1]), flush=True)
    return results


def summary(run: dict[str, Any]) -> dict[str, Any]:
    """A run without its curves."""
    names = ("seed", "rate", "train", "test")
    networks = [tuple(network[name] for name in names) for network in run["networks"]]
    return {**run, "networks": networks}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=RESULTS, help="results; models that it has are not run again")
    study(parser.parse_args().out, Settings())
