"""What a model's own configuration declares: the recipe "auto" of Hugging Face's families."""

import dataclasses
import math
from typing import Any

from scipy.stats import truncnorm

from sdeinfer.auditing._account import Logits, Matrix
from sdeinfer.auditing._recipe import Recipe
from sdeinfer.auditing._recipes import IN_BLOCKS, SD, gpt2, normal

WITH_DEPTH = ("gpt2", "gpt_bigcode", "imagegpt", "decision_transformer")
"""Model types whose last matrices are scaled by 1/√(2L)."""

OF_T5 = ("t5", "mt5", "umt5", "longt5", "switch_transformers", "pop2piano", "pix2struct", "udop")

OF_CLIP = (
    *("clip", "clip_text_model", "clip_vision_model", "altclip", "altclip_vision_model", "chinese_clip_vision_model"),
    *("clipseg", "clipseg_text_model", "clipseg_vision_model", "metaclip_2", "metaclip_2_text_model"),
    *("metaclip_2_vision_model", "mlcd_vision_model", "groupvit_text_model", "groupvit_vision_model"),
)

UNKNOWN = frozenset(
    "bridgetower dory muse_glimmer muse_glimmer_text "
    "bit resnet regnet convnext convnextv2 mobilenet_v1 mobilenet_v2 mobilevit mobilevitv2 efficientnet align "
    "encodec dac mimi focalnet van levit swiftformer poolformer pvt pvt_v2 segformer textnet hgnet_v2 "
    "rt_detr_resnet pp_ocrv5_mobile_rec rt_detr rt_detr_v2 pp_doclayout_v3 pp_doclayout_v4 d_fine deimv2 "
    "mask2former maskformer oneformer grounding-dino mm-grounding-dino wav2vec2 hubert wavlm unispeech unispeech- "
    "sat sew sew-d data2vec-audio recurrent_gemma rwkv xlstm switch_transformers neomme aimv2 aimv2_vision_model "
    "aimv2_text_model flaubert xlm blip blip_text_model blip_vision_model bridgetower owlvit owlv2 groupvit "
    "chinese_clip clipseg xlnet nemotron_h videoprism_vision_model hiera sam_vision_model sam_hq_vision_model".split()
)
"""Model types whose `_init_weights` has rules of its own: only mask and logits are declared here."""

OWN_FACTORS = tuple(
    "granite_speech lasr wav2vec2-conformer wav2vec2-bert parakeet seamless inkling muse_spark esm "
    "cpmant beam dory fastspeech2 moonshine_streaming nemotron canary cohere_asr gemma3n gemma4_audio".split()
)
"""Beginnings of model types whose branches or stream have factors that are not in their configuration."""

OWN_BIASES = ("gpt_oss", "hiera")
"""Model types whose biases start from other values."""


def automatic(model: Any) -> Recipe | None:
    """The recipe that a model's configuration, and those of its parts, declare; None for models without one."""
    config = getattr(model, "config", None)
    kind = getattr(config, "model_type", None)
    if config is None or not isinstance(kind, str):
        return None
    text = _text(config)
    parts = {
        name: _base(part.config)
        for name, part in model.named_modules()
        if hasattr(part, "_init_weights") and hasattr(getattr(part, "config", None), "model_type")
    }
    own = max(parts, key=len)

    def of(matrix: Matrix) -> Recipe:
        inside = [name for name in parts if not name or matrix.name.startswith(f"{name}.")]
        return parts[max(inside, key=len)] if inside else parts[own]

    known = kind in FAMILIES or kind in WITH_DEPTH
    plain = "nothing of σ, by the configuration" if kind in UNKNOWN else "normal, of the configuration"
    return Recipe(
        kind if known else f"{plain} of {kind}",
        f"configuration of {kind}, transformers/models/{kind}",
        lambda matrix: of(matrix).sd(matrix),
        lambda matrix: of(matrix).bias_sd(matrix),
        lambda matrix: of(matrix).law(matrix),
        factors=lambda matrix: of(matrix).factors(matrix),
        multiplier=_multiplier(kind, text),
        skip=lambda layers: None if kind.startswith(OWN_FACTORS) or kind in UNKNOWN else 1.0,
        embedding=_embedding(text),
        layer_scale=_number(config, "layerscale_value", "layer_scale_init_value"),
        logits=_logits(kind, text),
        causal=_causal(model, config),
        gain=None if kind in UNKNOWN else 1.0,
    )


