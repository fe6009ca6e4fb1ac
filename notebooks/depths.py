"""Train Pre-LN Transformers of three depths from three initialisations: a rule of thumb, `si.tune` and CompleteP.

All have GELU, LayerNorm without gains, a causal mask and no biases, and differ in the strength of their branches; that
of `si.tune` keeps the squared norms of all tokens within a factor of two in 95 of 100 networks. `python
notebooks/depths.py` trains every setting that `depths.json` lacks. `4_training.ipynb` shows the results.
"""

import argparse
import dataclasses
import functools
import json
import math
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array, Float, Int, PRNGKeyArray
from training import final_loss, losses_of, text, write_whole

import sdeinfer as si

RESULTS = Path(__file__).with_name("depths.json")
SCHEMES = ("rule of thumb", "tuned", "CompleteP")


@dataclasses.dataclass(frozen=True)
class Settings:
    """Sizes: strengths are tuned by `paths` networks for the first `tokens` characters."""

    depths: tuple[int, ...] = (4, 12, 36)
    width: int = 48
    heads: int = 4
    context: int = 32
    batch: int = 16
    steps: int = 200
    warmup: int = 30
    rates: tuple[float, ...] = (0.0005, 0.001, 0.002, 0.004, 0.008)
    seeds: int = 3
    tokens: int = 8
    paths: int = 2048


class Attention(nnx.Module):
    """Causal self-attention."""

    def __init__(self, width: int, heads: int, *, rngs: nnx.Rngs):
        names, self.heads = ("q_proj", "k_proj", "v_proj", "o_proj"), heads
        for name in names:
            setattr(self, name, nnx.Linear(width, width, use_bias=False, rngs=rngs))

    def __call__(self, X: Float[Array, "*batch m n"]) -> Float[Array, "*batch m n"]:
        q, k, v = (f(X).reshape(*X.shape[:-1], self.heads, -1) for f in (self.q_proj, self.k_proj, self.v_proj))
        return self.o_proj(jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(X.shape))


class MLP(nnx.Module):
    """GELU between two matrices, with 4n hidden units."""

    def __init__(self, width: int, *, rngs: nnx.Rngs):
        self.up = nnx.Linear(width, 4 * width, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, use_bias=False, rngs=rngs)

    def __call__(self, X: Float[Array, "*batch m n"]) -> Float[Array, "*batch m n"]:
        return self.down(jax.nn.gelu(self.up(X), approximate=False))


class Layer(nnx.Module):
    """X + c branch(LN(X)) for attention, then for the MLP; c is the multiplier of CompleteP, or 1."""

    def __init__(self, settings: Settings, *, rngs: nnx.Rngs):
        self.attn = Attention(settings.width, settings.heads, rngs=rngs)
        self.mlp = MLP(settings.width, rngs=rngs)

    def __call__(self, X: Float[Array, "*batch m n"], multiplier: Any = 1.0) -> Float[Array, "*batch m n"]:
        X = X + multiplier * self.attn(jax.nn.standardize(X))
        return X + multiplier * self.mlp(jax.nn.standardize(X))


class Stream(nnx.Module):
    """The layers alone, from embedded tokens to the residual stream."""

    def __init__(self, settings: Settings, depth: int, *, rngs: nnx.Rngs):
        self.layers = nnx.List([Layer(settings, rngs=rngs) for _ in range(depth)])

    def __call__(self, X: Float[Array, "*batch m n"], multiplier: float = 1.0) -> Float[Array, "*batch m n"]:
        for layer in self.layers:
            X = layer(X, multiplier)
        return X


def blocks(settings: Settings, strength: float = 1.0) -> si.Stack:
    """The blocks of one layer, with first matrices of variance 1/n."""
    attention = si.blocks.SelfAttention(heads=settings.heads, pattern=si.CAUSAL)
    mlp = si.blocks.MLP(activation="gelu")
    return si.Stack(tuple(si.blocks.Block(each, strength=strength, norm="layer") for each in (attention, mlp)))


def prompt(settings: Settings) -> Float[np.ndarray, "m m"]:
    """Covariance of the first characters of the text as they are embedded: half of a token is its position's."""
    window, _ = text()
    first = window[: settings.tokens]
    return (np.eye(settings.tokens) + (first[:, None] == first)) / 2


def tuned(settings: Settings, depth: int) -> si.Tuned:
    """The largest strength that keeps squared norms within a factor of two."""
    return si.tune(
        blocks(settings),
        prompt(settings),
        width=settings.width,
        depth=depth,
        maximise="strength",
        subject_to=si.criteria.probability(si.criteria.NormFactor(), below=2) >= 0.95,
        fixed={"gain": 1.0, "temperature": 1.0},
        paths=settings.paths,
        key=jr.key(depth),
    )


