"""Descriptions of PyTorch's and Hugging Face's models: a script that needs torch, transformers and this package.

    python torch_descriptions.py FILE

writes, as JSON, for each model the names of its branches and layers, whether its blocks are those written here by hand,
its default inputs, and the names of the observed branches; and the message of each faulty use.
"""

import json
import sys
from pathlib import Path

import equinox as eqx
import torch  # pyright: ignore[reportMissingImports]
import transformers as hf  # pyright: ignore[reportMissingImports]
from torch import nn  # pyright: ignore[reportMissingImports]

import sdeinfer as si
from sdeinfer.auditing import default_inputs, describe
from sdeinfer.blocks import MLP, Block, SelfAttention

WIDTH, LAYERS, UNITS = 32, 2, 64
SIZES = {"hidden_size": WIDTH, "intermediate_size": UNITS, "num_hidden_layers": LAYERS, "num_attention_heads": 4}
TEXT = SIZES | {"vocab_size": 99}
GROUPED = TEXT | {"num_key_value_heads": 2, "pad_token_id": None}
ROTATIONS = {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 1.0}
OPT = {"vocab_size": 99, "hidden_size": WIDTH, "ffn_dim": UNITS, "num_hidden_layers": LAYERS, "num_attention_heads": 4}
OPT |= {"word_embed_proj_dim": WIDTH}
DISTILBERT = {"vocab_size": 99, "dim": WIDTH, "hidden_dim": UNITS, "n_layers": LAYERS, "n_heads": 4}
IMAGE = SIZES | {"image_size": 16, "patch_size": 4}


def stack(attention, mlp, norm="layer", position="pre"):
    return si.Stack(tuple(Block(branch, norm=norm, position=position) for branch in (attention, mlp)))


def gpt2(**options):
    return hf.GPT2Config(vocab_size=99, n_embd=WIDTH, n_layer=LAYERS, n_head=4, **options)


def encoder(**options):
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, 4, UNITS, batch_first=True, **options), LAYERS)


class CausalSelfAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = (each.unflatten(-1, (4, -1)).transpose(1, 2) for each in self.c_attn(x).chunk(3, dim=-1))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).flatten(2))


class NanoBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.ln_2, self.attn = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH), CausalSelfAttention()
        self.mlp = nn.Sequential(nn.Linear(WIDTH, UNITS), nn.GELU(), nn.Linear(UNITS, WIDTH))

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class NanoGPT(nn.Module):
    def __init__(self):
        super().__init__()
        h = nn.ModuleList([NanoBlock() for _ in range(LAYERS)])
        self.transformer = nn.ModuleDict({"wte": nn.Embedding(99, WIDTH), "h": h, "ln_f": nn.LayerNorm(WIDTH)})

    def forward(self, ids):
        x = self.transformer["wte"](ids)
        for block in self.transformer["h"]:
            x = block(x)
        return self.transformer["ln_f"](x)


class Quantised(nn.Module):
    def __init__(self):
        super().__init__()
        self.mixer, self.ffn = nn.MultiheadAttention(WIDTH, 4, batch_first=True), nn.Linear(WIDTH, WIDTH)
        self.ffn.weight = nn.Parameter(torch.zeros(WIDTH, WIDTH, dtype=torch.int8), requires_grad=False)


CAUSAL = SelfAttention(heads=4, pattern=si.CAUSAL)
SWIGLU = MLP(activation="silu", expansion=2.0, gated=True)
GEGLU = MLP(activation="gelu_tanh", expansion=2.0, gated=True)
GELU_TANH, RELU = (MLP(activation=name, expansion=2.0) for name in ("gelu_tanh", "relu"))
TURNED = SelfAttention(heads=4, key_value_heads=2, pattern=si.CAUSAL, rope=1e4)
LARGE_HEADS = SelfAttention(heads=4, key_value_heads=2, head_size=16, pattern=si.CAUSAL, rope=1e4)
LLAMA = stack(TURNED, SWIGLU, "rms")
BERT = stack(SelfAttention(heads=4), MLP(expansion=2.0), position="post")
NANO = stack(CAUSAL, MLP(expansion=2.0))
X = torch.randn(1, 4, WIDTH, generator=torch.Generator().manual_seed(1))

