"""Public reports of bugs: after its fix a model passes, before it the audit fails and names the bug."""

import functools

import pytest
from helpers import reported_models as own
from helpers.torch_models import TORCH, bert, gpt2, hf, torch
from helpers.torch_models import sizes as small_sizes

import sdeinfer as si

pytestmark = TORCH

N, SIZE = own.N, own.SIZE
RULES = si.audit.recipes
DEEPNORM = RULES.Recipe("deepnorm", "the user", lambda matrix: 0.02, skip=lambda layers: 1.5)
LAYER_SCALE = RULES.Recipe("layer scale", "the user", lambda matrix: 0.02, layer_scale=lambda matrix: 1e-5)
NORMED = RULES.Recipe("normed", "the user", lambda matrix: 0.02, logits=lambda each: 10.0)
GROUPED = own.LLAMA | {"groups": 2, "sd": 0.08}
GRANITE = RULES.Recipe("granite", "the user", lambda matrix: 0.02, multiplier=lambda layers: 0.22)


def of_config(config, change):
    """A model of a library, and a change that is the bug."""
    return own.changed(change, lambda: hf.AutoModelForCausalLM.from_config(config))


def sizes(**others):
    return small_sizes(N, 4, 2 * N) | {"vocab_size": 199} | others


def granite(model):
    for layer in model.model.layers:
        layer.residual_multiplier = 1.0


def norms_of_gemma(model):
    for name, each in model.named_parameters():
        if "norm" in name:
            each.fill_(1.0)


def factors_of_gpt2(model):
    for block in model.h:
        block.attn.scaling = SIZE**-0.5


def norms_of_bert(model):
    for name, each in model.named_parameters():
        if "LayerNorm" in name:
            torch.nn.init.normal_(each, std=0.02)


def weights_of_modernbert(model):
    for each in model.modules():
        if isinstance(each, torch.nn.Linear):
            torch.nn.init.normal_(each.weight, std=0.02)


WORDS = dict(
    zip(("pad_token_id", "eos_token_id", "bos_token_id", "cls_token_id", "sep_token_id"), range(5), strict=True)
)