def _base(config: Any) -> Recipe:
    """The rule of one configuration."""
    kind = config.model_type
    sd = _sd(config, _text(config))
    make = FAMILIES.get(kind)
    if make or kind in WITH_DEPTH:
        return make(config, sd) if make else gpt2(sd)
    base = normal(sd)
    declared = kind not in UNKNOWN
    return dataclasses.replace(
        base,
        sd=lambda matrix: base.sd(matrix) if declared and matrix.role not in UNDECLARED else None,
        bias_sd=lambda matrix: (
            None if kind in OWN_BIASES or not declared or matrix.of in ("", "inner", "input", "reads") else 0.0
        ),
        gain=1.0 if declared else None,
    )


UNDECLARED = ("position", "inner", "input", "router")
"""Roles whose rule differs between model types of one configuration."""


def configured_sd(model: Any) -> float | None:
    """`initializer_range`, or what stands for it."""
    config = getattr(model, "config", None)
    if config is None or not hasattr(config, "model_type"):
        return None
    return _sd(config, _text(config))


def _sd(config: Any, text: Any) -> float:
    """As `_init_weights` in transformers/modeling_utils.py reads it."""
    for name in ("initializer_range", "init_std", "initializer_factor"):
        if hasattr(config, name):
            return float(getattr(config, name) or SD)
    return float(getattr(text, "initializer_range", SD) or SD)


def _text(config: Any) -> Any:
    """The part of a configuration that is about text, or the configuration itself."""
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def _number(config: Any, *names: str) -> float | None:
    found = (getattr(config, name, None) for name in names)
    return next((float(each) for each in found if isinstance(each, int | float) and not isinstance(each, bool)), None)


def _multiplier(kind: str, config: Any):
    own = _number(config, "residual_multiplier", "residual_scale")
    depth = _number(config, "scale_depth")
    if depth is not None:
        return lambda layers: depth / math.sqrt(layers)
    return lambda layers: own if own is not None else None if kind.startswith(OWN_FACTORS) or kind in UNKNOWN else 1.0


def _embedding(config: Any) -> float | None:
    kind = str(getattr(config, "model_type", ""))
    if kind.startswith(("gemma", "recurrent_gemma", "paligemma", "t5gemma")):
        return math.sqrt(config.hidden_size)
    if getattr(config, "scale_embedding", False):
        return math.sqrt(_number(config, "d_model", "hidden_size") or 1.0)
    return _number(config, "embedding_multiplier", "scale_emb")


def _logits(kind: str, config: Any):
    own = _number(config, "attention_multiplier")
    scalar = _number(config, "query_pre_attn_scalar")
    by_layer = bool(getattr(config, "scale_attn_by_inverse_layer_idx", False))

    def factor(found: Logits) -> float | None:
        if own is not None:
            return own
        if scalar is not None:
            return scalar**-0.5
        if kind in OF_T5 or getattr(config, "scale_attn_weights", True) is False or kind in ("gpt_neo",):
            return 1.0
        if found.normed or getattr(config, "rope_scaling", None) or kind in NO_LOGITS:
            return None
        plain = found.head_size**-0.5
        return plain / (found.layer + 1) if by_layer and found.layer is not None else plain

    return factor


NO_LOGITS = ("cvt", "levit", "swinv2", "donut-swin", "prophetnet", "sew-d", "deberta", "deberta-v2", "deepseek_v3")
"""Model types whose logits have another factor, which is not in their configuration."""


def _causal(model: Any, config: Any) -> bool | None:
    """Decoders say so: in their class, in their configuration, or in their attention modules."""
    if getattr(config, "is_encoder_decoder", False):
        return None
    own = [bool(each) for module in model.modules() if isinstance(each := getattr(module, "is_causal", None), bool)]
    if own:
        return True if all(own) or getattr(config, "is_decoder", False) else None
    named = "ForCausalLM" in type(model).__name__
    return True if getattr(config, "is_decoder", named) else None


