"""Transformers of Hugging Face's library at initialisation: from hooks to pooled strengths and a verdict.

Configurations have real proportions, and little vocabulary. Versions 5.0 to 5.14 of transformers do not scale GPT-2's
last matrices by 1/√(2L).
"""

import math

import jax.random as jr
import numpy as np
import pytest
from helpers.budget import assert_within
from helpers.internals import LOG_FACTORS
from helpers.torch_models import TORCH, hf, torch
from scipy import stats

import sdeinfer as si
from sdeinfer.blocks import MLP, Block, SelfAttention
from sdeinfer.diagnostics import Check

pytestmark = TORCH

SEEDS, LAYERS, HEAD_SIZE, TOKENS = 5, 12, 64, 4
IDS = [[3, 1, 4, 15], [9, 2, 6, 5], [35, 8, 97, 93]]
"""Prompts; no token is in two of them, since equal first tokens have equal states under a causal mask."""

OF_LLAMA = {"norm": "rms", "gated": True, "activation": "silu"}
BLOCKS = {
    "gpt2": {"norm": "layer", "activation": "gelu_tanh", "residual": math.sqrt(2 * LAYERS)},
    "llama": OF_LLAMA,
    "mistral": OF_LLAMA,
    "qwen2": OF_LLAMA,
    "gemma": OF_LLAMA | {"activation": "gelu_tanh"},
    "bert": {"norm": "layer", "activation": "gelu", "position": "post"},
    "vit": {"norm": "layer", "activation": "gelu"},
}
"""What a configuration does not say, or not in these words; `residual` divides the last matrices' weights."""

PROMPTS = {"gpt2": 3, "llama": 2}
"""Numbers of prompts, where not 1."""


def pattern_of(name: str) -> si.Pattern:
    return si.Pattern(causal=name not in ("bert", "vit"))


def configuration(name: str, width: int, sigma: float):
    heads = width // HEAD_SIZE
    if name == "gpt2":
        return hf.GPT2Config(vocab_size=99, n_embd=width, n_layer=LAYERS, n_head=heads, initializer_range=sigma)
    words = {"hidden_size": width, "num_hidden_layers": LAYERS, "initializer_range": sigma}
    if name in ("bert", "vit"):
        words |= {"num_attention_heads": heads, "intermediate_size": 4 * width}
        images = {"image_size": 8, "patch_size": 4}
        return hf.BertConfig(**words, vocab_size=99) if name == "bert" else hf.ViTConfig(**words, **images)
    # Llama 2 and Gemma have 8/3 n and 8 n units; Llama, Mistral and Qwen2 share keys among heads, Gemma's 2B all.
    words |= {"num_attention_heads": 8, "num_key_value_heads": 2, "intermediate_size": 8 * width // 3}
    if name == "gemma":
        words |= {"num_key_value_heads": 1, "head_dim": HEAD_SIZE, "intermediate_size": 8 * width}
    kind = {"llama": hf.LlamaConfig, "mistral": hf.MistralConfig, "qwen2": hf.Qwen2Config, "gemma": hf.GemmaConfig}
    return kind[name](**words, vocab_size=99, pad_token_id=None)


def declared(name: str, config) -> si.Stack:
    """The blocks that a configuration declares, with their strengths √u σ and gains n σ²."""
    width, sigma, heads, more = config.hidden_size, config.initializer_range, config.num_attention_heads, BLOCKS[name]
    units = getattr(config, "intermediate_size", 4 * width)
    head_size = getattr(config, "head_dim", None) or width // heads
    rope = getattr(config, "rope_parameters", None)
    attention = SelfAttention(
        gain=width * sigma**2,
        heads=heads,
        key_value_heads=getattr(config, "num_key_value_heads", heads),
        head_size=head_size,
        pattern=si.Pattern(causal=pattern_of(name).causal, prompts=(TOKENS,) * PROMPTS.get(name, 1)),
        rope=rope["rope_theta"] if rope else None,
    )
    mlp = MLP(width * sigma**2, more["activation"], expansion=units / width, gated=more.get("gated", False))
    placed, last = {"norm": more["norm"], "position": more.get("position", "pre")}, sigma / more.get("residual", 1.0)
    strengths = math.sqrt(heads * head_size) * last, math.sqrt(units) * last
    return si.Stack(tuple(Block(each, g, **placed) for each, g in zip((attention, mlp), strengths, strict=True)))


def branches_of(name: str):
    """A function from a model to its branches."""

    def modules(model):
        if name == "gpt2":
            return [((block.attn,), (block.mlp,)) for block in model.h]
        if name == "bert":
            layers = [
                (b.attention.self, b.attention.output.dense, b.intermediate.dense, b.output.dense)
                for b in model.encoder.layer
            ]
            return [(layer[:2], layer[2:]) for layer in layers]
        attention = "attention" if name == "vit" else "self_attn"
        return [((getattr(block, attention),), (block.mlp,)) for block in model.layers]

    return lambda model: [
        (kind, *ends) for both in modules(model) for kind, ends in zip(("attention", "mlp"), both, strict=True)
    ]


def observed(name: str, config, seed: int):
    """The Dataset of one network's branches."""
    inputs = {"input_ids": torch.tensor(IDS[: PROMPTS.get(name, 1)])}
    if name == "vit":
        inputs = {"pixel_values": torch.randn(1, 3, 8, 8, generator=torch.Generator().manual_seed(1))}
    kind = getattr(hf, {"vit": "ViT", "gpt2": "GPT2"}.get(name, name.capitalize()) + "Model")
    options = {"add_pooling_layer": False} if name in ("bert", "vit") else {}
    draw, pattern = (lambda seed: kind(config, **options)), pattern_of(name)
    return si.observe_branches.torch(draw, inputs, branches_of(name), pattern=pattern, seed=seed)


def fitted(name: str, config, seed: int) -> tuple[Check, np.ndarray, np.ndarray]:
    """The check; mean and standard deviation of strengths over the declared ones; χ² and its degrees of freedom."""
    data = observed(name, config, seed)
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
    [(name, 384, 0.02) for name in BLOCKS] + [("llama", 256, 0.08)],
    ids=[*BLOCKS, "llama of large weights"],
)
def test_declared_strengths_are_recovered(name, width, sigma):
    """In the last case logits and activations are far from linear."""
    config = configuration(name, width, sigma)
    checks, ratios, squares = zip(*(fitted(name, config, seed) for seed in range(SEEDS)), strict=True)
    ratios, total = np.stack(ratios), np.sum(squares, axis=0)
    weights = ratios[..., 1] ** -2
    pooled, error = (weights * ratios[..., 0]).sum(0) / weights.sum(0), weights.sum(0) ** -0.5
    for kind, ratio, its_error, (square, freedom) in zip(("attention", "mlp"), pooled, error, total, strict=True):
        print(
            f"\n{name}, n = {width}, σ = {sigma}, {kind}: {ratio:.4f} ± {its_error:.4f}, χ²/df {square / freedom:.3f}"
        )
    assert_within((ratios[..., 0] - 1) / ratios[..., 1], "strengths")
    assert_within((pooled - 1) / error, "pooled strengths")
    assert_within(stats.norm.isf(stats.chi2.sf(total[:, 0], total[:, 1])), "χ²")
    assert [each.verdict[:4] for each in checks] == ["good"] * SEEDS, [each.verdict for each in checks]
