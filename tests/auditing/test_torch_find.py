"""Branches, blocks and inputs of PyTorch's and Hugging Face's models, against those written by hand."""

import equinox as eqx
import pytest
from torch_models import TORCH, CausalAttention, bert, encoder, gpt2, hf, llama, nn, prompt, sizes, torch, vit

import sdeinfer as si
from sdeinfer.auditing import default_inputs, describe
from sdeinfer.blocks import MLP, Block, SelfAttention

pytestmark = TORCH

WIDTH, LAYERS, UNITS = SMALL = 32, 2, 64
TEXT = sizes(*SMALL) | {"vocab_size": 99}
GROUPED = TEXT | {"num_key_value_heads": 2, "pad_token_id": None}
ROTATIONS = {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 1.0}
OPT = {"vocab_size": 99, "hidden_size": WIDTH, "ffn_dim": UNITS, "num_hidden_layers": LAYERS, "num_attention_heads": 4}
OPT |= {"word_embed_proj_dim": WIDTH}
DISTILBERT = {"vocab_size": 99, "dim": WIDTH, "hidden_dim": UNITS, "n_layers": LAYERS, "n_heads": 4}


def stack(attention, mlp, norm="layer", position="pre"):
    return si.Stack(tuple(Block(branch, norm=norm, position=position) for branch in (attention, mlp)))


class NanoBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.ln_2, self.attn = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH), CausalAttention(WIDTH)
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


CAUSAL, UNMASKED = SelfAttention(heads=4, pattern=si.CAUSAL), SelfAttention(heads=4)
SWIGLU = MLP(activation="silu", expansion=2.0, gated=True)
GEGLU = MLP(activation="gelu_tanh", expansion=2.0, gated=True)
GELU, GELU_TANH, RELU = (MLP(activation=name, expansion=2.0) for name in ("gelu", "gelu_tanh", "relu"))
OF_GPT2 = stack(CAUSAL, MLP(activation="gelu_tanh"))
TURNED = SelfAttention(heads=4, key_value_heads=2, pattern=si.CAUSAL, rope=1e4)
LARGE_HEADS = SelfAttention(heads=4, key_value_heads=2, head_size=16, pattern=si.CAUSAL, rope=1e4)
SLOW_TURNED = SelfAttention(heads=4, pattern=si.CAUSAL, rope=100.0)
OF_LLAMA, OF_BERT, NANO = stack(TURNED, SWIGLU, "rms"), stack(UNMASKED, GELU, position="post"), stack(CAUSAL, GELU)

AS_BERT = ("encoder.layer", "attention.self", "attention.output.dense", "intermediate.dense", "output.dense")
AS_LLAMA = ("layers", "self_attn", "self_attn", "mlp", "mlp")
CONFIGURED = {
    "gpt2": (lambda: gpt2(WIDTH, LAYERS), OF_GPT2, ("h", "attn", "attn", "mlp", "mlp")),
    "gpt2 with head": (
        lambda: hf.GPT2LMHeadModel(gpt2(WIDTH, LAYERS).config),
        OF_GPT2,
        ("transformer.h", "attn", "attn", "mlp", "mlp"),
    ),
    "llama": (lambda: llama(*SMALL), OF_LLAMA, AS_LLAMA),
    "mistral": (lambda: hf.MistralModel(hf.MistralConfig(**GROUPED)), OF_LLAMA, AS_LLAMA),
    "qwen2": (lambda: hf.Qwen2Model(hf.Qwen2Config(**GROUPED)), OF_LLAMA, AS_LLAMA),
    "phi3": (lambda: hf.Phi3Model(hf.Phi3Config(**GROUPED)), OF_LLAMA, AS_LLAMA),
    "gemma": (
        lambda: hf.GemmaModel(hf.GemmaConfig(**GROUPED, head_dim=16)),
        stack(LARGE_HEADS, GEGLU, "rms"),
        AS_LLAMA,
    ),
    "starcoder2": (lambda: hf.Starcoder2Model(hf.Starcoder2Config(**GROUPED)), stack(TURNED, GELU_TANH), AS_LLAMA),
    "gpt_neox": (
        lambda: hf.GPTNeoXModel(hf.GPTNeoXConfig(**TEXT, rope_parameters=ROTATIONS)),
        stack(SLOW_TURNED, GELU),
        ("layers", "attention", "attention", "mlp", "mlp"),
    ),
    "opt": (
        lambda: hf.OPTModel(hf.OPTConfig(**OPT)),
        stack(CAUSAL, RELU),
        ("decoder.layers", "self_attn", "self_attn", "fc1", "fc2"),
    ),
    "bert": (lambda: bert(*SMALL), OF_BERT, AS_BERT),
    "roberta": (lambda: hf.RobertaModel(hf.RobertaConfig(**TEXT)), OF_BERT, AS_BERT),
    "distilbert": (
        lambda: hf.DistilBertModel(hf.DistilBertConfig(**DISTILBERT)),
        OF_BERT,
        ("transformer.layer", "attention", "attention", "ffn", "ffn"),
    ),
    "vit": (
        lambda: vit(*SMALL, image=16),
        stack(UNMASKED, GELU),
        ("layers", "attention", "attention", "mlp", "mlp"),
    ),
}
"""Models, blocks by hand, the list of layers, and inside one the reader and the writer of attention and of the MLP."""

