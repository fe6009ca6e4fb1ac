"""Inputs for a pass: two items of a batch with few tokens, a small image or a short sound, that fit a model."""

import inspect
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np

TOKENS = 8
"""Number of tokens of a prompt."""

BATCH = 2
"""Number of items; a second pass changes one of them."""


def candidates(model: Any) -> Iterator[dict[str, Any]]:
    """Inputs to try in turn for a module of PyTorch, as keyword arguments."""
    forward = getattr(model, "forward", model)
    names = list(inspect.signature(forward).parameters)
    config = getattr(model, "config", None)
    if config is not None and hasattr(config, "model_type"):
        yield from _of_hugging_face(model, config, names)
    first = next((name for name in names if name not in ("self", "args", "kwargs")), "x")
    for value in _plain(model):
        yield {first: value}


def _of_hugging_face(model: Any, config: Any, names: list[str]) -> Iterator[dict[str, Any]]:
    main = getattr(model, "main_input_name", "input_ids")
    main = main if isinstance(main, str) else main[0]
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    options = {"use_cache": False} if "use_cache" in names else {}
    tokens = _tokens(_first(text, "vocab_size", default=100), _special(text))
    known: dict[str, list[Any]] = {
        "input_ids": [tokens],
        "decoder_input_ids": [tokens],
        "pixel_values": list(_images(model, config)),
        "input_features": list(_features(config)),
        "input_values": [_normal(BATCH, 4000), *_features(config, transposed=True), tokens],
        "inputs_embeds": [_normal(BATCH, TOKENS, _first(text, "hidden_size", "d_model", default=64))],
        "pixel_values_videos": [
            _normal(BATCH, _first(config, "num_frames", "frames_per_clip", default=2), 3, *_side(config))
        ],
        "past_values": [_normal(BATCH, 64)],
    }
    known["bbox"] = [_normal(BATCH, TOKENS, 4).abs().long().clamp(0, 1)]
    known["attention_mask"] = [tokens * 0 + 1]
    required = [
        name for name, each in inspect.signature(model.forward).parameters.items() if each.default is each.empty
    ]
    decoder = (
        {"decoder_input_ids": tokens}
        if getattr(config, "is_encoder_decoder", False) and "decoder_input_ids" in names
        else {}
    )
    options |= {
        name: known[name][0] for name in (*required, "bbox") if name in known and name != main and name in names
    }
    for value in known.get(main, [tokens]):
        yield {main: value} | decoder | options
        both = {name: known[name][0] for name in ("input_ids", "pixel_values") if name in names and known[name]}
        if len(both) == 2:
            yield both | {main: value} | decoder | options
    if main != "input_ids" and "input_ids" in names:
        yield {"input_ids": tokens} | decoder | options


def _plain(model: Any) -> Iterator[Any]:
    """Tokens for an embedding, images for a convolution, vectors for a matrix: what comes first."""
    for module in model.modules():
        kind, weight = type(module).__name__, getattr(module, "weight", None)
        if "Embedding" in kind and weight is not None:
            yield _tokens(weight.shape[0], set())
        elif kind.startswith("Conv2d") and weight is not None:
            sizes = getattr(model, "pretrained_cfg", None) or getattr(model, "default_cfg", None) or {}
            side = sizes.get("input_size", (0, 0, 0))[-1] or _attribute(model, "img_size", "image_size") or 64
            yield from (_normal(BATCH, module.in_channels, each, each) for each in dict.fromkeys((side, 64, 224)))
        elif "Conv1d" in kind and weight is not None:
            yield _normal(BATCH, module.in_channels, 64)
        elif weight is not None and weight.dim() == 2:
            yield _normal(BATCH, TOKENS, module.in_features if hasattr(module, "in_features") else weight.shape[-1])
            yield _normal(BATCH, weight.shape[-1])
        elif weight is not None and weight.dim() == 1 and ("Norm" in kind):
            yield _normal(BATCH, TOKENS, weight.shape[0])
        elif "MultiheadAttention" in kind:
            yield _normal(BATCH, TOKENS, module.embed_dim)
        else:
            continue
        return


def _attribute(model: Any, *names: str) -> int:
    for module in model.modules():
        for name in names:
            value = getattr(module, name, None)
            if isinstance(value, int | tuple | list) and value:
                return int(value if isinstance(value, int) else value[-1])
    return 0


def _first(config: Any, *names: str, default: Any = None) -> Any:
    for part in (
        config,
        *(getattr(config, name, None) for name in ("vision_config", "audio_config", "encoder", "text_config")),
    ):
        for name in names:
            value = part.get(name) if isinstance(part, dict) else getattr(part, name, None)
            if isinstance(value, int | list | tuple) and value:
                return value if isinstance(value, int) else value[-1]
    return default


def _special(config: Any) -> set[int]:
    special: set[int] = set()
    for name, value in config.to_dict().items():
        if name.endswith(("_token_id", "_token_index")):
            special |= {each for each in (value if isinstance(value, list) else [value]) if isinstance(each, int)}
    return special


def _tokens(vocabulary: int, special: set[int]) -> Any:
    """Different tokens from the middle of the vocabulary, since special ones are at its ends."""
    torch = sys.modules["torch"]
    usual = [token for token in range(min(vocabulary, 5000)) if token not in special] or [0]
    start = max((len(usual) - BATCH * TOKENS) // 2, 0)
    chosen = [usual[(start + k) % len(usual)] for k in range(BATCH * TOKENS)]
    return torch.tensor(chosen).reshape(BATCH, TOKENS)


def _normal(*shape: int) -> Any:
    torch = sys.modules["torch"]
    values = np.random.default_rng(0).standard_normal(shape, np.float32)
    return torch.from_numpy(values)


def _side(config: Any) -> tuple[int, int]:
    side = _first(config, "image_size", "crop_size", "img_size", default=64)
    return side, side


def _images(model: Any, config: Any) -> Iterator[Any]:
    channels = _first(config, "num_channels", "in_channels", default=3)
    for side in dict.fromkeys((_side(config)[0], 64, 224)):
        yield _normal(BATCH, channels, side, side)


def _features(config: Any, *, transposed: bool = False) -> Iterator[Any]:
    bins = _first(
        config,
        "num_mel_bins",
        "feature_size",
        "input_feat_per_channel",
        "input_dim",
        "feature_projection_input_dim",
        default=80,
    )
    frames = 2 * (_first(config, "max_source_positions", default=0) or _first(config, "max_length", default=64) // 2)
    if transposed:
        yield _normal(BATCH, _first(config, "max_length", default=64), bins)
        return
    yield _normal(BATCH, bins, frames)
    yield _normal(BATCH, 64, bins)
