"""Inputs of a pass: those given, bound to a model's arguments, or two items of the main input of a model of PyTorch.

Tests: `tests/auditing/test_torch_audit.py`.
"""

import inspect
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from sdeinfer._files import InputError

TOKENS = 8
"""Number of tokens of a prompt."""

BATCH = 2
"""Number of items; a second pass changes one of them."""

FRAMES = 64
"""Number of frames of a sound, or of steps of a series."""

SIDE = 4
"""Number of patches along each side of an image whose patches are the rows of one array."""

type Inputs = tuple[tuple, dict[str, Any]]
"""Positional and keyword arguments."""


def bound(inputs: Any, names: list[str] | None, convert: Callable[[Any], Any]) -> Inputs:
    """Inputs as arguments: a mapping of names that the model takes as keywords, anything else as the first argument.

    Arguments:
        inputs: an array, a mapping or a tuple, nested or not.
        names: names of the model's arguments; None if it takes any keyword.
        convert: makes a tensor of an array.
    """
    made = mapped(inputs, convert)
    if isinstance(inputs, Mapping) and (names is None or {*inputs} <= {*names}):
        return (), {str(name): value for name, value in made.items()}
    if isinstance(inputs, Mapping) and len(names or ()) > 1 and {*inputs} & {*(names or ())}:
        unknown = next(str(name) for name in inputs if name not in (names or ()))
        raise InputError(f"inputs: the model takes {', '.join(names or ())}, got {unknown!r}")
    return (made,), {}


