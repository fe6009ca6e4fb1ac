"""All that an audit reads of a network: a pass, the laws of its parameters, and a second pass with a token changed.

Tests: `tests/auditing/test_audit.py`.
"""

import dataclasses
import functools
import inspect
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np

from sdeinfer._files import InputError
from sdeinfer._seeds import of_seed
from sdeinfer.auditing._account import Account
from sdeinfer.auditing._dependences import Dependences, changed, dependences_of
from sdeinfer.auditing._graph import Graph
from sdeinfer.auditing._inputs import Inputs, argument_names, as_tensor, bound, candidates, needed
from sdeinfer.auditing._law import Law, law_of
from sdeinfer.auditing._readings import BranchNorms, Reading, norms_of, readings_of
from sdeinfer.auditing._record import Record
from sdeinfer.auditing._roles import account_of


@dataclasses.dataclass(frozen=True, eq=False)
class Books:
    """All that is read of a network: the accounts of a pass, laws of parameters, dependences, what matrices read."""

    account: Account
    laws: dict[str, Law]
    dependences: Dependences
    readings: list[Reading]
    norms: list[BranchNorms]
    name: str
    inputs: Inputs


def books_of(network: Any, inputs: Any = None) -> Books:
    """Read the books of a network with the inputs given, or with the first ones that fit."""
    return books_from(network, *first_pass(network, inputs))


def books_from(network: Any, record: Record, given: Inputs) -> Books:
    """Read the books of a pass, with a second one with a token changed, and the laws of all parameters."""
    account = account_of(Graph(record))
    other = changed(given)
    found = Dependences()
    if other is not None:
        found = dependences_of(account, record_of(network, other.inputs), other)
    laws = {name: law_of(each) for name, each in account.parameters.items()}
    readings = readings_of(account)
    return Books(account, laws, found, readings, norms_of(account, readings), record.name, given)


def record_of(network: Any, inputs: Inputs) -> Record:
    """The record of a pass."""
    if is_torch(network):
        from sdeinfer.auditing import _torch as library
    else:
        from sdeinfer.auditing import _jax as library

    return library.record_of(network, inputs)


def first_pass(network: Any, inputs: Any) -> tuple[Record, Inputs]:
    """The record of a pass, with the inputs given, or with the first ones that fit."""
    name = type(network).__name__
    if inputs is not None:
        given = _bound(network, inputs)
        try:
            return record_of(network, given), given
        except InputError:
            raise
        except Exception as error:
            raise InputError(f"inputs: {name} cannot be run with them ({_line(error)})") from error
    if not is_torch(network):
        _require_model(network)
        raise InputError(f"inputs: needed for {name}: its argument, or a dict of keyword arguments")
    errors = []
    for given in candidates(network):
        try:
            return record_of(network, given), given
        except InputError:
            raise
        except Exception as error:
            errors.append(_line(error))
    names = ", ".join(needed(network)) or "its argument"
    why = f" ({errors[0]})" if errors else ""
    raise InputError(f"inputs: needed for {name}: {names}, as a dict of keyword arguments{why}")


def _bound(network: Any, inputs: Any) -> Inputs:
    if is_torch(network):
        return bound(inputs, argument_names(network.forward), functools.partial(as_tensor, module=network))
    from sdeinfer.auditing._jax_models import argument_names_of

    _require_model(network)
    return bound(inputs, argument_names_of(network), np.asarray)


def _require_model(network: Any) -> None:
    from sdeinfer.auditing._jax_models import require_model

    require_model(network)


def _line(error: Exception) -> str:
    text = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {text[0][:120]}"


def made(model: Any, seed: int) -> Any:
    """A model, or what a function makes of a seed; of JAX of a `key`, of Flax of `rngs`; PyTorch is seeded."""
    if not is_torch(model) and (inspect.isroutine(model) or isinstance(model, type)):
        model = _made(model, seed)
    if not is_torch(model):
        return model
    from sdeinfer.auditing._torch import unwrapped

    return unwrapped(model)


def _made(make: Any, seed: int) -> Any:
    names = inspect.signature(make).parameters
    if "key" in names:
        return make(key=sys.modules["jax"].random.key(seed))
    if "rngs" in names:
        return make(rngs=sys.modules["flax.nnx"].Rngs(seed))
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.manual_seed(seed)
    return of_seed(make, seed)


def is_torch(model: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(model, torch.nn.Module)


def filled(network: Any, new: Mapping[str, np.ndarray]) -> Any:
    """A model with these arrays in its parameters: of PyTorch the same object, of JAX a new one."""
    if not is_torch(network):
        from sdeinfer.auditing._jax_models import replaced

        return replaced(network, new)
    from sdeinfer.auditing._torch import named

    torch = sys.modules["torch"]
    parameters = named(network.named_parameters(remove_duplicate=False))
    with torch.no_grad():
        for name, values in new.items():
            parameters[name].copy_(torch.from_numpy(np.ascontiguousarray(values)).reshape(parameters[name].shape))
    return network
