"""The law of each parameter by a library's own code: `_init_weights` of transformers, on tensors without memory.

Tests: `tests/auditing/test_torch_audit.py`.
"""

import contextlib
import copy
import inspect
import math
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

from scipy.stats import truncnorm


class Declared(NamedTuple):
    """Mean, σ and law of a parameter."""

    mean: float
    sd: float
    law: str


def declared_by(model: Any) -> dict[str, Declared]:
    """The last call of an initialiser for each parameter that the code of a model's class initialises as a whole."""
    init = sys.modules.get("transformers.initialization")
    if init is None:
        return {}
    torch = sys.modules["torch"]
    calls: dict[int, Declared | None] = {}
    try:
        with torch.device("meta"), torch.random.fork_rng(devices=[]), _recorded(init, calls):
            twin = type(model)(_untied(model.config))
            for module in twin.modules():
                module._is_hf_initialized = False
            twin.initialize_weights()
    except Exception:
        return {}
    found = {name: calls.get(id(each)) for name, each in twin.named_parameters()}
    shapes = {name: each.shape for name, each in twin.named_parameters()}
    own = dict(model.named_parameters())
    return {name: each for name, each in found.items() if each and name in own and own[name].shape == shapes[name]}


def _untied(config: Any) -> Any:
    """A configuration whose embedding and head are two tensors, as they are when they are initialised."""
    config = copy.deepcopy(config)
    for part in (config, *(each for each in vars(config).values() if hasattr(each, "model_type"))):
        if getattr(part, "tie_word_embeddings", False):
            part.tie_word_embeddings = False
    return config


@contextlib.contextmanager
def _recorded(init: Any, calls: dict[int, Declared | None]) -> Iterator[None]:
    """Initialisers that note what they would do."""
    kept: list[Any] = []  # so that no other tensor gets the number of one that was freed
    names = [name for name in (*init.TORCH_INIT_FUNCTIONS, "copy_") if hasattr(init, name)]
    originals = {name: getattr(init, name) for name in names}

    def recorder(name: str) -> Any:
        signature = inspect.signature(originals[name])

        def record(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            tensor = bound.arguments["tensor"]
            kept.append(tensor)
            base = tensor._base
            if base is None or base.shape == tensor.shape:
                calls[id(tensor if base is None else base)] = _law(name, tensor, bound.arguments)
            elif name != "zeros_":  # a part of a matrix; a row of zeros is that of padding
                calls[id(base)] = None
            return tensor

        return record

    try:
        for name in names:
            setattr(init, name, recorder(name))
        yield
    finally:
        for name, original in originals.items():
            setattr(init, name, original)


def _law(name: str, tensor: Any, of: dict[str, Any]) -> Declared | None:
    torch = sys.modules["torch"]
    fans = {"fan_in": 1.0, "fan_out": 1.0}
    if tensor.dim() > 1:
        fans = dict(zip(fans, torch.nn.init._calculate_fan_in_and_fan_out(tensor), strict=True))
    law = "uniform" if "uniform" in name else "normal"
    match name:
        case "zeros_":
            return Declared(0.0, 0.0, "zeros")
        case "ones_" | "constant_":
            return Declared(float(of.get("val", 1.0)), 0.0, "constant")
        case "normal_":
            return Declared(float(of["mean"]), float(of["std"]), law)
        case "uniform_":
            return Declared((of["a"] + of["b"]) / 2, (of["b"] - of["a"]) / math.sqrt(12), law)
        case "trunc_normal_" if of["std"] > 0:
            low, high = ((of[end] - of["mean"]) / of["std"] for end in ("a", "b"))
            cut = float(truncnorm.std(low, high))
            return Declared(float(of["mean"]), of["std"] * cut, "truncated" if high < 5 else law)
        case "xavier_uniform_" | "xavier_normal_":
            return Declared(0.0, of["gain"] * math.sqrt(2 / sum(fans.values())), law)
        case "kaiming_uniform_" | "kaiming_normal_":
            gain = torch.nn.init.calculate_gain(of["nonlinearity"], of["a"])
            return Declared(0.0, gain / math.sqrt(fans[of["mode"]]), law)
        case "orthogonal_":
            rows, columns = tensor.shape[0], tensor.numel() // tensor.shape[0]
            return Declared(0.0, of["gain"] / math.sqrt(max(rows, columns)), "orthogonal")
    return None
