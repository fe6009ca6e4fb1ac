"""The recipe "auto": a model's own configuration, and the code of its class. Tests: `tests/auditing/test_audit.py`."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

from sdeinfer.auditing._account import Logits, Matrix
from sdeinfer.auditing._inputs import text_part
from sdeinfer.auditing._recipe import Recipe
from sdeinfer.auditing._recipes import SD, normal


def automatic(model: Any) -> Recipe | None:
    """The recipe that a model's configuration and its class declare; None for models without one."""
    config = getattr(model, "config", None)
    kind = getattr(config, "model_type", None)
    if config is None or not isinstance(kind, str):
        return None
    from sdeinfer.auditing._library import declared_by

    text, named = text_part(config), declared_by(model)
    base = normal(_sd(config, text))

    def gain(matrix: Matrix) -> float | None:
        found, usual = named.get(matrix.array), 1.0 if matrix.role == "norm" else 0.0
        if found is None:
            return usual if not named or not matrix.array else None
        return found.mean if found.sd == 0 and found.values is None else usual if matrix.role == "norm" else None

    def layer_scale(matrix: Matrix) -> float | None:
        return None if named else _number(config, "layerscale_value", "layer_scale_init_value")

    recipe = Recipe(
        f"{'`_init_weights`' if named else 'normal, the configuration'} of {kind}",
        f"configuration of {kind}, transformers/models/{kind}",
        (lambda matrix: None) if named else base.sd,
        (lambda matrix: None) if named else base.bias_sd,
        (lambda matrix: None) if named else base.law,
        embedding=_embedding(text),
        layer_scale=layer_scale,
        logits=_logits(text),
        named=named.get,
        causal=_causal(model, config),
        gain=gain,
    )
    multiplier = _multiplier(text)
    return recipe if multiplier is None else dataclasses.replace(recipe, multiplier=multiplier)


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


def _multiplier(config: Any) -> Callable[[int], float] | None:
    """The factor of branches, if the configuration states one."""
    number, depth = _number(config, "residual_multiplier", "residual_scale"), _number(config, "scale_depth")
    if depth is not None:
        return lambda layers: depth / math.sqrt(layers)
    return None if number is None else lambda layers: number


def _embedding(config: Any) -> float | None:
    if getattr(config, "scale_embedding", False):
        return math.sqrt(_number(config, "d_model", "hidden_size") or 1.0)
    return _number(config, "embedding_multiplier", "scale_emb")


def _logits(config: Any) -> Callable[[Logits], float | None]:
    stated, scalar = _number(config, "attention_multiplier"), _number(config, "query_pre_attn_scalar")
    by_layer = bool(getattr(config, "scale_attn_by_inverse_layer_idx", False))

    def factor(found: Logits) -> float | None:
        if stated is not None:
            return stated
        if scalar is not None:
            return scalar**-0.5
        if getattr(config, "scale_attn_weights", True) is False:
            return 1.0
        if found.normed:
            return None
        plain = found.head_size**-0.5
        return plain / (found.layer + 1) if by_layer and found.layer is not None else plain

    return factor


def _causal(model: Any, config: Any) -> bool | None:
    """Decoders say so: in their class, in their configuration, or in their attention modules."""
    if getattr(config, "is_encoder_decoder", False):
        return None
    own = [bool(each) for module in model.modules() if isinstance(each := getattr(module, "is_causal", None), bool)]
    if own:
        return True if all(own) or getattr(config, "is_decoder", False) else None
    named = "ForCausalLM" in type(model).__name__
    return True if getattr(config, "is_decoder", named) else None
