"""The blocks of a model as its configuration or its modules tell them: everything but sizes of weights."""

import dataclasses
import sys
from collections.abc import Callable
from typing import Any, Literal

from sdeinfer._files import InputError
from sdeinfer.blocks import MLP, Block, SelfAttention
from sdeinfer.covariance import CAUSAL, Pattern
from sdeinfer.covariance._pattern import EVERY_TOKEN
from sdeinfer.layers import Stack


@dataclasses.dataclass(frozen=True)
class Family:
    """Features of a model type that its code has and its configurations leave out."""

    norm: Literal["layer", "rms"]
    causal: bool
    gated: bool = False
    position: Literal["pre", "post"] = "pre"


FAMILIES = {
    **dict.fromkeys(("gpt2", "gpt_neox", "opt", "starcoder2"), Family("layer", causal=True)),
    **dict.fromkeys(("llama", "mistral", "qwen2", "gemma", "phi3"), Family("rms", causal=True, gated=True)),
    **dict.fromkeys(("bert", "roberta", "distilbert"), Family("layer", causal=False, position="post")),
    "vit": Family("layer", causal=False),
}
"""Model types of Hugging Face's library whose blocks are those of `sdeinfer.blocks`."""

ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_accurate": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "linear": "identity",
    "relu": "relu",
    "relu2": "relu_squared",
    "silu": "silu",
    "swish": "silu",
    "tanh": "tanh",
}
"""Hugging Face's names of activations, and those of `blocks.ACTIVATIONS`."""

WITHOUT_LAW: dict[str, Callable[[Any], bool]] = {
    "ALiBi": lambda config: config.model_type in ("bloom", "mpt") or _any(config, "alibi"),
    "relative position biases": lambda config: (
        str(getattr(config, "position_embedding_type", "")).startswith("relative")
        or _any(config, "relative_attention", "relative_attention_num_buckets", "use_relative_position_bias")
    ),
    "rotations of a part of each head": lambda config: _rotated_part(config) < 1,
    # "dynamic" is equal to the default up to the longest prompt of the configuration, and "llama3" slows only turns of
    # more than 2,000 tokens, a dozen tokens by at most 0.04.
    "rescaled rotations": lambda config: (
        _rotations(config).get("rope_type", "default") not in ("default", "dynamic", "llama3")
    ),
    "logits with another factor than 1/√d_k": lambda config: (
        _any(config, "scale_attn_by_inverse_layer_idx") or not getattr(config, "scale_attn_weights", True)
    ),
    "LayerScale": lambda config: _any(config, "layerscale_value", "layer_scale_init_value"),
    "experts": lambda config: _any(config, "num_experts", "num_local_experts", "n_routed_experts"),
}
"""Features that change the law of blocks, and whether a configuration has each."""


def of_configuration(config: Any, name: str, pattern: Pattern | None = None) -> Stack:
    """The blocks of a Hugging Face model; a pattern of None is that of its model type."""
    for what, has in WITHOUT_LAW.items():
        if has(config):
            raise InputError(f"model: {name} has {what}, for which there is no law of blocks")
    family = FAMILIES.get(config.model_type)
    if family is None:
        raise unknown(f"{name} (model type {config.model_type!r})")
    if pattern is None:
        pattern = CAUSAL if family.causal or getattr(config, "is_decoder", False) else EVERY_TOKEN
    width, heads = config.hidden_size, config.num_attention_heads
    size, groups = getattr(config, "head_dim", None), getattr(config, "num_key_value_heads", None)
    attention = SelfAttention(
        heads=heads,
        key_value_heads=None if groups == heads else groups,
        head_size=None if size is None or size * heads == width else size,
        pattern=pattern,
        rope=_rotations(config).get("rope_theta"),
    )
    named = _first(config, "hidden_activation", "hidden_act", "activation_function", "activation")
    if not isinstance(named, str) or named not in ACTIVATIONS:
        raise InputError(f"model: {name} has the activation {named!r}, which is none of {', '.join(ACTIVATIONS)}")
    units = _first(config, "intermediate_size", "n_inner", "ffn_dim", "hidden_dim") or 4 * width
    mlp = MLP(activation=ACTIVATIONS[named], expansion=units / width, gated=family.gated)
    position = family.position if getattr(config, "do_layer_norm_before", True) else "post"
    return _stack(attention, mlp, norm=family.norm, position=position)


def of_encoder_layer(layer: Any, name: str, pattern: Pattern | None = None) -> Stack:
    """The blocks of PyTorch's `nn.TransformerEncoderLayer`, whose pattern is an argument of its calls; None for all."""
    torch = sys.modules["torch"]
    F = torch.nn.functional
    functions = {F.relu: "relu", F.gelu: "gelu", F.silu: "silu", F.tanh: "tanh", torch.relu: "relu", torch.tanh: "tanh"}
    classes = {"ReLU": "relu", "GELU": "gelu", "SiLU": "silu", "Tanh": "tanh", "Identity": "identity"}
    given = layer.activation
    activation = classes.get(type(given).__name__) or functions.get(given)
    if activation is None:
        raise InputError(
            f"model: {name} has the activation {given!r}, which is not known: give architecture=si.Stack(…)"
        )
    if getattr(given, "approximate", "none") == "tanh":
        activation = "gelu_tanh"
    attention = SelfAttention(heads=layer.self_attn.num_heads, pattern=EVERY_TOKEN if pattern is None else pattern)
    mlp = MLP(activation=activation, expansion=layer.linear1.out_features / layer.linear1.in_features)
    norm = "rms" if "RMS" in type(layer.norm1).__name__ else "layer"
    return _stack(attention, mlp, norm=norm, position="pre" if layer.norm_first else "post")


def unknown(name: str) -> InputError:
    """The error for a model that does not tell its blocks."""
    return InputError(
        f"architecture: {name} does not tell its blocks; give them, as architecture=si.Stack((si.blocks.Block("
        'si.blocks.SelfAttention(heads=4, pattern=si.CAUSAL), norm="layer"), si.blocks.Block(si.blocks.MLP('
        'activation="gelu_tanh"), norm="layer"))); without pattern= if it has no causal mask; jax.nn.gelu is gelu_tanh'
    )


def _stack(attention: SelfAttention, mlp: MLP, *, norm: Any, position: Any) -> Stack:
    return Stack(tuple(Block(branch, norm=norm, position=position) for branch in (attention, mlp)))


def _rotations(config: Any) -> dict[str, Any]:
    """Base, type and share of the rotations of positions; without a base if there are none."""
    theta = _first(config, "rope_theta", "rotary_emb_base")
    found = {} if theta is None else {"rope_theta": theta}
    for each in (getattr(config, "rope_scaling", None), getattr(config, "rope_parameters", None)):
        found |= each or {}
    return found


def _rotated_part(config: Any) -> float:
    """The part of each head's entries that positions rotate."""
    part = _first(config, "partial_rotary_factor", "rotary_pct")
    return float(_rotations(config).get("partial_rotary_factor") or part or 1.0)


def _first(config: Any, *names: str) -> Any:
    """The first of several entries that a configuration has."""
    return next((found for name in names if (found := getattr(config, name, None)) is not None), None)


def _any(config: Any, *names: str) -> bool:
    return any(bool(getattr(config, name, None)) for name in names)
