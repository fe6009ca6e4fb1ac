"""The recipe "auto": what a model's own configuration and the code of its class declare.

`_init_weights` of transformers is run on fresh twins of a model. Tests: `tests/auditing/test_torch_audit.py`.
"""

import contextlib
import copy
import dataclasses
import inspect
import math
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from scipy.stats import truncnorm

from sdeinfer.auditing._law import law_of
from sdeinfer.auditing._recipe import Declared, Recipe, nothing
from sdeinfer.auditing._recipes import GPT2_SD, normal
from sdeinfer.passes._account import Matrix
from sdeinfer.passes._attention import Logits
from sdeinfer.passes._inputs import text_part
from sdeinfer.passes._models import named
from sdeinfer.passes._record import StoredTensor

TWIN_PARAMETERS = 200_000_000
"""Number of parameters up to which twins get memory; of larger models only calls of initialisers are read."""


def automatic(model: Any) -> Recipe | None:
    """The recipe that a model's configuration and its class declare; None for models without one."""
    config = getattr(model, "config", None)
    kind = getattr(config, "model_type", None)
    if config is None or not isinstance(kind, str):
        return None
    text, by_name = text_part(config), declared_by(model)
    base = normal(configured_sd(model) or GPT2_SD)
    scale = None if by_name else _number(config, "layerscale_value", "layer_scale_init_value")

    def gain(matrix: Matrix) -> float | None:
        law, usual = by_name.get(matrix.array), 1.0 if matrix.role == "norm" else 0.0
        if law is None:
            return usual if not by_name or not matrix.array else None
        return law.mean if law.sd == 0 and (law.values is None or np.ptp(law.values) < 1e-6) else None

    recipe = Recipe(
        f"{'`_init_weights`' if by_name else 'normal, the configuration'} of {kind}",
        f"configuration of {kind}, transformers/models/{kind}",
        nothing if by_name else base.sd,
        nothing if by_name else base.bias_sd,
        nothing if by_name else base.law,
        embedding=_embedding(text),
        layer_scale=lambda matrix: scale,
        logits=_logits(text),
        entries=lambda matrix: by_name.get(matrix.array),
        causal=_causal(model, config),
        gain=gain,
    )
    multiplier = _multiplier(text)
    return recipe if multiplier is None else dataclasses.replace(recipe, multiplier=multiplier)


def configured_sd(model: Any) -> float | None:
    """`initializer_range`, or what stands for it, as `_init_weights` in transformers/modeling_utils.py reads it."""
    config = getattr(model, "config", None)
    if not hasattr(config, "model_type"):
        return None
    for name in ("initializer_range", "init_std", "initializer_factor"):
        if hasattr(config, name):
            return float(getattr(config, name) or GPT2_SD)
    return float(getattr(text_part(config), "initializer_range", GPT2_SD) or GPT2_SD)


def _number(config: Any, *names: str) -> float | None:
    values = (getattr(config, name, None) for name in names)
    return next(
        (float(value) for value in values if isinstance(value, int | float) and not isinstance(value, bool)), None
    )


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

    def factor(logits: Logits) -> float | None:
        if stated is not None:
            return stated
        if scalar is not None:
            return scalar**-0.5
        if getattr(config, "scale_attn_weights", True) is False:
            return 1.0
        if logits.normed:
            return None
        plain = logits.head_size**-0.5
        return plain / (logits.layer + 1) if by_layer and logits.layer is not None else plain

    return factor


def _causal(model: Any, config: Any) -> bool | None:
    """Decoders say so: in their class, in their configuration, or in their attention modules."""
    if getattr(config, "is_encoder_decoder", False):
        return None
    flags = [bool(flag) for module in model.modules() if isinstance(flag := getattr(module, "is_causal", None), bool)]
    if flags:
        return True if all(flags) or getattr(config, "is_decoder", False) else None
    decoder = "ForCausalLM" in type(model).__name__
    return True if getattr(config, "is_decoder", decoder) else None


def twin_of(model: Any, seed: int = 1) -> Any:
    """Another model of the same class and configuration, as its library initialises it."""
    torch = sys.modules["torch"]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return type(model)(copy.deepcopy(model.config))


