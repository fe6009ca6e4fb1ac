"""A pass of a network of PyTorch or JAX: its record, with the inputs given, or with the first ones that fit.

Tests: `tests/auditing/test_torch_audit.py`.
"""

import functools
from typing import Any

import numpy as np

from sdeinfer._files import InputError
from sdeinfer.passes._inputs import Inputs, argument_names, as_tensor, bound, candidates, required_arguments
from sdeinfer.passes._models import argument_names_of, is_torch, require_model
from sdeinfer.passes._record import Record, Watch


def record_of(network: Any, inputs: Inputs, watch: Watch | None = None) -> Record:
    """The record of a pass, of which some values are shown, see `Watch`."""
    if is_torch(network):
        from sdeinfer.passes import _torch as library
    else:
        from sdeinfer.passes import _jax as library

    return library.record_of(network, inputs, watch)


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
        require_model(network)
        raise InputError(f"inputs: needed for {name}: its argument, or a dict of keyword arguments")
    errors = []
    for given in candidates(network):
        try:
            return record_of(network, given), given
        except InputError:
            raise
        except Exception as error:
            errors.append(_line(error))
    names = ", ".join(required_arguments(network)) or "its argument"
    reason = f" ({errors[0]})" if errors else ""
    raise InputError(f"inputs: needed for {name}: {names}, as a dict of keyword arguments{reason}")


def _bound(network: Any, inputs: Any) -> Inputs:
    if is_torch(network):
        return bound(inputs, argument_names(network.forward), functools.partial(as_tensor, module=network))
    require_model(network)
    return bound(inputs, argument_names_of(network), np.asarray)


def _line(error: Exception) -> str:
    text = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {text[0][:120]}"
