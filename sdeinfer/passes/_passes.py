"""Passes of one network or several: the first one gives the record and its graph, a second one shows values of nodes.

Tests: `tests/observation/test_networks.py`.
"""

import functools
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import numpy as np

from sdeinfer._files import InputError
from sdeinfer.passes._account import Account
from sdeinfer.passes._graph import Graph
from sdeinfer.passes._inputs import Inputs, argument_names, as_tensor, bound, candidates, required_arguments
from sdeinfer.passes._models import argument_names_of, is_torch, require_model, shapes_of
from sdeinfer.passes._record import Record, Watch
from sdeinfer.passes._roles import account_of
from sdeinfer.passes._taps import Taps

WORTH_COMPILING = 8
"""Number of networks from which a compiled pass of JAX is faster than a few more, primitive by primitive."""


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


@runtime_checkable
class Seen(Protocol):
    """Values that are seen of one network: made from the account of a first pass, with the taps of a second one."""

    @property
    def taps(self) -> Taps:
        """The values that the second pass has to show."""
        ...


class Passes:
    """Passes of networks of one kind on the same inputs; only the first is recorded.

    Arguments:
        inputs: see `first_pass`.
        networks: number of networks that are to come.
    """

    def __init__(self, inputs: Any, networks: int = 1):
        self.inputs, self.compiles = inputs, networks >= WORTH_COMPILING
        self._first: tuple[Account, Inputs, dict[str, tuple[int, ...]]] | None = None
        self._program: Any = None

    def show[T: Seen](self, network: Any, look: Callable[[Account], T]) -> T:
        """Show the values of a network.

        Arguments:
            network: a module of PyTorch, Flax or Equinox, or a function and its parameters.
            look: from the account of a first pass to what is seen of the network; called again if that differs.

        Returns:
            The object that `look` made, after it saw the values.

        Raises:
            InputError: for a network that computes other things in each pass, or has other arrays than the first
                network.
        """
        if self._first is not None:
            return self._show_again(network, look)
        record, given = first_pass(network, self.inputs)
        for _ in range(2):
            account = account_of(Graph(record))
            seen = look(account)
            again = record_of(network, given, seen.taps.watch)
            if again.length == record.length:
                self._first = account, given, shapes_of(network)
                return seen
            record = again  # a first pass may make what later ones keep
        raise InputError(f"model: {record.name} computes other things in each pass")

    def _show_again[T: Seen](self, network: Any, look: Callable[[Account], T]) -> T:
        assert self._first is not None
        account, given, shapes = self._first
        record, seen = account.graph.record, look(account)
        if shapes_of(network) != shapes:
            raise InputError(f"model: networks have other arrays than the first {record.name}")
        watch = seen.taps.watch
        if self.compiles and not is_torch(network):
            from sdeinfer.passes._jax import Compiled

            if self._program is None:
                self._program = Compiled(network, given, tuple(watch))
            if self._program.show(network, watch):
                return seen
            self.compiles = False
        if record_of(network, given, watch).length != record.length:
            raise InputError(f"model: networks compute other things than the first {record.name}")
        return seen
