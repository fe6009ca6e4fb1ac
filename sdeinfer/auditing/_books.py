"""All that an audit reads of a network: a pass, the laws of its parameters, and a second pass with a token changed.

Tests: `tests/auditing/test_audit.py`.
"""

import dataclasses
import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from sdeinfer._files import InputError
from sdeinfer._seeds import of_seed
from sdeinfer.auditing._account import Account
from sdeinfer.auditing._dependences import Dependences, changed, dependences_of
from sdeinfer.auditing._graph import Graph
from sdeinfer.auditing._inputs import PACKED, candidates, needed
from sdeinfer.auditing._law import Law, law_of
from sdeinfer.auditing._record import Record
from sdeinfer.auditing._roles import account_of


@dataclasses.dataclass(frozen=True, eq=False)
class Books:
    """All that is read of a network: the accounts of a pass, laws of parameters, dependences."""

    account: Account
    laws: dict[str, Law]
    dependences: Dependences
    name: str
    inputs: Any = None


def books_of(network: Any, inputs: Any = None) -> Books:
    """Read the books: a pass, a second one with a token changed, and the laws of all parameters."""
    record, given = first_pass(network, inputs)
    account = account_of(Graph(record))
    other = changed(given) if isinstance(given, dict) and not PACKED & {*given} else None
    found = Dependences()
    if other is not None:
        second = tap(network)[0](network, other[0])
        found = dependences_of(account, second, other[1], next(iter(given.values())).shape[0])
    laws = {name: law_of(each) for name, each in record.parameters.items()}
    return Books(account, laws, found, record.name, given)


def tap(network: Any) -> tuple[Callable[..., Record], Callable[..., Any]]:
    """The functions that record a pass of a model, and that turn inputs into its tensors."""
    if is_torch(network):
        from sdeinfer.auditing._torch import as_tensors, record_of
    else:
        from sdeinfer.auditing._jax import record_of
        from sdeinfer.auditing._jax_models import as_tensors, require_model

        require_model(network)
    return record_of, as_tensors


def first_pass(network: Any, inputs: Any) -> tuple[Record, Any]:
    """The record of a pass, with the inputs given, or with the first ones that fit."""
    record_of, as_tensors = tap(network)
    name = type(network).__name__
    if inputs is not None:
        given = as_tensors(inputs, network)
        try:
            return record_of(network, given), given
        except InputError:
            raise
        except Exception as error:
            raise InputError(f"inputs: {name} cannot be run with them ({_line(error)})") from error
    if not is_torch(network):
        raise InputError(f"inputs: needed for {name}: its argument, or a dict of keyword arguments")
    tried, errors = candidates(network), []
    given = next(tried, None)
    while given is not None:
        try:
            return record_of(network, given), given
        except InputError:
            raise
        except Exception as error:
            errors.append(_line(error))
        try:
            given = tried.send(errors[-1])
        except StopIteration:
            break
    names = ", ".join(needed(network)) or "its argument"
    why = f" ({errors[0]})" if errors else ""
    raise InputError(f"inputs: needed for {name}: {names}, as a dict of keyword arguments{why}")


def _line(error: Exception) -> str:
    text = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {text[0][:120]}"


def made(model: Any, seed: int) -> Any:
    """A model, or what a function makes of a seed; of JAX of a `key`, of Flax of `rngs`; PyTorch is seeded."""
    if is_torch(model) or not (inspect.isroutine(model) or isinstance(model, type)):
        return model
    names = inspect.signature(model).parameters
    if "key" in names:
        return model(key=sys.modules["jax"].random.key(seed))
    if "rngs" in names:
        return model(rngs=sys.modules["flax.nnx"].Rngs(seed))
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.manual_seed(seed)
    return of_seed(model, seed)


def is_torch(model: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(model, torch.nn.Module)


def filled(network: Any, new: Mapping[str, np.ndarray]) -> Any:
    """A model with these arrays in its parameters: of PyTorch the same object, of JAX a new one."""
    if not is_torch(network):
        from sdeinfer.auditing._jax_models import replaced

        return replaced(network, new)
    torch = sys.modules["torch"]
    parameters = dict(network.named_parameters())
    with torch.no_grad():
        for name, values in new.items():
            parameters[name].copy_(torch.from_numpy(np.ascontiguousarray(values)).reshape(parameters[name].shape))
    return network
