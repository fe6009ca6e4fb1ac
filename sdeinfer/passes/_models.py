"""Models of PyTorch and JAX: made of a seed, their arrays by name, and others in their places.

Tests: `tests/auditing/test_audit.py`.
"""

import functools
import inspect
import re
import sys
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from sdeinfer._files import InputError
from sdeinfer._seeds import of_seed
from sdeinfer.passes._inputs import argument_names

WRAPPED = {"OptimizedModule": "_orig_mod", "DataParallel": "module", "DistributedDataParallel": "module"}
"""Classes of PyTorch that wrap a module, with the attribute that holds it."""


def made(model: Any, seed: int) -> Any:
    """A model, or what a function makes of a seed; of JAX of a `key`, of Flax of `rngs`; PyTorch is seeded."""
    if not is_torch(model) and is_function(model):
        model = _made(model, seed)
    while is_torch(model) and type(model).__name__ in WRAPPED:
        model = getattr(model, WRAPPED[type(model).__name__])
    return model


def _made(make: Any, seed: int) -> Any:
    names = inspect.signature(make.__init__ if isinstance(make, type) else make).parameters
    if "key" in names:
        return make(key=sys.modules["jax"].random.key(seed))
    if "rngs" in names:
        return make(rngs=sys.modules["flax.nnx"].Rngs(seed))
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.manual_seed(seed)
    return of_seed(make, seed)


def is_function(model: Any) -> bool:
    """Whether it makes networks: a function or a class."""
    return inspect.isroutine(model) or isinstance(model, type | functools.partial)


def is_network(given: Any) -> bool:
    """Whether it is a model, a function that makes one, or a function with its parameters; not hidden states."""
    return callable(given) or is_pair(given)


def is_pair(given: Any) -> bool:
    """Whether it is a function with its parameters."""
    return isinstance(given, tuple) and len(given) == 2 and callable(given[0])


def is_torch(model: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(model, torch.nn.Module)


def named(pairs: Any) -> dict[str, Any]:
    """Tensors by the first of their names."""
    return {names[0]: tensor for names, tensor in with_names(pairs)}


def with_names(pairs: Any) -> list[tuple[list[str], Any]]:
    """Tensors with all their names."""
    tensors: dict[int, tuple[list[str], Any]] = {}
    for name, tensor in pairs:
        if tensor is not None:
            names, _ = tensors.setdefault(id(tensor), ([], tensor))
            names.append(".".join(part for part in name.split(".") if part != "_orig_mod"))
    return list(tensors.values())


def filled(network: Any, new: Mapping[str, np.ndarray]) -> Any:
    """A model with these arrays in its parameters: of PyTorch the same object, of JAX a new one."""
    if not is_torch(network):
        return _replaced(network, new)
    torch = sys.modules["torch"]
    parameters = named(network.named_parameters(remove_duplicate=False))
    with torch.no_grad():
        for name, values in new.items():
            parameters[name].copy_(torch.from_numpy(np.ascontiguousarray(values)).reshape(parameters[name].shape))
    return network


def argument_names_of(network: Any) -> list[str] | None:
    """Names of a model's arguments; None if it takes any keyword."""
    if isinstance(network, tuple):
        names = argument_names(network[0])
        return None if names is None else names[1:]
    return argument_names(network.__call__)


def function_of(network: Any) -> tuple[Callable[..., Any], dict[str, Any], str]:
    """A function of a list of arrays and inputs, the arrays by name, and what it is called."""
    require_model(network)
    evaluated, named_after = _in_evaluation(network), network[0] if is_pair(network) else type(network)
    tree, replaced = _parts(evaluated)
    arrays, rebuilt = _arrays(tree)

    def function(values: list[Any], *args: Any, **kwargs: Any) -> Any:
        model = replaced(rebuilt(values))
        return model[0](model[1], *args, **kwargs) if is_pair(model) else model(*args, **kwargs)

    return function, arrays, getattr(named_after, "__name__", type(named_after).__name__)


def _in_evaluation(network: Any) -> Any:
    """A model without dropout."""
    nnx, equinox = sys.modules.get("flax.nnx"), sys.modules.get("equinox")
    if nnx is not None and isinstance(network, nnx.Module):
        network = nnx.clone(network)
        network.eval()
    elif equinox is not None and isinstance(network, equinox.Module):
        network = equinox.nn.inference_mode(network)
    return network


def _parts(network: Any) -> tuple[Any, Callable[[Any], Any]]:
    """The pytree of a model's parameters, and a function that makes the model of another one."""
    nnx = sys.modules.get("flax.nnx")
    if nnx is not None and isinstance(network, nnx.Module):
        definition, parameters, state = nnx.split(network, nnx.Param, ...)
        return parameters, lambda tree: nnx.merge(definition, tree, state)
    if is_pair(network):
        return network[1], lambda tree: (network[0], tree)
    return network, lambda tree: tree


def shapes_of(network: Any) -> dict[str, tuple[int, ...]]:
    """The shapes of a model's parameters by name."""
    if is_torch(network):
        return {name: tuple(parameter.shape) for name, parameter in network.named_parameters()}
    return {name: np.shape(leaf) for name, leaf in function_of(network)[1].items()}


def require_model(network: Any) -> None:
    """Check that it is a pytree that can be called, or a pair of a function and its parameters."""
    import jax

    if not is_pair(network) and not (callable(network) and jax.tree.leaves(network)):
        fault = f"got {network!r}" if isinstance(network, int | str | float) else f"got a {type(network).__name__}"
        raise InputError(f"model: a module of PyTorch, Flax or Equinox, or (function, parameters), is needed, {fault}")


def _arrays(tree: Any) -> tuple[dict[str, Any], Callable[[list[Any]], Any]]:
    """The arrays of a pytree that are floating-point by name, and a function that puts others in their places."""
    import jax
    import jax.numpy as jnp

    pairs, structure = jax.tree_util.tree_flatten_with_path(tree)
    places = [
        place
        for place, (_, leaf) in enumerate(pairs)
        if hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.inexact)  # bfloat16 is none of NumPy's
    ]
    names = [jax.tree_util.keystr(pairs[place][0], simple=True, separator=".") for place in places]
    arrays = {name.removesuffix(".value"): pairs[place][1] for name, place in zip(names, places, strict=True)}

    def rebuilt(values: list[Any]) -> Any:
        leaves = [leaf for _, leaf in pairs]
        for place, value in zip(places, values, strict=True):
            leaves[place] = value
        return jax.tree_util.tree_unflatten(structure, leaves)

    return arrays, rebuilt


def _replaced(network: Any, new: Mapping[str, np.ndarray]) -> Any:
    """A model with arrays in the places of others, as "w", or as "w[2]" for a part of a stack that a loop cuts."""
    import jax.numpy as jnp

    tree, replaced = _parts(network)
    leaves, rebuilt = _arrays(tree)
    arrays = {name: np.array(leaf) for name, leaf in leaves.items()}
    for key, values in new.items():
        name, index = key, ()
        while name not in arrays and (cut := re.fullmatch(r"(.*)\[(\d+)\]", name)):
            name, index = cut[1], (int(cut[2]), *index)
        arrays[name][index] = values.reshape(arrays[name][index].shape)
    return replaced(rebuilt([jnp.asarray(arrays[name], leaf.dtype) for name, leaf in leaves.items()]))
