"""Inputs of a model: a default for Hugging Face models, and how many tokens of them are observed."""

import inspect
import sys
from collections.abc import Mapping
from typing import Any

from sdeinfer._arguments import at_least_one
from sdeinfer._files import InputError
from sdeinfer.auditing._describe import configuration_of, drawn
from sdeinfer.blocks._order import BlockOrder
from sdeinfer.layers import AbstractLayer

MOST_TOKENS = 12
"""Largest number of observed tokens, of all prompts: the law of an increment is one of m (m + 1)/2 numbers."""

TOKENS = 4
"""Number of tokens of a default prompt."""


def default_inputs(model: Any) -> Any:
    """Inputs for a Hugging Face model: a prompt of four tokens, or an image of 2 × 2 patches.

    Arguments:
        model: a module, or a function that draws one.

    Returns:
        Keyword arguments: `input_ids` of shape (1, 4), all different and none of them special; or `pixel_values` of
        shape (1, channels, height, width), normal.

    Raises:
        InputError: for other models, and for configurations that no such input fits.
    """
    network, _ = drawn(model)
    name, kind = type(network).__name__, getattr(network, "main_input_name", None)
    config = configuration_of(network) if kind else None
    if config is None or kind not in ("input_ids", "pixel_values"):
        raise InputError(f"inputs: needed for {name}: its argument, or a dict of keyword arguments; at most 12 tokens")
    return _prompt(network, config) if kind == "input_ids" else _image(network, config)


def check_inputs(model: Any, inputs: Any, architecture: AbstractLayer, *, tokens: int = TOKENS) -> slice | None:
    """The tokens of each prompt to observe: the first ones if the law of these holds by itself, else all (None)."""
    at_least_one(tokens=tokens)
    config = configuration_of(drawn(model)[0])
    order = BlockOrder.of(architecture, depth=1)
    first = not order.has_attention or order.pattern.causal
    mask = inputs.get("attention_mask") if isinstance(inputs, Mapping) else None
    if mask is not None and len(mask.shape) == 2 and not bool((mask != 0).all()):
        raise InputError("inputs: attention_mask leaves tokens out: pass prompts of one length without padding")
    shape = _shape_of(inputs, config)
    if shape is None:
        return slice(0, tokens) if first else None
    prompts, length = shape
    observed = min(tokens, length) if first else length
    if prompts * observed > MOST_TOKENS:
        how = "pass fewer, or fewer prompts" if first else "without a causal mask all are observed: pass shorter inputs"
        counted = f"{prompts} × {observed}" if prompts > 1 else f"{observed}"
        raise InputError(f"inputs: {counted} tokens to observe, at most {MOST_TOKENS} are possible; {how}")
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    if window is not None and window < observed:
        raise InputError(f"inputs: a sliding window of {window} tokens is below the {observed} tokens to observe")
    return slice(0, observed) if first else None


def _prompt(network: Any, config: Any) -> dict[str, Any]:
    """Tokens from the middle of the vocabulary, since special ones are at its ends."""
    torch = sys.modules["torch"]
    special = set()
    for name, value in config.to_dict().items():
        if name.endswith(("_token_id", "_token_index")):
            special |= set(value if isinstance(value, list) else [value])
    usual = [token for token in range(config.vocab_size) if token not in special]
    if len(usual) < TOKENS:
        raise InputError(f"inputs: needed for {type(network).__name__}: its vocabulary has {len(usual)} usual tokens")
    start = (len(usual) - TOKENS) // 2
    return {"input_ids": torch.tensor([usual[start : start + TOKENS]], device=network.device)}


def _image(network: Any, config: Any) -> dict[str, Any]:
    """An image of independent normal pixels, of which no two patches are equal."""
    torch = sys.modules["torch"]
    patch = getattr(config, "patch_size", None)
    if patch is None:
        raise InputError(f"inputs: needed for {type(network).__name__}: an image of few patches")
    sides = [2 * side for side in _pair(patch)]
    options = {}
    if "interpolate_pos_encoding" in inspect.signature(network.forward).parameters:
        options["interpolate_pos_encoding"] = True
    elif _pair(config.image_size) != tuple(sides):
        raise InputError(f"inputs: {type(network).__name__} takes no smaller image: make it with image_size {sides[0]}")
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randn(1, getattr(config, "num_channels", 3), *sides, generator=generator)
    return {"pixel_values": pixels.to(network.device, network.dtype)} | options


def _pair(size: Any) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else tuple(size)


def _shape_of(inputs: Any, config: Any) -> tuple[int, int] | None:
    """Numbers of prompts and of their tokens; None if the model alone knows."""
    given = dict(inputs) if isinstance(inputs, Mapping) else {"": inputs}
    arrays = {name: tuple(value.shape) for name, value in given.items() if hasattr(value, "shape")}
    if "input_ids" in arrays:
        return arrays["input_ids"][0], arrays["input_ids"][-1]
    if "pixel_values" in arrays and getattr(config, "patch_size", None) is not None:
        prompts, *_, height, width = arrays["pixel_values"]
        rows, columns = (side // patch for side, patch in zip((height, width), _pair(config.patch_size), strict=True))
        return prompts, rows * columns + 1
    name = next((each for each in ("inputs_embeds", "hidden_states", "") if each in arrays), None)
    if name is None:
        return None
    # Whole numbers are tokens; other arrays have the features of tokens in the last dimension.
    match arrays[name] if "int" in str(given[name].dtype) else arrays[name][:-1]:
        case (length,):
            return 1, length
        case (prompts, length):
            return prompts, length
    return None
