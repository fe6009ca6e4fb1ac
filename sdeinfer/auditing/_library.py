"""What a library's own code declares of each parameter: `_init_weights` of transformers, run on fresh twins of a model.

Tests: `tests/auditing/test_torch_audit.py`.
"""

import contextlib
import copy
import inspect
import math
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
from scipy.stats import truncnorm

from sdeinfer.auditing._law import law_of
from sdeinfer.auditing._recipe import Declared
from sdeinfer.auditing._record import Parameter
from sdeinfer.auditing._torch import named, parameter_of

LARGEST = 200_000_000
"""Number of parameters up to which twins get memory; of larger models only calls of initialisers are read."""


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
    own = named(model.named_parameters(remove_duplicate=False))
    small = sum(each.numel() for each in own.values()) <= LARGEST
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
    firsts = {name: each for name, each in first.named_parameters() if name in own and own[name].shape == each.shape}
    found = {name: calls.get(id(each)) for name, each in firsts.items()}
    left = [name for name, each in found.items() if each is None]
    if small and left:
        found |= _compared(firsts, model, left)
    return {name: each for name, each in found.items() if each}


def _compared(firsts: dict[str, Any], model: Any, left: list[str]) -> dict[str, Declared]:
    """Parameters that no initialiser was called for: those of two twins are equal, or two draws."""
    seconds = named(twin_of(model, seed=2).named_parameters(remove_duplicate=False))
    found = {}
    for name in left:
        one, other = (parameter_of(each[name]).entries() for each in (firsts, seconds))
        if not (np.isfinite(one).all() and np.isfinite(other).all() and one.shape == other.shape):
            continue
        if np.allclose(one, other, rtol=1e-6, atol=1e-12):
            found[name] = Declared(float(one.mean()), 0.0, "constant", values=one)
        else:
            law = law_of(Parameter((2 * len(one),), np.concatenate([one, other]).__getitem__))
            found[name] = Declared(law.mean, law.sd, error=law.error)
    return found


def _untied(config: Any) -> Any:
    """A configuration whose embedding and head are two tensors, as they are when they are initialised."""
    config = copy.deepcopy(config)
    for part in (config, *(each for each in vars(config).values() if hasattr(each, "model_type"))):
        if getattr(part, "tie_word_embeddings", False):
            part.tie_word_embeddings = False
    return config


@contextlib.contextmanager
def _recorded(init: Any, calls: dict[int, Declared | None]) -> Iterator[None]:
    """Initialisers that also note what they do."""
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
            return originals[name](*args, **kwargs)

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
            return Declared(0.0, 0.0, "constant")
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