MODELS = {
    "gpt2": (lambda: hf.GPT2Model(gpt2()), stack(CAUSAL, MLP(activation="gelu_tanh"))),
    "gpt2 with head": (lambda: hf.GPT2LMHeadModel(gpt2()), stack(CAUSAL, MLP(activation="gelu_tanh"))),
    "llama": (lambda: hf.LlamaModel(hf.LlamaConfig(**GROUPED)), LLAMA),
    "mistral": (lambda: hf.MistralModel(hf.MistralConfig(**GROUPED)), LLAMA),
    "qwen2": (lambda: hf.Qwen2Model(hf.Qwen2Config(**GROUPED)), LLAMA),
    "phi3": (lambda: hf.Phi3Model(hf.Phi3Config(**GROUPED)), LLAMA),
    "gemma": (lambda: hf.GemmaModel(hf.GemmaConfig(**GROUPED, head_dim=16)), stack(LARGE_HEADS, GEGLU, "rms")),
    "starcoder2": (lambda: hf.Starcoder2Model(hf.Starcoder2Config(**GROUPED)), stack(TURNED, GELU_TANH)),
    "gpt_neox": (
        lambda: hf.GPTNeoXModel(hf.GPTNeoXConfig(**TEXT, rope_parameters=ROTATIONS)),
        stack(SelfAttention(heads=4, pattern=si.CAUSAL, rope=100.0), MLP(expansion=2.0)),
    ),
    "opt": (lambda: hf.OPTModel(hf.OPTConfig(**OPT)), stack(CAUSAL, RELU)),
    "bert": (lambda: hf.BertModel(hf.BertConfig(**TEXT)), BERT),
    "roberta": (lambda: hf.RobertaModel(hf.RobertaConfig(**TEXT)), BERT),
    "distilbert": (lambda: hf.DistilBertModel(hf.DistilBertConfig(**DISTILBERT)), BERT),
    "vit": (lambda: hf.ViTModel(hf.ViTConfig(**IMAGE)), stack(SelfAttention(heads=4), MLP(expansion=2.0))),
    "encoder": (
        encoder,
        stack(SelfAttention(heads=4), RELU, position="post"),
        X,
    ),
    "encoder with norms first": (
        lambda: encoder(norm_first=True, activation=nn.GELU("tanh")),
        stack(SelfAttention(heads=4), GELU_TANH),
        X,
    ),
    "encoder with a mask": (
        lambda: encoder(norm_first=True),
        stack(CAUSAL, RELU),
        {"src": X, "mask": nn.Transformer.generate_square_subsequent_mask(4)},
        {"pattern": si.CAUSAL},
    ),
    "nanogpt": (NanoGPT, NANO, torch.tensor([[3, 1, 4, 15]]), {"architecture": NANO}),
}
"""Functions that make the models, blocks by hand, and the inputs and options of those without a configuration."""


def described(make, by_hand, inputs=None, options=None):
    """What is found in a model, and what is observed with it."""
    found, model = describe(lambda seed: make(), **(options or {})), make()
    names = {id(module): name for name, module in model.named_modules()}
    given = default_inputs(model) if inputs is None else inputs
    pattern = found.architecture.layers[0].branch.pattern
    data = si.observe_branches.torch(model, given, found.branches, pattern=pattern)
    return {
        "branches": [[kind, names[id(reader)], names[id(writer)]] for kind, reader, writer in found.branches(model)],
        "layers": [names[id(module)] for module in found.layers(model)],
        "same": bool(eqx.tree_equal(found.architecture, by_hand)),
        "sd": found.sd,
        "observed": data["name"].values.tolist(),
        "tokens": data.sizes["token_a"],
    }


def inputs():
    """Default inputs: token ids and special ones; what the tokens of an image are."""
    ids = default_inputs(hf.RobertaModel(hf.RobertaConfig(**TEXT | {"vocab_size": 7})))["input_ids"]
    vit = hf.ViTModel(hf.ViTConfig(**IMAGE))
    image = default_inputs(vit)
    with torch.no_grad():
        tokens = vit.embeddings(image["pixel_values"], interpolate_pos_encoding=True)[0]
    gram = torch.corrcoef(tokens)
    return {
        "ids": ids.tolist(),
        "shape": list(image["pixel_values"].shape),
        "again": bool((image["pixel_values"] == default_inputs(vit)["pixel_values"]).all()),
        "largest correlation": float((gram - torch.eye(len(gram))).abs().max()),
        "mean squares": tokens.square().mean(dim=1).tolist(),
    }


def llama(**options):
    return hf.LlamaModel(hf.LlamaConfig(**GROUPED | options))


ERRORS = {
    "gemma2": lambda: describe(hf.Gemma2Model(hf.Gemma2Config(**GROUPED, head_dim=8))),
    "gemma3": lambda: describe(hf.Gemma3TextModel(hf.Gemma3TextConfig(**GROUPED, head_dim=8))),
    "qwen3": lambda: describe(hf.Qwen3Model(hf.Qwen3Config(**GROUPED, head_dim=8))),
    "decoder": lambda: describe(nn.Transformer(WIDTH, 4, 1, 1, UNITS, batch_first=True)),
    "activation": lambda: describe(encoder(activation=nn.functional.elu)),
    "int8": lambda: describe(Quantised(), architecture=NANO),
    "window": lambda: si.audit(hf.MistralModel(hf.MistralConfig(**GROUPED, sliding_window=2))),
    "vocabulary": lambda: default_inputs(llama(vocab_size=5)),
}


def message(use):
    try:
        use()
    except si.InputError as error:
        return str(error)
    return "no error"


if __name__ == "__main__":
    written = {"models": {name: described(*each) for name, each in MODELS.items()}, "inputs": inputs()}
    written["errors"] = {name: message(use) for name, use in ERRORS.items()}
    Path(sys.argv[1]).write_text(json.dumps(written))
