"""Passes of one network or several: a first one gives the graph, a second one shows the values of its nodes.

Tests: `tests/observation/test_networks.py`.
"""

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

from sdeinfer._files import InputError
from sdeinfer.passes._account import Account
from sdeinfer.passes._graph import Graph
from sdeinfer.passes._inputs import Inputs
from sdeinfer.passes._models import is_torch, shapes_of
from sdeinfer.passes._pass import first_pass, record_of
from sdeinfer.passes._roles import account_of
from sdeinfer.passes._taps import Taps

WORTH_COMPILING = 8
"""Number of networks from which a compiled pass of JAX is faster than a few more, primitive by primitive."""


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
            return self._show_again(network, *self._first, look)
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

    def _show_again[T: Seen](
        self,
        network: Any,
        account: Account,
        given: Inputs,
        shapes: dict[str, tuple[int, ...]],
        look: Callable[[Account], T],
    ) -> T:
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