def argument_names(function: Callable[..., Any]) -> list[str] | None:
    """Names of a function's arguments; None if it takes any keyword."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError as error:
        raise InputError("model: its arguments are not known: pass the module that was compiled") from error
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return [parameter.name for parameter in parameters if parameter.kind is not parameter.VAR_POSITIONAL]


def mapped(value: Any, function: Callable[[Any], Any]) -> Any:
    """Nested mappings, lists and tuples with a function of each leaf."""
    if isinstance(value, Mapping):
        return {key: mapped(item, function) for key, item in value.items()}
    nested = isinstance(value, list) and any(isinstance(x, Mapping) or hasattr(x, "shape") for x in value)
    if isinstance(value, tuple) or nested:
        return type(value)(mapped(item, function) for item in value)
    return function(value)


def as_tensor(value: Any, module: Any) -> Any:
    """An array, or a list of numbers, as a tensor in the precision of a module."""
    torch = sys.modules["torch"]
    if isinstance(value, np.ndarray | list) or (hasattr(value, "__array__") and not torch.is_tensor(value)):
        value = torch.as_tensor(np.asarray(value))
        parameter = next(iter(module.parameters()), None)
        return value.to(parameter.dtype) if value.is_floating_point() and parameter is not None else value
    return value


def candidates(model: Any) -> Iterator[Inputs]:
    """Inputs to try in turn for a module of PyTorch: the main one by the name that its library declares."""
    names = [name for name in inspect.signature(model.forward).parameters if name not in ("args", "kwargs")]
    mains = getattr(model, "main_input_name", None)
    config = getattr(model, "config", None)
    if mains is not None and config is not None:
        mains = [mains] if isinstance(mains, str) else list(mains)
        options = {"use_cache": False} if "use_cache" in names else {}
        for given in _of_library(model, config, [name for name in mains if name in names] or ["input_ids"]):
            yield (), given | options
    for value in (*_plain(model), *(_normal(BATCH, 3, side, side) for side in (32, 64, 224))):
        yield (value,), {}


def required_arguments(model: Any) -> list[str]:
    """Arguments that a forward pass cannot do without, or the main one."""
    parameters = inspect.signature(model.forward).parameters.items()
    required = [name for name, p in parameters if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
    main = getattr(model, "main_input_name", None)
    return required or ([main] if isinstance(main, str) else list(main or ()))


def _of_library(model: Any, config: Any, mains: list[str]) -> Iterator[dict[str, Any]]:
    """Values of the main inputs of a model of Hugging Face; several where sizes are not clear."""
    arguments = required_arguments(model)
    decoder = getattr(config, "is_encoder_decoder", False) or "decoder_input_ids" in arguments
    tokens = _tokens(_size(config, "vocab_size", default=100), _special(text_part(config)))
    kinds = {"pixel_values": _images(config), "input_features": _sounds(model, config)}
    series = _size(config, "context_length", default=FRAMES), _size(config, "num_input_channels", default=1)
    kinds["past_values"] = [_normal(BATCH, *series)]
    kinds["input_values"] = [_normal(BATCH, 4000), _normal(BATCH, 1, 4000), *kinds["input_features"]]
    towers = [name for name in inspect.signature(model.forward).parameters if name in kinds]
    for grid in (name for name in arguments if name.endswith("grid_thw")):
        for patches in _patches(model, SIDE**2):
            yield {arguments[0]: patches, grid: sys.modules["torch"].tensor([[1, SIDE, SIDE]])}
    mains += [name for name in arguments if name not in mains and (name in kinds or name == "input_ids")]
    for names in dict.fromkeys((tuple(mains), tuple(dict.fromkeys((*mains, *towers))))):
        values = {name: kinds.get(name, [tokens]) for name in names}
        for place in range(max(len(choices) for choices in values.values())):
            given = {name: choices[min(place, len(choices) - 1)] for name, choices in values.items()}
            yield given | ({"decoder_input_ids": tokens} if decoder else {})


def _images(config: Any) -> list[Any]:
    channels = _size(config, "num_channels", "in_channels", "in_chans", default=3)
    side = _size(config, "image_size", "crop_size", "img_size", "max_img_size", "input_size", default=64)
    sides = dict.fromkeys((side, 64, 224))
    frames = _size(config, "num_frames", "tubelet_size", default=2)
    return [*(_normal(BATCH, channels, n, n) for n in sides), _normal(BATCH, frames, channels, side, side)]


def _patches(model: Any, number: int) -> Iterator[Any]:
    """Patches of one image as the first matrix or convolution reads them, each as a row or as a block."""
    for module in model.modules():
        if (hasattr(module, "in_features") or hasattr(module, "in_channels")) and hasattr(module, "weight"):
            shape = module.weight.shape[1:]
            yield _normal(number, math.prod(shape))
            yield _normal(number, *shape)
            return


def _sounds(model: Any, config: Any) -> list[Any]:
    bins = _size(config, "num_mel_bins", "feature_size", "input_feat_per_channel", "input_dim", default=80)
    frames = 2 * _size(config, "max_source_positions", default=FRAMES // 2)
    read = next((module.in_features for module in model.modules() if hasattr(module, "in_features")), bins)
    lengths = dict.fromkeys((_size(config, "max_length", default=FRAMES), FRAMES))
    shapes = [(length, n) for length in lengths for n in dict.fromkeys((bins, 128, read))]
    return [_normal(BATCH, bins, frames), *(_normal(BATCH, *shape) for shape in shapes)]


def text_part(config: Any) -> Any:
    """The part of a configuration that is about text, or the configuration itself."""
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def _size(config: Any, *names: str, default: int) -> int:
    """The first of some sizes that a configuration, or one of its parts, has."""
    for name in names:
        value = getattr(config, name, None)
        value = value[-1] if isinstance(value, list | tuple) and value else value
        if isinstance(value, int) and value and not isinstance(value, bool):
            return value
    for part in vars(config).values():
        if hasattr(part, "model_type") and (value := _size(part, *names, default=0)):
            return value
    return default


def _plain(model: Any) -> Iterator[Any]:
    """Tokens for an embedding, images for a convolution, vectors for a matrix: what comes first."""
    for module in model.modules():
        kind, weight = type(module).__name__, getattr(module, "weight", None)
        if "Embedding" in kind and weight is not None:
            yield _tokens(weight.shape[0], set())
        elif kind.startswith("Conv2d") and weight is not None:
            sizes = getattr(model, "pretrained_cfg", None) or getattr(model, "default_cfg", None) or {}
            side = sizes.get("input_size", (0, 0, 0))[-1] or _attribute(model, "img_size", "image_size") or 64
            yield from (_normal(BATCH, module.in_channels, n, n) for n in dict.fromkeys((side, 64, 224)))
        elif "Conv1d" in kind and weight is not None:
            yield _normal(BATCH, module.in_channels, FRAMES)
        elif weight is not None and weight.dim() == 2:
            yield _normal(BATCH, TOKENS, getattr(module, "in_features", weight.shape[-1]))
            yield _normal(BATCH, weight.shape[-1])
        elif weight is not None and weight.dim() == 1 and "Norm" in kind:
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


def _special(config: Any) -> set[int]:
    special: set[int] = set()
    for name, value in config.to_dict().items():
        if name.endswith(("_token_id", "_token_index")):
            special |= {token for token in (value if isinstance(value, list) else [value]) if isinstance(token, int)}
    return special


def _tokens(vocabulary: int, special: set[int]) -> Any:
    """Different tokens from the middle of the vocabulary, since special ones are at its ends."""
    usual = [token for token in range(min(vocabulary, 5000)) if token not in special] or [0]
    start = max((len(usual) - BATCH * TOKENS) // 2, 0)
    chosen = [usual[(start + k) % len(usual)] for k in range(BATCH * TOKENS)]
    return sys.modules["torch"].tensor(chosen).reshape(BATCH, TOKENS)


def _normal(*shape: int) -> Any:
    values = np.random.default_rng(0).standard_normal(shape, np.float32)
    return sys.modules["torch"].from_numpy(values)
