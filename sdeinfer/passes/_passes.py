"""Passes of one network or several: a first one gives the graph, a second one shows the values of its nodes.

Tests: `tests/observation/test_networks.py`.
"""

from collections.abc import Callable
from typing import Any

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


class Passes:
    """Passes of networks of one kind on the same inputs; only the first is recorded.

    Arguments:
        inputs: see `first_pass`.
        networks: number of networks that are to come.
    """

    def __init__(self, inputs: Any, networks: int = 1):
        self.inputs, self.compiles = inputs, networks >= WORTH_COMPILING
        self.account: Account | None = None
        self._given: Inputs | None = None
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._program: Any = None

    def show(self, network: Any, plan: Callable[[Account], Taps]) -> Account:
        """Show the values of a network.

        Arguments:
            network: a module of PyTorch, Flax or Equinox, or a function and its parameters.
            plan: from the account of a first pass to the taps of a second one; called again if that differs.

        Returns:
            The account of the first network.

        Raises:
            InputError: for a network that computes other things in each pass, or others than the first network.
        """
        if self.account is not None and self._given is not None:
            if shapes_of(network) != self._shapes:
                raise InputError(f"model: networks have other arrays than the first {self.account.graph.record.name}")
            return self._again(network, self._given, self.account, plan)
        self._shapes = shapes_of(network)
        record, self._given = first_pass(network, self.inputs)
        for _ in range(2):
            self.account = account_of(Graph(record))
            again = record_of(network, self._given, plan(self.account).watch)
            if again.length == record.length:
                return self.account
            record = again  # a first pass may make what later ones keep
        raise InputError(f"model: {record.name} computes other things in each pass")

    def _again(self, network: Any, given: Inputs, account: Account, plan: Callable[[Account], Taps]) -> Account:
        watch, record = plan(account).watch, account.graph.record
        if self.compiles and not is_torch(network):
            from sdeinfer.passes._jax import Compiled

            if self._program is None:
                self._program = Compiled(network, given, tuple(watch))
            if self._program.show(network, watch):
                return account
            self.compiles = False
        if record_of(network, given, watch).length != record.length:
            raise InputError(f"model: networks compute other things than the first {record.name}")
        return account