def initialised(scheme: str, settings: Settings, depth: int, answer: si.Tuned, seed: int) -> tuple[Stream, float]:
    """Layers with weights of a scheme, and the multiplier of their branches."""
    model = Stream(settings, depth, rngs=nnx.Rngs(seed))
    inputs = jr.normal(jr.key(0), (1, settings.tokens, settings.width))
    if scheme == "tuned":
        return answer.initialise(model, inputs, seed=seed, audited=False).model, 1.0
    of_rule = 1 / math.sqrt(2 * (depth if scheme == "rule of thumb" else min(settings.depths)))
    recipe = si.tuning.recipe_for(blocks(settings, of_rule), name=scheme)
    found = si.audit.initialise(model, recipe, inputs, seed=seed, audited=False)
    return found.model, 1.0 if scheme == "rule of thumb" else min(settings.depths) / depth


@functools.partial(jax.jit, static_argnames=("settings", "graph", "characters"))
def train(
    layers: Any,
    multiplier: Float[Array, ""],
    rate: Float[Array, ""],
    text: Int[Array, " length"],
    *,
    graph: Any,
    settings: Settings,
    characters: int,
    key: PRNGKeyArray,
) -> Float[Array, " steps"]:
    """Cross-entropy of each step's batch; one key draws the same embeddings and batches for every scheme."""
    keys = jr.split(key, 4)
    shapes = ((characters, settings.width), (settings.context, settings.width), (settings.width, characters))
    scales = (1 / math.sqrt(2), 1 / math.sqrt(2), 1 / math.sqrt(settings.width))
    ends = [scale * jr.normal(own, shape) for own, shape, scale in zip(keys[:3], shapes, scales, strict=True)]

    def loss(parameters, windows):
        (of_characters, positions, readout), layers = parameters
        X = of_characters[windows[:, :-1]] + positions
        X, _ = jax.lax.scan(lambda X, layer: (nnx.merge(graph, layer)(X, multiplier), None), X, layers)
        logits = jax.nn.standardize(X) @ readout
        return optax.softmax_cross_entropy_with_integer_labels(logits, windows[:, 1:]).mean()

    return losses_of(loss, (ends, layers), rate, text, settings=settings, key=keys[3])


def trained(scheme: str, settings: Settings, depth: int, answer: si.Tuned) -> dict[str, Any]:
    """Losses of a scheme at a depth, at every rate and seed, and the growth of squared norms before training."""
    characters, alphabet = text()
    losses = np.empty((len(settings.rates), settings.seeds, settings.steps))
    V0, growth = prompt(settings), []
    started = time.monotonic()
    for seed in range(settings.seeds):
        model, multiplier = initialised(scheme, settings, depth, answer, seed)
        L = np.linalg.cholesky(V0 + 1e-9 * np.eye(len(V0)))
        X = L @ np.asarray(jr.normal(jr.key(seed), (len(V0), settings.width)))
        last = model(jnp.asarray(X), multiplier)
        growth.append(float((jnp.square(last).sum(1) / np.square(X).sum(1)).max()))
        graph, _ = nnx.split(model.layers[0])
        layers = jax.tree.map(lambda *each: jnp.stack(each), *(nnx.split(layer)[1] for layer in model.layers))
        for number, rate in enumerate(settings.rates):
            losses[number, seed] = train(
                layers,
                multiplier,
                rate,
                jnp.asarray(characters),
                graph=graph,
                settings=settings,
                characters=len(alphabet),
                key=jr.key(seed),
            )
    return {
        "growth": growth,
        "loss": [[final_loss(each) for each in of_rate] for of_rate in losses],
        "elapsed_s": round(time.monotonic() - started, 1),
    }


def study(path: Path, settings: Settings) -> dict[str, Any]:
    """Train what the file lacks, and write it after each setting."""
    made_by = json.loads(json.dumps(dataclasses.asdict(settings)))
    results = json.loads(path.read_text("utf-8")) if path.exists() else {"settings": made_by, "tuned": {}, "runs": []}
    if results["settings"] != made_by:
        raise ValueError(f"path: {path} holds results of {results['settings']}, which are not {made_by}")
    for depth in settings.depths:
        missing = [s for s in SCHEMES if not any((r["scheme"], r["depth"]) == (s, depth) for r in results["runs"])]
        if not missing:
            continue
        answer = tuned(settings, depth)
        row = answer.parameters.loc["strength"]
        results["tuned"][str(depth)] = {"strength": float(row["value"]), "error": float(row["error"])}
        for scheme in missing:
            results["runs"].append({"scheme": scheme, "depth": depth} | trained(scheme, settings, depth, answer))
            write_whole(path, as_json(results))
            print(results["runs"][-1], flush=True)
    return results


def as_json(results: dict[str, Any]) -> str:
    """JSON with one line a setting."""
    runs = ",\n".join(json.dumps(run) for run in results["runs"])
    first = {name: results[name] for name in ("settings", "tuned")}
    return f'{json.dumps(first)[:-1]},\n"runs": [\n{runs}\n]}}\n'


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=RESULTS, help="results; settings that it has are not run again")
    study(parser.parse_args().out, Settings())
