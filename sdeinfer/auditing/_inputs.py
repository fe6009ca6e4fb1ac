"""Inputs for a pass: two items of a batch with few tokens, a small image or a short sound, that fit a model.

Tests: `tests/auditing/test_torch_audit.py`.
"""

import inspect
import itertools
import math
import re
import sys
from collections.abc import Generator, Iterator
from typing import Any

import numpy as np

TOKENS = 8
"""Number of tokens of a prompt."""

BATCH = 2
"""Number of items; a second pass changes one of them."""

FRAMES = 64
"""Number of frames of a sound, or of steps of a series."""

MOST = 16
"""Inputs that are tried of one choice of arguments."""


def candidates(model: Any) -> Generator[dict[str, Any], str, None]:
    """Inputs to try in turn for a module of PyTorch, as keyword arguments; it is sent the error of the last ones."""
    names = [name for name in inspect.signature(model.forward).parameters if name not in ("self", "args", "kwargs")]
    config = getattr(model, "config", None)
    if config is not None and hasattr(config, "model_type"):
        yield from _of_hugging_face(model, config, names)
    for value in (*_plain(model), *(_normal(BATCH, 3, side, side) for side in (32, 64, 224))):
        yield {names[0] if names else "x": value}


def needed(model: Any) -> list[str]:
    """Arguments that a forward pass cannot do without, or the main one."""
    parameters = inspect.signature(model.forward).parameters.items()
    found = [
        name for name, each in parameters if each.default is each.empty and each.kind is each.POSITIONAL_OR_KEYWORD
    ]
    main = getattr(model, "main_input_name", None)
    return found or ([main] if isinstance(main, str) else list(main or ()))


def _of_hugging_face(model: Any, config: Any, names: list[str]) -> Generator[dict[str, Any], str, None]:
    """The main input with what is required, then with what an error names, then with all that the model takes."""
    made = _Inputs(model, config)
    mains = getattr(model, "main_input_name", "input_ids")
    mains = [mains] if isinstance(mains, str) else list(mains)
    required = needed(model)
    mains = [name for name in mains if name in names] or ["input_ids"]
    first = [*mains, *required]
    if getattr(config, "is_encoder_decoder", False) or "decoder_input_ids" in required:
        first += ["decoder_input_ids"]
    options = {"use_cache": False} if "use_cache" in names else {}
    towers = ["input_ids", "pixel_values", "input_features", "input_values"]
    known = [name for name in names if made.known(name) and name not in OTHER]
    for chosen in (first, [*first, *towers], [*first, *known], ["input_ids", "decoder_input_ids"], ["pixel_values"]):
        chosen = [name for name in dict.fromkeys(chosen) if name in names and made.known(name)]
        places = itertools.product(*(range(len(made.values(name))) for name in chosen))
        for each in sorted(itertools.islice(places, MOST * MOST), key=sum)[:MOST]:
            given = {name: made.values(name)[place] for name, place in zip(chosen, each, strict=True)}
            error = yield given | options
            for _ in range(3):  # an error often names what is missing
                missing = [name for name in names if name not in given and re.search(rf"\b{name}\b", error or "")]
                more = {name: made.values(name)[0] for name in missing if made.known(name)}
                if "Cache" in (error or "") and "use_cache" not in given:
                    more |= {"use_cache": False}
                if not more:
                    break
                given |= dict(list(more.items())[:1])
                error = yield given | options


PACKED = {"grid_thw", "image_grid_thw", "spatial_shapes", "pixel_position_ids", "target_sizes"}
"""Arguments that say how patches of several images are packed."""

OTHER = ("inputs_embeds", "decoder_inputs_embeds", "position_ids", "token_type_ids", "hidden_states", "labels")
"""Arguments that stand for others, or that are made where they are left out."""


