"""Random networks of residual blocks, the ranks of their parameters in the posteriors, and the verdicts.

A posterior factorises over blocks, and the log density of increments is a polynomial of degree 2 in log g² at every
gain or temperature, so that it is summed over a grid of both instead of sampled.
"""

from typing import Any

import jax
import jax.random as jr
import numpy as np
from helpers.internals import LOG_FACTORS, BlockOrder, adjusted_coefficients, branch_coefficients, interpolated
from scipy import stats

import sdeinfer as si
from sdeinfer.blocks import MLP, Block, Experts, LatentAttention, SelfAttention

FINE = 1001
"""Points of the grid of log factors."""

VERDICTS = 4
"""One of so many sets is also fitted and checked, most of whose time is compilation."""

SHAPE_SD = 1.0
"""Standard deviation of the log of gains and temperatures, in the networks and in the prior."""


def drawn_layer(rng: np.random.Generator) -> tuple[si.Stack, dict[str, int]]:
    """One layer of a Transformer with random norms, branches, strengths, gains and temperature, and its sizes."""
    heads = int(rng.choice([2, 4, 8]))
    width, tokens = int(rng.choice([64, 128, 192])), int(rng.choice([2, 3, 4, 5]))
    norm = str(rng.choice(["layer", "rms"]))
    position = str(rng.choice(["pre", "pre", "post"]))
    pattern = si.CAUSAL if rng.random() < 0.6 else si.Pattern()
    attention = SelfAttention(
        temperature=np.exp(SHAPE_SD * rng.standard_normal()),
        gain=float(rng.choice([0.3, 1.0, 3.0])),
        heads=heads,
        key_value_heads=int(rng.choice([heads, max(2, heads // 2)])),
        pattern=pattern,
        rope=float(rng.choice([1e4])) if rng.random() < 0.4 else None,
    )
    mlp = MLP(
        gain=np.exp(SHAPE_SD * rng.standard_normal()),
        activation=str(rng.choice(["gelu", "silu", "relu", "tanh"])),
        expansion=float(rng.choice([2.0, 4.0])),
        gated=bool(rng.random() < 0.4),
    )
    strengths = np.exp(rng.uniform(np.log(0.05), np.log(0.7), 2))
    blocks = [Block(each, g, norm, position) for each, g in zip((attention, mlp), strengths, strict=True)]
    return si.Stack(blocks), {"width": width, "tokens": tokens, "depth": int(rng.integers(4, 49))}


def drawn_layer_of_today(rng: np.random.Generator) -> tuple[si.Stack, dict[str, int]]:
    """One layer with norms of queries and keys, caps, sinks or latent attention, and a mixture of experts."""
    width, tokens = int(rng.choice([64, 96, 128])), int(rng.choice([2, 3, 4]))
    temperature, gain = np.exp(SHAPE_SD * rng.standard_normal(2))
    heads = {"heads": 4, "key_value_heads": 2, "gain": 0.5, "rope": 1e4}
    kinds = {
        "norms of each head": {"qk_norm": "head", "rope_size": width // 8},
        "norms of all heads": {"qk_norm": "all"},
        "cap and sink": {"cap": 2.0, "sink": 0.0},
    }
    kind = str(rng.choice([*kinds, "latent attention"]))
    if kind == "latent attention":
        sizes = {"heads": 4, "head_size": 16, "rotated_size": 8, "key_rank": 24, "query_rank": 32}
        attention = LatentAttention(temperature, pattern=si.CAUSAL, **sizes)
    else:
        attention = SelfAttention(temperature, pattern=si.CAUSAL, **heads, **kinds[kind])
    chosen = {"chosen": int(rng.choice([1, 2])), "scores": str(rng.choice(["chosen", "all", "sigmoid"]))}
    experts = Experts(gain, experts=4, router=1.0, expansion=1.0, shared=float(rng.choice([0.0, 1.0])), **chosen)
    strengths = np.exp(rng.uniform(np.log(0.05), np.log(0.7), 2))
    blocks = [Block(branch, g, "rms") for branch, g in zip((attention, experts), strengths, strict=True)]
    return si.Stack(blocks), {"width": width, "tokens": tokens, "depth": int(rng.integers(4, 13))}


def ranks_of(seed: int) -> dict[str, Any]:
    """Ranks of the truth with gains and temperatures known and unknown, and the verdict with known ones.

    The key "unadjusted" has the ranks by the law alone, without `adjusted_coefficients`.
    """
    return _ranks_of(*drawn_layer(rng := np.random.default_rng([38, seed])), rng, seed, every=VERDICTS)


def ranks_of_today(seed: int) -> dict[str, Any]:
    """The same of blocks of today, of which every tenth is checked."""
    return _ranks_of(*drawn_layer_of_today(rng := np.random.default_rng([76, seed])), rng, seed, every=10)


def _ranks_of(
    layer: si.Stack, sizes: dict[str, int], rng: np.random.Generator, seed: int, *, every: int
) -> dict[str, Any]:
    tokens = sizes.pop("tokens")
    V0 = si.equicorrelated(tokens=tokens, correlation=rng.uniform(0.0, 0.6), norm=1.0)
    try:
        data = si.sample_branches(layer, V0, **sizes, key=jr.key(seed))
    except si.InputError as error:  # tokens of deep Post-LN networks become parallel
        return {"seed": seed, "refused": str(error)}
    order = BlockOrder.of_data(layer, data)
    table = branch_coefficients(data, order)
    both = {"ranks": adjusted_coefficients(table, data, order), "unadjusted": table}
    found: dict[str, Any] = {"seed": seed, **sizes, "tokens": tokens, **{name: {} for name in both}}
    for part, (name, block) in enumerate(order.named()):
        own = np.flatnonzero(np.asarray(order.part) == part)
        shape = float(getattr(block.branch, block.branch.shape.name))
        for kind, coefficients in both.items():
            of_block = ranks(coefficients[:, own].sum((0, 1)), float(block.strength), shape)
            found[kind] |= {f"{name}.{key}": rank for key, rank in of_block.items()}
    if seed % every:
        return found
    post = si.fit(si.models.branches, data, architecture=layer, chains=2, draws=500, warmup=500, key=jr.key(seed))
    check = si.check(post)
    jax.clear_caches()
    return found | {"trusted": check.passed, "verdict": check.verdict, "layer": repr(layer)[:600]}


def ranks(coefficients: np.ndarray, strength: float, shape: float) -> dict[str, float]:
    """Posterior probabilities below the truth, of a block whose own shape is the true one.

    Strengths have a flat prior in the logarithm, gains and temperatures a log-normal one about 1.
    """
    fine = np.linspace(LOG_FACTORS[0], LOG_FACTORS[-1], FINE)
    at = np.asarray(jax.vmap(lambda x: interpolated(coefficients, x))(fine))
    mean, sd = -at[:, 1] / at[:, 2] / 2, np.sqrt(-1 / (2 * at[:, 2]))
    log_weight = at[:, 0] - at[:, 1] ** 2 / (4 * at[:, 2]) + at[:, 3] + np.log(sd)
    log_weight += stats.norm.logpdf(fine + np.log(shape), 0.0, SHAPE_SD)
    weight = np.exp(log_weight - log_weight.max())
    weight /= weight.sum()
    below = stats.norm.cdf((2 * np.log(strength) - mean) / sd)
    one = FINE // 2
    return {
        "strength, shape known": float(below[one]),
        "strength": float(weight @ below),
        "shape": float(weight[:one].sum() + weight[one] / 2),
    }