def _t5(config: Any, sd: float) -> Recipe:
    """T5: `_init_weights` in transformers/models/t5/modeling_t5.py."""
    factor = _number(config, "initializer_factor") or 1.0
    d, k, heads, ff = (getattr(config, name, 1) for name in ("d_model", "d_kv", "num_heads", "d_ff"))

    def of(matrix: Matrix) -> float | None:
        known = {
            "query": factor * (d * k) ** -0.5,
            "key": factor * d**-0.5,
            "value": factor * d**-0.5,
            "attention output": factor * (heads * k) ** -0.5,
            "gate": factor * d**-0.5,
            "up": factor * d**-0.5,
            "mlp output": factor * ff**-0.5,
            "embedding": factor,
        }
        return known.get(matrix.role)

    return Recipe("t5", "", of)


def _clip(config: Any, sd: float) -> Recipe:
    """CLIP: `_init_weights` in transformers/models/clip/modeling_clip.py."""
    factor = _number(config, "initializer_factor") or 1.0

    def of(matrix: Matrix) -> float | None:
        n, depth = matrix.width, (2 * max(matrix.layers, 1)) ** -0.5
        n = matrix.fan_out if matrix.last else matrix.fan_in
        known = {
            "query": factor * n**-0.5 * depth,
            "key": factor * n**-0.5 * depth,
            "value": factor * n**-0.5 * depth,
            "attention output": factor * n**-0.5,
            "up": factor * (2 * n) ** -0.5,
            "mlp output": factor * n**-0.5 * depth,
            "embedding": 0.02 * factor,
        }
        return known.get(matrix.role)

    return Recipe("clip", "", of)


def _modernbert(config: Any, sd: float) -> Recipe:
    """ModernBERT: truncated, and scaled with depth; `_init_weights` in transformers/models/modernbert."""
    cut = _number(config, "initializer_cutoff_factor") or 3.0
    sd *= float(truncnorm.std(-cut, cut))
    base = gpt2(sd)
    return dataclasses.replace(
        base,
        name="modernbert",
        sd=lambda matrix: (
            base.sd(matrix) if matrix.role in (*IN_BLOCKS, "query/key/value", "gate/up", "embedding") else None
        ),
        law=lambda matrix: "truncated",
    )


def _nanochat(config: Any, sd: float) -> Recipe:
    """Only the last matrix of attention is scaled with depth."""
    base = normal(sd)
    return dataclasses.replace(
        base,
        sd=lambda matrix: (
            (base.sd(matrix) or 0.0) * (2 * matrix.layers) ** (-0.5 if matrix.role == "attention output" else 0)
        ),
    )


def _siglip(config: Any, sd: float) -> Recipe:
    """SigLIP: Xavier uniform in layers."""

    def of(matrix: Matrix) -> float | None:
        known = ("query", "key", "value", "attention output", "up", "mlp output")
        return math.sqrt(2 / (matrix.fan_in + matrix.fan_out)) if matrix.role in known else None

    return Recipe("siglip", "", of, lambda matrix: None, lambda matrix: "uniform" if of(matrix) else None)


def _mamba(config: Any, sd: float) -> Recipe:
    """Mamba: `_init_weights` in transformers/models/mamba/modeling_mamba.py."""
    scale = 1 / math.sqrt(config.num_hidden_layers) if getattr(config, "rescale_prenorm_residual", False) else 1.0

    def of(matrix: Matrix) -> float | None:
        if matrix.role == "mixer output":
            return scale / math.sqrt(3 * matrix.fan_in)
        return sd if matrix.role in ("embedding", "head", "reads") else None

    return Recipe(
        "mamba", "", of, lambda matrix: None, lambda matrix: "uniform" if matrix.role == "mixer output" else None
    )


FAMILIES = dict.fromkeys(OF_T5, _t5) | dict.fromkeys(OF_CLIP, _clip) | {"mamba": _mamba, "falcon_mamba": _mamba}
FAMILIES |= dict.fromkeys(("modernbert", "modernbert-decoder"), _modernbert) | {"nanochat": _nanochat}
FAMILIES |= dict.fromkeys(("siglip", "siglip2", "siglip_text_model", "siglip_vision_model"), _siglip)
"""Rules of model types that are neither "gpt2" nor "normal"."""
