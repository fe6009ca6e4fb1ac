"""Transformers of Hugging Face's library at initialisation: from a pass to pooled strengths and a verdict.

Versions 5.0 to 5.14 of transformers do not scale GPT-2's last matrices by 1/√(2L).
"""

import math

import jax.random as jr
import numpy as np
import pytest
from helpers.budget import assert_within
from helpers.internals import LOG_FACTORS
from helpers.torch_models import TORCH, bert, gpt2, llama, torch
from scipy import stats

import sdeinfer as si
from sdeinfer.blocks import MLP, Block, SelfAttention
from sdeinfer.diagnostics import Check

pytestmark = TORCH

SEEDS, LAYERS, HEAD_SIZE, TOKENS = 5, 12, 64, 4
IDS = [[3, 1, 4, 15], [9, 2, 6, 5], [35, 8, 97, 93]]
"""Prompts; no token is in two of them, since equal first tokens have equal states under a causal mask."""

MODELS = {
    "gpt2": lambda width, **options: gpt2(width, LAYERS, n_head=width // HEAD_SIZE, **options),
    "llama": lambda width, **options: llama(width, LAYERS, 8 * width // 3, num_attention_heads=8, **options),
    "bert": lambda width, **options: bert(width, LAYERS, num_attention_heads=width // HEAD_SIZE, **options),
}
BLOCKS = {
    "gpt2": {"norm": "layer", "activation": "gelu_tanh", "residual": math.sqrt(2 * LAYERS)},
    "llama": {"norm": "rms", "gated": True, "activation": "silu"},
    "bert": {"norm": "layer", "activation": "gelu", "position": "post"},
}
"""What a configuration does not say, or not in these words; `residual` divides the last matrices' weights."""

PROMPTS = {"gpt2": 3, "llama": 2, "bert": 1}


def declared(name: str, config) -> si.Stack:
    """The blocks that a configuration declares, with their strengths √u σ and gains n σ²."""
    width, sigma, heads, more = config.hidden_size, config.initializer_range, config.num_attention_heads, BLOCKS[name]
    units = getattr(config, "intermediate_size", 4 * width)
    rope = getattr(config, "rope_parameters", None)
    attention = SelfAttention(
        gain=width * sigma**2,
        heads=heads,
        key_value_heads=getattr(config, "num_key_value_heads", heads),
        pattern=si.Pattern(causal=name != "bert", prompts=(TOKENS,) * PROMPTS[name]),
        rope=rope["rope_theta"] if rope else None,
    )
    mlp = MLP(width * sigma**2, more["activation"], expansion=units / width, gated=more.get("gated", False))
    placed, last = {"norm": more["norm"], "position": more.get("position", "pre")}, sigma / more.get("residual", 1.0)
    strengths = math.sqrt(width) * last, math.sqrt(units) * last
    return si.Stack(tuple(Block(each, g, **placed) for each, g in zip((attention, mlp), strengths, strict=True)))


def fitted(name: str, draw, config, seed: int) -> tuple[Check, np.ndarray, np.ndarray]:
    """The check; mean and standard deviation of strengths over the declared ones; χ² and its degrees of freedom."""
    inputs = {"input_ids": torch.tensor(IDS[: PROMPTS[name]])}
    data = si.observe_branches(draw, inputs, seed=seed)
    post = si.fit(si.models.branches, data, architecture=declared(name, config), key=jr.key(seed))
    ratios, squares = [], []
    found, m = post["coefficients"].to_dataset(), data.sizes["token_a"]
    for kind in ("attention", "mlp"):
        strength = post["posterior"].to_dataset()[f"{kind}.strength"].values
        ratio = strength / post.attrs[f"declared_{kind}.strength"]
        ratios.append((ratio.mean(), ratio.std()))
        at = found["log_density"].values[:, found["part"].values == kind, len(LOG_FACTORS) // 2]
        log_factor = 2 * np.log(strength.mean())
        square = -2 * (at[..., 0] + at[..., 1] * log_factor + at[..., 2] * log_factor**2).sum()
        squares.append((square, at[..., 0].size * m * (m + 1) // 2 - 1))
    return si.check(post, data), np.array(ratios), np.array(squares)


@pytest.mark.parametrize(
    ("name", "width", "sigma"),
    [
        pytest.param("gpt2", 384, 0.02, id="gpt2", marks=pytest.mark.slow),
        pytest.param("bert", 384, 0.02, id="bert"),
        pytest.param("llama", 384, 0.02, id="llama", marks=pytest.mark.slow),
        pytest.param("llama", 256, 0.08, id="llama of large weights", marks=pytest.mark.slow),
    ],
)
def test_declared_strengths_are_recovered(name, width, sigma):
    """In the last case logits and activations are far from linear."""

    def draw(seed):
        return MODELS[name](width, initializer_range=sigma)

    config = draw(0).config
    checks, ratios, squares = zip(*(fitted(name, draw, config, seed) for seed in range(SEEDS)), strict=True)
    ratios, total = np.stack(ratios), np.sum(squares, axis=0)
    weights = ratios[..., 1] ** -2
    pooled, error = (weights * ratios[..., 0]).sum(0) / weights.sum(0), weights.sum(0) ** -0.5
    assert_within((ratios[..., 0] - 1) / ratios[..., 1], "strengths")
    assert_within((pooled - 1) / error, "pooled strengths")
    assert_within(stats.norm.isf(stats.chi2.sf(total[:, 0], total[:, 1])), "χ²")
    assert all(each.passed for each in checks), [each.verdict for each in checks]
