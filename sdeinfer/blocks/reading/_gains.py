"""Gains of the norms inside of branches: of queries, of keys and of increments. Tests: `tests/blocks/test_of.py`."""

import math
from typing import NamedTuple

from sdeinfer.passes._account import Account
from sdeinfer.passes._record import Node
from sdeinfer.passes._taps import Branch


class NormGain(NamedTuple):
    """The gain of a norm, as it is used.

    Attributes:
        value: what the norm itself multiplies by; of an increment with all later factors, 1 + w where it is so.
        names: the parameters that it is multiplied by.
    """

    value: float
    names: tuple[str, ...]


def gain_of_increment(account: Account, branch: Branch) -> NormGain:
    """The gain of the norm of a branch's increment, with the factors of the sum."""
    assert branch.norm is not None
    gain = gain_of(account, branch.norm)
    return NormGain(gain.value * abs(branch.norm_factor), gain.names)


def gain_of(account: Account, norm: Node) -> NormGain:
    """The gain that a norm has itself, and the parameters that multiply it, there or later."""
    readers, names, node = account.graph.record.readers, [*norm.parameters[:1]], norm
    gain = math.prod(account.gains[name][0][0] for name in names if name in account.gains)
    while len(following := readers[node.number]) == 1 and following[0].kind in ("scale", "view"):
        (node,) = following
        names += [name for name in node.parameters if node.kind == "scale"]
    return NormGain(gain, tuple(names))