def declared_by(model: Any) -> dict[str, Declared]:
    """Each parameter's law by the last call of an initialiser, or its values, or another draw of them."""
    init, torch = sys.modules.get("transformers.initialization"), sys.modules["torch"]
    if init is None:
        return {}
    tensors = named(model.named_parameters(remove_duplicate=False))
    small = sum(tensor.numel() for tensor in tensors.values()) <= TWIN_PARAMETERS
    calls: dict[int, Declared | None] = {}
    try:
        with torch.random.fork_rng(devices=[]), torch.device("cpu" if small else "meta"), _recorded(init, calls):
            torch.manual_seed(1)
            first = type(model)(_untied(model.config))
            for module in first.modules():
                module._is_hf_initialized = False
            first.initialize_weights()
    except Exception:
        return {}
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    firsts = {name: tensor for name, tensor in first.named_parameters() if shapes.get(name) == tensor.shape}
    laws = {name: calls.get(id(tensor)) for name, tensor in firsts.items()}
    missing = [name for name, law in laws.items() if law is None]
    if small and missing:
        laws |= _compared(firsts, model, missing)
    return {name: law for name, law in laws.items() if law}


def _compared(firsts: dict[str, Any], model: Any, names: list[str]) -> dict[str, Declared]:
    """Parameters that no initialiser was called for: those of two twins are equal, or two draws."""
    from sdeinfer.passes._torch import parameter_of

    seconds = named(twin_of(model, seed=2).named_parameters(remove_duplicate=False))
    laws = {}
    for name in names:
        first, second = (parameter_of(twin[name]).entries() for twin in (firsts, seconds))
        if not (np.isfinite(first).all() and np.isfinite(second).all() and first.shape == second.shape):
            continue
        if np.allclose(first, second, rtol=1e-6, atol=1e-12):
            laws[name] = Declared(float(first.mean()), 0.0, "constant", values=first)
        else:
            law = law_of(StoredTensor((2 * len(first),), np.concatenate([first, second]).__getitem__))
            laws[name] = Declared(law.mean, law.sd, error=law.error)
    return laws


def _untied(config: Any) -> Any:
    """A configuration whose embedding and head are two tensors, as they are when they are initialised."""
    config = copy.deepcopy(config)
    for part in (config, *(value for value in vars(config).values() if hasattr(value, "model_type"))):
        if getattr(part, "tie_word_embeddings", False):
            part.tie_word_embeddings = False
    return config


@contextlib.contextmanager
def _recorded(init: Any, calls: dict[int, Declared | None]) -> Iterator[None]:
    """Initialisers that also note what they do."""
    tensors: list[Any] = []  # so that no other tensor gets the number of one that was freed
    names = [name for name in (*init.TORCH_INIT_FUNCTIONS, "copy_") if hasattr(init, name)]
    originals = {name: getattr(init, name) for name in names}

    def recorder(name: str) -> Any:
        signature = inspect.signature(originals[name])

        def record(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            tensor = bound.arguments["tensor"]
            tensors.append(tensor)
            base = tensor._base
            if base is None or base.shape == tensor.shape:
                calls[id(tensor if base is None else base)] = _law(name, tensor, bound.arguments)
            elif name != "zeros_":  # a part of a matrix; a row of zeros is that of padding
                calls[id(base)] = None
            return originals[name](*args, **kwargs)

        return record

    try:
        for name in names:
            setattr(init, name, recorder(name))
        yield
    finally:
        for name, original in originals.items():
            setattr(init, name, original)


def _law(name: str, tensor: Any, arguments: dict[str, Any]) -> Declared | None:
    torch = sys.modules["torch"]
    fans = {"fan_in": 1.0, "fan_out": 1.0}
    if tensor.dim() > 1:
        fans = dict(zip(fans, torch.nn.init._calculate_fan_in_and_fan_out(tensor), strict=True))
    law = "uniform" if "uniform" in name else "normal"
    match name:
        case "zeros_":
            return Declared(0.0, 0.0, "constant")
        case "ones_" | "constant_":
            return Declared(float(arguments.get("val", 1.0)), 0.0, "constant")
        case "normal_":
            return Declared(float(arguments["mean"]), float(arguments["std"]), law)
        case "uniform_":
            low, high = arguments["a"], arguments["b"]
            return Declared((low + high) / 2, (high - low) / math.sqrt(12), law)
        case "trunc_normal_" if arguments["std"] > 0:
            low, high = ((arguments[end] - arguments["mean"]) / arguments["std"] for end in ("a", "b"))
            cut = float(truncnorm.std(low, high))
            return Declared(float(arguments["mean"]), arguments["std"] * cut, "truncated" if high < 5 else law)
        case "xavier_uniform_" | "xavier_normal_":
            return Declared(0.0, arguments["gain"] * math.sqrt(2 / sum(fans.values())), law)
        case "kaiming_uniform_" | "kaiming_normal_":
            gain = torch.nn.init.calculate_gain(arguments["nonlinearity"], arguments["a"])
            return Declared(0.0, gain / math.sqrt(fans[arguments["mode"]]), law)
        case "orthogonal_":
            rows, columns = tensor.shape[0], tensor.numel() // tensor.shape[0]
            return Declared(0.0, arguments["gain"] / math.sqrt(max(rows, columns)), "orthogonal")
    return None