class _Inputs:
    """Values of arguments of Hugging Face's models, by what their names say; several where sizes are not clear."""

    def __init__(self, model: Any, config: Any):
        self.model, self.config = model, config
        self.text = text_part(config)
        self.made: dict[str, list[Any]] = {}

    def known(self, name: str) -> bool:
        return bool(self.values(name))

    def values(self, name: str) -> list[Any]:
        if name not in self.made:
            self.made[name] = self._values(name)
        return self.made[name]

    def size(self, *names: str, default: Any = None) -> Any:
        """The first of some sizes that the configuration, or one of its parts, has."""
        for part in _parts(self.config):
            for name in names:
                value = getattr(part, name, None)
                if isinstance(value, int | list | tuple) and value and not isinstance(value, bool):
                    return value if isinstance(value, int) else value[-1]
        return default

    def _values(self, name: str) -> list[Any]:
        torch = sys.modules["torch"]
        channels = self.size("num_channels", "in_channels", "in_chans", default=3)
        side = self._side()
        sides = list(dict.fromkeys((side, (side[1], side[1]), *((each, each) for each in (64, 224)))))
        width = _first(self.text, "hidden_size", "d_model", default=64)
        match name:
            case "bbox":
                box = torch.tensor([1, 1, 2, 2]).expand(BATCH, TOKENS, 4)
                return [box, _normal(BATCH, TOKENS, 8).abs().clamp(0, 1), box / 4]
            case "pixel_values" | "prompt_pixel_values":
                images = [_normal(BATCH, channels, *side) for side in sides]
                frames = self.size("num_frames", "tubelet_size", default=2)
                if PACKED & {*inspect.signature(self.model.forward).parameters}:
                    packed = self._patches()
                    items = [each.reshape(BATCH, -1, each.shape[-1]) for each in packed[:-1]]
                    return [*packed, *items, *images]
                return [*images, _normal(BATCH, frames, channels, *sides[0]), _normal(BATCH, 2, channels, *sides[0])]
            case "pixel_values_videos":
                frames = self.size("num_frames", "frames_per_clip", default=2)
                return [_normal(BATCH, frames, channels, *side) for side in sides]
            case "prompt_masks":
                return [_normal(BATCH, channels, *side) for side in sides]
            case "hidden_states":
                return self._patches()
            case "grid_thw" | "image_grid_thw":
                return [torch.tensor([[1, self._grid(), self._grid()]] * BATCH)]
            case "spatial_shapes" | "target_sizes":
                return [torch.tensor([[self._grid()] * 2] * BATCH)]
            case "merge_sizes":
                return [torch.tensor([1] * BATCH)]
            case "pixel_position_ids":
                grid = torch.cartesian_prod(torch.arange(self._grid()), torch.arange(self._grid()))
                return [grid.expand(BATCH, -1, 2)]
            case "input_features" | "audio_mel" | "inputs":
                return self._features()
            case "input_values":
                sounds = [_normal(BATCH, 1, 4000), _normal(BATCH, 4000)]
                return [*sounds[::-1], *self._features(), _tokens(self._vocabulary(), set())]
            case "past_values" | "past_observed_mask" | "past_time_features" | "past_values_padding":
                steps = self.size("context_length", default=FRAMES)
                steps += max(getattr(self.config, "lags_sequence", None) or [0])
                series = self.size("num_input_channels", "input_size", default=1)
                shapes = [(BATCH, steps, series), (BATCH, steps)] if series > 1 else [(BATCH, steps), (BATCH, steps, 1)]
                if name == "past_time_features":
                    return [_normal(BATCH, steps, self.size("num_time_features", default=1))]
                one = {"past_observed_mask": torch.ones, "past_values_padding": torch.zeros}.get(name, _normal)
                return [one(*shape) for shape in shapes]
            case "states" | "actions" | "rewards" | "returns_to_go" | "timesteps" | "freq" | "lang_ids":
                of = {"states": self.size("state_dim"), "actions": self.size("act_dim")}.get(name, 1)
                if name in ("freq", "lang_ids"):
                    return [torch.zeros(BATCH, 1, dtype=torch.long), torch.zeros(BATCH, dtype=torch.long)]
                times = torch.arange(TOKENS).expand(BATCH, TOKENS)
                return [times if name == "timesteps" else _normal(BATCH, TOKENS, of)]
            case "visual_feats" | "visual_pos":
                return [_normal(BATCH, TOKENS, self.size("visual_feat_dim") if name == "visual_feats" else 4)]
            case "encoder_hidden_states":
                return [_normal(BATCH, TOKENS, self.size("encoder_hidden_size", "hidden_size", default=64))]
            case "context_hidden_states" | "noise_embeds" | "query_embeds" | "inputs_embeds" | "latents":
                read = {each.in_features for each in self.model.modules() if hasattr(each, "in_features")}
                rows = [_normal(BATCH, TOKENS, each) for each in (width, *sorted(read - {width}))]
                return [rows[0], _normal(BATCH, width, TOKENS), *rows[1:]]
        if name.endswith("mask") and ("feature" in name or "mel" in name):
            first, second, *_ = self._features()
            frames = dict.fromkeys((first.shape[2], second.shape[1]))
            return [torch.ones(BATCH, each, dtype=torch.bool) for each in frames]
        if name.endswith("attention_mask") or name == "pixel_attention_mask":
            tokens = self._grid() ** 2 if name.startswith("pixel") else TOKENS
            return [torch.ones(BATCH, tokens, dtype=torch.long)]
        if name.endswith("input_ids") or name == "task_inputs":
            tokens = _tokens(self._vocabulary(), _special(self.text))
            books = self.size("num_channels", "num_codebooks", default=9)
            return [tokens, tokens[..., None].expand(BATCH, TOKENS, books), tokens[..., None].expand(-1, -1, books + 1)]
        return []

    def _vocabulary(self) -> int:
        return _first(self.text, "vocab_size", default=None) or self.size("vocab_size", default=100)

    def _side(self) -> tuple[int, int]:
        for part in _parts(self.config):
            for name in ("image_size", "crop_size", "img_size", "max_img_size", "input_size"):
                side = getattr(part, name, None)
                if isinstance(side, int) and side:
                    return side, side
                if isinstance(side, list | tuple) and len(side) == 2 and all(isinstance(each, int) for each in side):
                    return side[0], side[1]
        return 64, 64

    def _grid(self) -> int:
        return 2 * self.size("spatial_merge_size", "merge_kernel_size", "merge_size", default=2)

    def _patches(self) -> list[Any]:
        """Patches of all images in one axis: as many entries as the first weights read, flat and as images."""
        patch, times = self.size("patch_size", default=8), self.size("temporal_patch_size", default=2)
        channels = self.size("num_channels", "in_channels", "in_chans", default=3)
        read = (each.weight for each in self.model.modules() if type(each).__name__.startswith(("Linear", "Conv")))
        entries = [next((math.prod(each.shape[1:]) for each in read), 1), channels * patch**2 * times]
        count = BATCH * self._grid() ** 2
        flat = [_normal(count, each) for each in dict.fromkeys((*entries, channels * patch**2))]
        return [*flat, _normal(count, channels, patch, patch)]

    def _features(self) -> list[Any]:
        bins = self.size("num_mel_bins", "n_mels", "feature_size", "input_feat_per_channel", "input_feat_size",
                         "input_dim", "feature_projection_input_dim", "d_model", default=80)  # fmt: skip
        frames = 2 * self.size("max_source_positions", default=FRAMES // 2)
        frames = self.size("n_window", default=frames // 2) * 2
        length = self.size("max_length", default=FRAMES)
        length = length if 16 < length <= 1024 else FRAMES
        read = next((each.in_features for each in self.model.modules() if hasattr(each, "in_features")), bins)
        shapes = [(BATCH, bins, frames), *((BATCH, length, each) for each in dict.fromkeys((bins, 128, read)))]
        return [_normal(*shape) for shape in (*shapes, (BATCH, 1, length, bins))]


def text_part(config: Any) -> Any:
    """The part of a configuration that is about text, or the configuration itself."""
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def _parts(config: Any) -> Iterator[Any]:
    """A configuration and those in it."""
    yield config
    for value in vars(config).values():
        if hasattr(value, "model_type"):
            yield from _parts(value)


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
            yield _normal(BATCH, module.in_channels, FRAMES)
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


def _first(config: Any, *names: str, default: Any) -> Any:
    return next((value for name in names if isinstance(value := getattr(config, name, None), int)), default)


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
