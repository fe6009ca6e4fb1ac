"""What the findings of docs/findings.md do to small networks: as published, and with the finding mended.

Run `OMP_NUM_THREADS=1 python tests/benchmarks/audit_findings.py [NAME …]` with PyTorch 2.15 and transformers 5.24. The
growth of a residual stream is its mean square after the last layer over that before the first, on average over two
networks. "passes" is the audit that the page shows; None is "not tested", where an expert gets no token.
"""

import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatch
from typing import Any

import numpy as np
import torch
import transformers as hf
from torch import nn
from transformers.models.clvp.modeling_clvp import ClvpModel
from transformers.models.phi4_multimodal.modeling_phi4_multimodal import (
    Phi4MultimodalVisionConfig,
    Phi4MultimodalVisionModel,
)

import sdeinfer as si

Make = Callable[[int], nn.Module]
Rows = Iterator[tuple[str, Any, Any]]
"""Quantities, as published and mended."""

n, L = 128, 6
SCALED = (2 * L) ** -0.5
SIZES = {"hidden_size": n, "num_hidden_layers": L, "num_attention_heads": 4, "intermediate_size": 2 * n}
WORDS = SIZES | {"vocab_size": 199, "num_key_value_heads": 4, "pad_token_id": 0}
PATCHES = {"image_size": 56, "patch_size": 14}
TOKENS = torch.arange(8)[None] + 5
IMAGES = torch.randn(2, 3, 56, 56, generator=torch.Generator().manual_seed(0))
VECTORS = torch.randn(2, 8, n, generator=torch.Generator().manual_seed(0))


def growth(make: Make, inputs: Any, **choice: Any) -> float:
    V = si.observe(make, inputs, networks=2, **choice)["covariance"].mean("network").values
    return round(float(np.trace(V[-1]) / np.trace(V[0])), 2)