REPORTS = {
    "timm#1978: dropout in evaluation": (own.with_bug("eager dropout", **own.NANOGPT), {"recipe": "gpt2"}, "dropout"),
    "nanoGPT#240: dropout of fused attention": (own.with_bug("dropout", **own.NANOGPT), {"recipe": "gpt2"}, "dropout"),
    "pytorch#61165: x = LN(x)": (own.with_bug("stream norm", **own.NANOGPT), {"recipe": "gpt2", "norm": "pre"}, "the stream itself is normalised"),
    "TransformerEngine#622: biases": (own.changed(own.biases, bias=True, **own.NANOGPT), {"recipe": "gpt2"}, "bias"),
    "mixle#258: √d_k of μP": (own.repaired(own.values_of("attention", scale=1 / SIZE)), {"recipe": RULES.mup(base_width=N)}, "logits of layer 0 are multiplied by"),
    "mixle#258 at σ = 1/√base": (own.repaired(own.values_of("attention", scale=1 / SIZE), sd=N**-0.5), {"recipe": RULES.mup(N**-0.5, base_width=N)}, "logits of layer 0"),
    "Megatron-LM#3058: 1/√(2L) in μP": (own.changed(own.scaled), {"recipe": RULES.normal()}, "are scaled with depth, which is not declared"),
    "llm-foundry#372: rsqrt": (own.with_bug("rsqrt", **own.LLAMA), {"recipe": "normal"}, "multiplies by what it should divide by"),
    "Qwen#933: mask": (own.with_bug("mask", **own.LLAMA), {"recipe": "normal", "causal": True}, "the causal mask is not there"),
    "minimind#3: the gate": (own.with_bug("gate", **own.LLAMA, sd=0.08), {"like": own.Net(**own.LLAMA, sd=0.08)}, "no matrix is a gate"),
    "onnx#7274: keys are tiled": (own.with_bug("tiled", **GROUPED), {"like": own.Net(**GROUPED)}, "returns other values"),
    "how-to-train-your-gpt#6: angles": (own.with_bug("interleaved", **GROUPED), {"like": own.Net(**GROUPED)}, "returns other values"),
    "SpecForge#265: theta": (own.with_bug("theta", **GROUPED), {"like": own.Net(**GROUPED)}, "returns other values"),
    "transformers#40796: 1 + w": (of_config(hf.Gemma3TextConfig(**sizes(head_dim=SIZE, num_key_value_heads=2)), norms_of_gemma), {"recipe": "auto"}, "multiplies by 2, declared 1"),
    "transformers#48745: a decoder without a mask": (own.with_bug("mask", **own.NANOGPT), {"recipe": "gpt2", "causal": True}, "mask"),
    "transformers#44397: factor of the layer": (own.changed(factors_of_gpt2, lambda: gpt2(N, 4, scale_attn_by_inverse_layer_idx=True)), {"recipe": "auto"}, "the factor 1/(l + 1) of the layer is missing"),
    "transformers#45902: NaN": (own.changed(own.of_rotations, **own.LLAMA), {"recipe": "normal"}, "NaN or infinity in layers.0.attention.wq.weight"),
    "transformers#143: norms": (own.changed(norms_of_bert, lambda: bert(N, 4, 2 * N)), {"recipe": "auto"}, "norm embeddings.LayerNorm.weight multiplies by"),
    "exllamav3#218: residual_multiplier": (of_config(hf.GraniteConfig(**sizes(residual_multiplier=0.22, num_key_value_heads=2)), granite), {"recipe": "auto"}, "is multiplied by 1, declared 0.22"),
    "the same, written out": (own.repaired(own.values_of("", beta=0.22)), {"recipe": GRANITE}, "is multiplied by 1, declared 0.22"),
    "ModernBERT#84: its law": (own.changed(weights_of_modernbert, lambda: hf.ModernBertModel(hf.ModernBertConfig(**sizes(**WORDS)))), {"recipe": "auto"}, "a standard deviation of 0.02"),
    "transformers#47478: 1/√(2L)": (own.repaired(own.scaled), {"recipe": "gpt2"}, "the factor 1/√(2L)"),
    "timm#2605: LayerScale": (lambda fixed: own.changed(own.layer_scale(1e-5 if fixed else 1.0))(False), {"recipe": LAYER_SCALE}, "LayerScale layers.0.scale is 1, declared 1e-05"),
    "x-transformers#190: QK-norm": (lambda fixed: own.changed(own.values_of("attention", normed=True, scale=10.0), bug="" if fixed else "fused scale")(False), {"recipe": NORMED}, "logits of layer 0 are multiplied by"),
    "labml#145: α": (lambda fixed: own.changed(own.values_of("", **{"alpha" if fixed else "beta": 1.5}))(False), {"recipe": DEEPNORM}, "the stream is multiplied by 1"),
    "xformers#233: norm of queries only": (own.with_bug("queries"), {"recipe": "normal"}, "key and value read the stream itself"),
    "ViT#1: softmax/√n": (own.with_bug("probabilities", causal=False), {"recipe": "normal"}, "1/√n after softmax"),
    "swapped w3 and w2": (lambda fixed: own.changed(own.swapped, **own.LLAMA, scaled=True)(fixed), {"recipe": "gpt2"}, "are swapped"),
    "one layer in the place of all": (own.changed(own.copied), {"recipe": "normal"}, "are equal"),
}  # fmt: skip


@functools.cache
def verdict(name, *, fixed, seed):
    make, arguments, _ = REPORTS[name]
    torch.manual_seed(seed)
    return str(si.audit(make(fixed), **arguments))


@pytest.mark.parametrize("name", REPORTS)
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 10))])
def test_a_bug_is_named_and_its_fix_passes(name, seed):
    before, after = verdict(name, fixed=False, seed=seed), verdict(name, fixed=True, seed=seed)
    assert before.startswith("failed"), before
    assert REPORTS[name][2] in before, before
    assert after.startswith("passed"), after
