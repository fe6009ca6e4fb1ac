"""The recipe "auto": a model's own configuration, and the code of its class. Tests: `tests/auditing/test_audit.py`."""

import math
from typing import Any

from sdeinfer.auditing._account import Logits, Matrix
from sdeinfer.auditing._inputs import text_part
from sdeinfer.auditing._library import declared_by
from sdeinfer.auditing._recipe import Recipe
from sdeinfer.auditing._recipes import SD, gpt2, normal

WITH_DEPTH = ("gpt2", "gpt_bigcode", "imagegpt", "decision_transformer")
"""Model types whose last matrices are scaled by 1/√(2L), by the paper."""

OF_T5 = ("t5", "mt5", "umt5", "longt5", "switch_transformers", "pop2piano", "pix2struct", "udop")

OWN_FACTORS = tuple(
    "granite_speech lasr wav2vec2-conformer wav2vec2-bert parakeet seamless inkling muse_spark esm "
    "cpmant beam dory fastspeech2 moonshine_streaming nemotron canary cohere_asr gemma3n gemma4_audio".split()
)
"""Beginnings of model types whose branches or stream have factors that are not in their configuration."""


def automatic(model: Any) -> Recipe | None:
    """The recipe that a model's configuration and its class declare; None for models without one."""
    config = getattr(model, "config", None)
    kind = getattr(config, "model_type", None)
    if config is None or not isinstance(kind, str):
        return None
    text = text_part(config)
    by_code = declared_by(model)
    parts = {str(getattr(getattr(each, "config", None), "model_type", "")) for each in model.modules()}
    own_factors = any(each.startswith(OWN_FACTORS) for each in parts)
    base = gpt2(_sd(config, text)) if kind in WITH_DEPTH else normal(_sd(config, text))

    def sd(matrix: Matrix) -> float | None:
        if matrix.name in by_code and kind not in WITH_DEPTH:
            return by_code[matrix.name].sd if by_code[matrix.name].law != "constant" else None
        return base.sd(matrix) if kind in WITH_DEPTH or not by_code else None

    def bias_sd(matrix: Matrix) -> float | None:
        found = by_code.get(matrix.name)
        if found is None:
            return None if by_code else 0.0
        return None if found.law == "constant" else found.sd

    def law(matrix: Matrix) -> str | None:
        found = by_code.get(matrix.name)
        return (found.law if found.sd else None) if found else None if by_code else base.law(matrix)

    def gain(matrix: Matrix) -> float | None:
        found, usual = by_code.get(matrix.name), 1.0 if matrix.role == "norm" else 0.0
        if found is None:
            return None if by_code else usual
        return found.mean if found.sd == 0 else usual if matrix.role == "norm" else None

    def layer_scale(matrix: Matrix) -> float | None:
        found = by_code.get(matrix.name)
        if found is None:
            return _number(config, "layerscale_value", "layer_scale_init_value")
        return None if found.sd else found.mean

    return Recipe(
        kind if kind in WITH_DEPTH else f"{'`_init_weights`' if by_code else 'normal, the configuration'} of {kind}",
        f"configuration of {kind}, transformers/models/{kind}",
        sd,
        bias_sd,
        law,
        factors=base.factors,
        multiplier=_multiplier(text, own=own_factors),
        skip=lambda layers: None if own_factors else 1.0,
        embedding=_embedding(text),
        layer_scale=layer_scale,
        logits=_logits(kind, text),
        causal=_causal(model, config),
        gain=gain,
    )


def configured_sd(model: Any) -> float | None:
    """`initializer_range`, or what stands for it."""
    config = getattr(model, "config", None)
    if config is None or not hasattr(config, "model_type"):
        return None
    return _sd(config, text_part(config))


def _sd(config: Any, text: Any) -> float:
    """As `_init_weights` in transformers/modeling_utils.py reads it."""
    for name in ("initializer_range", "init_std", "initializer_factor"):
        if hasattr(config, name):
            return float(getattr(config, name) or SD)
    return float(getattr(text, "initializer_range", SD) or SD)


def _number(config: Any, *names: str) -> float | None:
    found = (getattr(config, name, None) for name in names)
    return next((float(each) for each in found if isinstance(each, int | float) and not isinstance(each, bool)), None)


def _multiplier(config: Any, *, own: bool):
    number, depth = _number(config, "residual_multiplier", "residual_scale"), _number(config, "scale_depth")
    if depth is not None:
        return lambda layers: depth / math.sqrt(layers)
    return lambda layers: number if number is not None else None if own else 1.0


def _embedding(config: Any) -> float | None:
    kind = str(getattr(config, "model_type", ""))
    of_text = not kind.endswith(("vision", "audio"))
    if kind.startswith(("gemma", "recurrent_gemma", "paligemma", "t5gemma")) and of_text:
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
NO_LOGITS += ("timesfm", "gemma3n_audio", "gemma4_audio")
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