def changed(make: Make, factors: Mapping[str, float]) -> Make:
    """The function of a seed, with parameters multiplied by factors, by globs of their names."""

    def model(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        network = make(seed)
        with torch.no_grad():
            for name, parameter in network.named_parameters():
                for pattern, factor in factors.items():
                    if fnmatch(name, pattern):
                        parameter.mul_(factor)
        return network

    return model


def of_language(make: Make, factors: Mapping[str, float], recipe: Any) -> Rows:
    mended = changed(make, factors)
    yield "growth of the stream", growth(make, TOKENS), growth(mended, TOKENS)
    yield "passes", si.audit(make, recipe=recipe).passed, si.audit(mended, recipe=recipe).passed


def spread(probabilities: torch.Tensor) -> float:
    """Standard deviation over keys of the logits of attention."""
    return round(probabilities.detach().log().std(-1).mean().item(), 3)


def phi() -> Rows:
    seen = {"pixel_values": IMAGES[:1], "patch_attention_mask": torch.ones(1, 4, 4, dtype=torch.bool)}
    encoder = {"stream": "encoder.layers.*", "pattern": si.Pattern()}
    published = growth(
        lambda seed: Phi4MultimodalVisionModel(Phi4MultimodalVisionConfig(**SIZES, **PATCHES)), seen, **encoder
    )
    siglip = growth(
        lambda seed: hf.SiglipVisionModel(hf.SiglipVisionConfig(**SIZES, **PATCHES)),
        {"pixel_values": IMAGES[:1]},
        **encoder,
    )
    yield "growth of the stream, beside SigLIP's", published, siglip


def clip() -> Rows:
    def make(seed: int) -> nn.Module:
        return hf.CLIPVisionModel(hf.CLIPVisionConfig(**SIZES, **PATCHES, attn_implementation="eager"))

    def of_first_layer(model: nn.Module) -> float:
        return spread(model.eval()(IMAGES, output_attentions=True).attentions[0])

    mended = changed(make, {"*[qkv]_proj.weight": 1 / SCALED, "*out_proj.weight": SCALED})
    last = SCALED * n**-0.5
    openai = dict.fromkeys(("query", "key", "value"), n**-0.5) | {"attention output": last, "mlp output": last}
    yield "sd of logits", of_first_layer(changed(make, {})(0)), of_first_layer(mended(0))
    yield "growth of the stream", growth(make, IMAGES[:1]), growth(mended, IMAGES[:1])
    yield "passes", si.audit(make, recipe=openai).passed, si.audit(mended, recipe=openai).passed


def nemotron() -> Rows:
    yield from of_language(
        lambda seed: hf.NemotronModel(hf.NemotronConfig(**WORDS)), {"*norm.weight": 0.0}, recipe="normal"
    )


def muse_glimmer() -> Rows:
    yield from of_language(
        lambda seed: hf.MuseGlimmerTextModel(hf.MuseGlimmerTextConfig(**WORDS)),
        {"*layernorm.weight": 0.0},
        recipe="normal",
    )


def owlvit() -> Rows:
    def make(seed: int) -> nn.Module:
        parts = {"text_config": SIZES | {"vocab_size": 199}, "vision_config": SIZES | PATCHES}
        return hf.OwlViTForObjectDetection(hf.OwlViTConfig(**parts, projection_dim=n)).eval()

    def saturated(model: nn.Module) -> float:
        mask = torch.ones(2, 8)
        boxes = model(input_ids=TOKENS.repeat(2, 1), attention_mask=mask, pixel_values=IMAGES).pred_boxes
        return round(((boxes < 1e-6) | (boxes > 1 - 1e-6)).float().mean().item(), 3)

    mended = changed(make, {"box_head.*.weight": 0.02})
    yield "share of boxes' coordinates within 10⁻⁶ of 0 or 1", saturated(changed(make, {})(0)), saturated(mended(0))


def mobilevit() -> Rows:
    torch.manual_seed(0)
    model = hf.MobileViTModel(hf.MobileViTConfig(image_size=128)).train()
    pixels = torch.randn(4, 3, 128, 128)

    def features() -> str:
        states = model(pixels, output_hidden_states=True).hidden_states
        return " ".join(f"{state.square().mean().sqrt().item():.2g}" for state in states)

    published = features()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.ones_(module.weight)
    yield "root mean squares of features in training, by stage", published, features()


def nanochat() -> Rows:
    large = WORDS | {"hidden_size": 4 * n, "num_hidden_layers": 2 * L, "intermediate_size": 16 * n}
    yield from of_language(
        lambda seed: hf.NanoChatModel(hf.NanoChatConfig(**large)), {"*fc2.weight": (4 * L) ** -0.5}, recipe="gpt2"
    )


def clvp() -> Rows:
    words = SIZES | {"vocab_size": 199, "n_inner": None, "num_text_tokens": 99}
    positions = {"max_position_embeddings": 64, "max_text_tokens": 64}
    yield from of_language(
        lambda seed: ClvpModel(hf.ClvpDecoderConfig(**words, **positions)), {"*out_proj.weight": SCALED}, recipe="gpt2"
    )


def switch() -> Rows:
    sizes = {"d_model": n, "d_kv": 32, "d_ff": 4 * n, "vocab_size": 199}
    layers = {"num_layers": L, "num_decoder_layers": L, "num_heads": 4, "num_experts": 4}

    def make(seed: int) -> nn.Module:
        return hf.SwitchTransformersEncoderModel(hf.SwitchTransformersConfig(**sizes, **layers))

    def before_last_layer(model: nn.Module) -> float:
        states = model.eval()(TOKENS, output_hidden_states=True).hidden_states
        return round((states[-2].square().mean() / states[0].square().mean()).item(), 2)

    mended = changed(make, {"*experts*wo.weight": 0.5})
    rule = {"mlp output": (4 * n) ** -0.5}
    published = before_last_layer(changed(make, {})(0))
    yield "growth up to the last layer", published, before_last_layer(mended(0))
    yield "passes", si.audit(make, recipe=rule).passed, si.audit(mended, recipe=rule).passed


def encoder() -> Rows:
    def layer() -> nn.Module:
        return nn.TransformerEncoderLayer(n, 4, 4 * n, batch_first=True, norm_first=True)

    def copies(seed: int) -> nn.Module:
        return nn.TransformerEncoder(layer(), 24, enable_nested_tensor=False)

    def drawn(seed: int) -> nn.Module:
        network = copies(seed)
        network.layers = nn.ModuleList([layer() for _ in range(24)])
        return network

    yield "growth of the stream in 24 layers", growth(copies, VECTORS[:1]), growth(drawn, VECTORS[:1])


def multihead_attention() -> Rows:
    def of_factor(factor: float) -> float:
        torch.manual_seed(0)
        attention = nn.MultiheadAttention(n, 4, batch_first=True)
        attention.in_proj_weight.data *= factor
        return spread(attention(VECTORS, VECTORS, VECTORS, average_attn_weights=False)[1])

    yield "sd of logits", of_factor(1.0), of_factor(2**0.5)


def gpt2() -> Rows:
    words = {"vocab_size": 199, "bos_token_id": 0, "eos_token_id": 0}

    def make(seed: int) -> nn.Module:
        return hf.GPT2Model(hf.GPT2Config(n_embd=768, n_layer=12, n_head=12, **words))

    yield "growth of the stream", growth(changed(make, {"*c_proj.weight": 24**0.5}), TOKENS), growth(make, TOKENS)


FINDINGS = (
    phi,
    clip,
    nemotron,
    muse_glimmer,
    owlvit,
    mobilevit,
    nanochat,
    clvp,
    switch,
    encoder,
    multihead_attention,
    gpt2,
)


def main() -> None:
    warnings.filterwarnings("ignore")
    hf.logging.set_verbosity_error()
    for finding in FINDINGS:
        if len(sys.argv) == 1 or finding.__name__ in sys.argv[1:]:
            for quantity, published, mended in finding():
                print(f"{finding.__name__}: {quantity}: {published} as published, {mended} mended", flush=True)


if __name__ == "__main__":
    main()