MASK = nn.Transformer.generate_square_subsequent_mask(4)
AS_ENCODER = ("layers", "self_attn", "self_attn", "linear1", "linear2")
OTHERS = {
    "encoder": (lambda: encoder(*SMALL), stack(UNMASKED, RELU, position="post"), AS_ENCODER, prompt(WIDTH), {}),
    "encoder with norms first": (
        lambda: encoder(*SMALL, norm_first=True, activation=nn.GELU("tanh")),
        stack(UNMASKED, GELU_TANH),
        AS_ENCODER,
        prompt(WIDTH),
        {},
    ),
    "encoder with a mask": (
        lambda: encoder(*SMALL, norm_first=True),
        stack(CAUSAL, RELU),
        AS_ENCODER,
        {"src": prompt(WIDTH), "mask": MASK},
        {"pattern": si.CAUSAL},
    ),
    "nanogpt": (
        NanoGPT,
        NANO,
        ("transformer.h", "attn", "attn", "mlp", "mlp"),
        torch.tensor([[3, 1, 4, 15]]),
        {"architecture": NANO},
    ),
}
"""The same of models without a configuration, and their inputs and options."""


def assert_described(make, by_hand, paths, given, *, sd, tokens=4, **options):
    """What is found in a model, and what is observed with it."""
    found, model, (path, *ends) = describe(lambda seed: make(), **options), make(), paths
    names = {id(module): name for name, module in model.named_modules()}
    layers = [f"{path}.{number}" for number in range(LAYERS)]
    branches = [
        (kind, *(f"{layer}.{end}" for end in own))
        for layer in layers
        for kind, own in (("attention", ends[:2]), ("mlp", ends[2:]))
    ]
    assert [names[id(module)] for module in found.layers(model)] == layers
    assert [(kind, *(names[id(end)] for end in own)) for kind, *own in found.branches(model)] == branches
    assert eqx.tree_equal(found.architecture, by_hand)
    assert found.sd == sd
    pattern = found.architecture.layers[0].branch.pattern
    data = si.observe_branches.torch(
        model, default_inputs(model) if given is None else given, found.branches, pattern=pattern
    )
    assert data["name"].values.tolist() == [reader for _, reader, _ in branches]
    assert data.sizes["token_a"] == tokens


@pytest.mark.parametrize("name", CONFIGURED)
def test_models_of_a_configuration(name):
    sd, tokens = {"starcoder2": 0.018042}.get(name, 0.02), 5 if name == "vit" else 4
    assert_described(*CONFIGURED[name], None, sd=sd, tokens=tokens)


@pytest.mark.parametrize("name", OTHERS)
def test_other_models(name):
    *model, options = OTHERS[name]
    assert_described(*model, sd=None, **options)


def test_default_inputs():
    ids = default_inputs(hf.RobertaModel(hf.RobertaConfig(**TEXT | {"vocab_size": 7})))["input_ids"]
    assert ids.tolist() == [[3, 4, 5, 6]]  # 0, 1 and 2 are special
    model = vit(*SMALL, image=16)
    image = default_inputs(model)["pixel_values"]
    assert image.shape == (1, 3, 8, 8)
    assert image.equal(default_inputs(model)["pixel_values"])
    with torch.no_grad():
        tokens = model.embeddings(image, interpolate_pos_encoding=True)[0]
    assert (torch.corrcoef(tokens) - torch.eye(len(tokens))).abs().max() < 0.9
    assert len({round(each, 9) for each in tokens.square().mean(dim=1).tolist()}) == 5


REFUSED = [
    (
        lambda: describe(hf.Gemma2Model(hf.Gemma2Config(**GROUPED, head_dim=8))),
        "branches: layers.0 of Gemma2Model has a norm after a branch (post_feedforward_layernorm): increments that are",
    ),
    (
        lambda: describe(hf.Qwen3Model(hf.Qwen3Config(**GROUPED, head_dim=8))),
        "model: Qwen3Model has normalised queries and keys (layers.0.self_attn.q_norm), for which there is no law",
    ),
    (
        lambda: describe(encoder(*SMALL, activation=nn.functional.elu)),
        "model: TransformerEncoder has the activation <function elu at ",
    ),
    (
        lambda: describe(Quantised(), architecture=NANO),
        "model: ffn.weight is torch.int8: quantised weights are not those of a recipe",
    ),
    (
        lambda: si.audit(hf.MistralModel(hf.MistralConfig(**GROUPED, sliding_window=2))),
        "inputs: a sliding window of 2 tokens is below the 4 tokens to observe",
    ),
    (
        lambda: default_inputs(llama(*SMALL, vocab_size=5)),
        "inputs: needed for LlamaModel: its vocabulary has 3 usual tokens",
    ),
]


@pytest.mark.parametrize(("call", "message"), REFUSED)
def test_what_is_wrong_is_said_in_one_line(call, message):
    with pytest.raises(si.InputError) as caught:
        call()
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)
