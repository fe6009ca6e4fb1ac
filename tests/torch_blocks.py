"""Transformers of Hugging Face's library at initialisation: what they declare, and their observed branches.

    python torch_blocks.py FOLDER --seeds 5

writes NAME-SEED.nc, the branches of one network, and NAME.json, the sizes in its configuration. The interpreter needs
torch, transformers and this package; nothing is downloaded. `stack_of` needs this package alone.
"""

import argparse
import json
import math
from pathlib import Path

import sdeinfer as si
from sdeinfer import observe_branches

LAYERS, HEAD_SIZE, TOKENS = 12, 64, 4
IDS = [[3, 1, 4, 15], [9, 2, 6, 5], [35, 8, 97, 93]]
"""Prompts; no token is in two of them, since equal first tokens have equal states under a causal mask."""

LLAMA = {"norm": "rms", "gated": True, "activation": "silu"}
MODELS = {
    "gpt2": {"norm": "layer", "activation": "gelu_tanh", "residual": math.sqrt(2 * LAYERS)},
    "llama": LLAMA,
    "mistral": LLAMA,
    "qwen2": LLAMA,
    "gemma": LLAMA | {"activation": "gelu_tanh"},
    "bert": {"norm": "layer", "activation": "gelu", "position": "post"},
    "vit": {"norm": "layer", "activation": "gelu"},
}
"""What a configuration does not say, or not in these words; `residual` divides the last matrices' weights."""

PROMPTS = {"gpt2": 3, "llama": 2}
"""Numbers of prompts, where not 1."""

CAUSAL = ("gpt2", "llama", "mistral", "qwen2", "gemma")


def stack_of(sizes: dict) -> "si.Stack":
    """The blocks that a configuration declares, with their strengths √u σ and gains n σ²."""
    width, sigma, units = sizes["width"], sizes["sigma"], sizes["units"]
    features, gain, last = sizes["heads"] * sizes["head_size"], width * sigma**2, sigma / sizes.get("residual", 1.0)
    attention = si.blocks.SelfAttention(
        gain=gain,
        heads=sizes["heads"],
        key_value_heads=sizes["key_value_heads"],
        head_size=sizes["head_size"],
        pattern=si.Pattern(causal=sizes["causal"], prompts=(TOKENS,) * sizes["prompts"]),
        rope=sizes["rope"],
    )
    mlp = si.blocks.MLP(
        gain=gain, activation=sizes["activation"], expansion=units / width, gated=sizes.get("gated", False)
    )
    placed = {"norm": sizes["norm"], "position": sizes.get("position", "pre")}
    return si.Stack(
        (
            si.blocks.Block(attention, strength=math.sqrt(features) * last, **placed),
            si.blocks.Block(mlp, strength=math.sqrt(units) * last, **placed),
        )
    )


def configuration(name, width, sigma):
    """A configuration of the library: real proportions, and little vocabulary."""
    import transformers as hf  # pyright: ignore[reportMissingImports]

    heads = width // HEAD_SIZE
    if name == "gpt2":
        return hf.GPT2Config(vocab_size=99, n_embd=width, n_layer=LAYERS, n_head=heads, initializer_range=sigma)
    kwargs = {"hidden_size": width, "num_hidden_layers": LAYERS, "initializer_range": sigma}
    if name in ("bert", "vit"):
        kwargs |= {"num_attention_heads": heads, "intermediate_size": 4 * width}
        sized = hf.BertConfig(**kwargs, vocab_size=99) if name == "bert" else None
        return sized or hf.ViTConfig(**kwargs, image_size=8, patch_size=4)
    # Llama 2 and Gemma have 8/3 n and 8 n units; Llama, Mistral and Qwen2 share keys among heads, Gemma's 2B all.
    kwargs |= {
        "vocab_size": 99,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "intermediate_size": 8 * width // 3,
    }
    if name == "gemma":
        kwargs |= {"num_key_value_heads": 1, "head_dim": HEAD_SIZE, "intermediate_size": 8 * width}
    kind = {"llama": hf.LlamaConfig, "mistral": hf.MistralConfig, "qwen2": hf.Qwen2Config, "gemma": hf.GemmaConfig}
    return kind[name](**kwargs, pad_token_id=None)


def sizes_of(name, config):
    """What the configuration declares."""
    heads = config.num_attention_heads
    rope = getattr(config, "rope_parameters", None)
    return MODELS[name] | {
        "width": config.hidden_size,
        "sigma": config.initializer_range,
        "units": getattr(config, "intermediate_size", 4 * config.hidden_size),
        "heads": heads,
        "key_value_heads": getattr(config, "num_key_value_heads", heads),
        "head_size": getattr(config, "head_dim", None) or config.hidden_size // heads,
        "rope": rope["rope_theta"] if rope else None,
        "causal": name in CAUSAL,
        "prompts": PROMPTS.get(name, 1),
    }


def model_of(name, config):
    """A function that draws the model, its inputs, and its branches."""
    import torch  # pyright: ignore[reportMissingImports]
    import transformers as hf  # pyright: ignore[reportMissingImports]

    inputs = {"input_ids": torch.tensor(IDS[: PROMPTS.get(name, 1)])}
    if name == "gpt2":
        parts = lambda model: [(block.attn, block.mlp) for block in model.h]  # noqa: E731
    elif name == "bert":
        parts = lambda model: [  # noqa: E731
            ((b.attention.self, b.attention.output.dense), (b.intermediate.dense, b.output.dense))
            for b in model.encoder.layer
        ]
    elif name == "vit":
        inputs = {"pixel_values": torch.randn(1, 3, 8, 8, generator=torch.Generator().manual_seed(1))}
        parts = lambda model: [(block.attention, block.mlp) for block in model.layers]  # noqa: E731
    else:
        parts = lambda model: [(block.self_attn, block.mlp) for block in model.layers]  # noqa: E731

    def branches(model):
        for both in parts(model):
            for kind, modules in zip(("attention", "mlp"), both, strict=True):
                yield (kind, *modules) if isinstance(modules, tuple) else (kind, modules)

    own = {"vit": "ViT", "gpt2": "GPT2"}.get(name, name.capitalize())
    options = {"add_pooling_layer": False} if name in ("bert", "vit") else {}
    return lambda seed: getattr(hf, f"{own}Model")(config, **options), inputs, branches


def observed(name, config, seed):
    """The Dataset of one network's branches."""
    make, inputs, branches = model_of(name, config)
    pattern = si.Pattern(causal=name in CAUSAL)
    return observe_branches.torch(make, inputs, branches, pattern=pattern, seed=seed)


def main():
    """Observe."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--sigma", type=float, default=0.02)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--label", default="", help="added to the names of files")
    given = parser.parse_args()
    for name in given.models:
        config = configuration(name, given.width, given.sigma)
        sizes = sizes_of(name, config)
        (given.folder / f"{name}{given.label}.json").write_text(json.dumps(sizes))
        for seed in range(given.seeds):
            data = observed(name, config, seed)
            data.to_netcdf(given.folder / f"{name}{given.label}-{seed}.nc", engine="h5netcdf")


if __name__ == "__main__":
    main()
