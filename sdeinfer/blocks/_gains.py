"""Gains of the norms inside of branches: of queries, of keys and of increments. Tests: `tests/blocks/test_of.py`."""

import math
from typing import NamedTuple

from sdeinfer.passes._account import Account
from sdeinfer.passes._attention import attention_of, logits_of, softmaxes_in
from sdeinfer.passes._record import Node
from sdeinfer.passes._taps import Branch


class NormGain(NamedTuple):
    """The gain of a norm, as it is used.

    Attributes:
        value: the mean of what the norm multiplies by, with later factors: 1 + w where it is so.
        names: the parameters that it multiplies by.
    """

    value: float
    names: tuple[str, ...]


def gain_of_increment(account: Account, branch: Branch) -> NormGain:
    """The gain of the norm of a branch's increment, with the factors of the sum."""
    assert branch.norm is not None
    gain = _gain(account, branch.norm, branch.summand)
    return NormGain(gain.value * abs(branch.norm_factor), gain.names)


def gains_of_queries_and_keys(account: Account, branch: Branch) -> tuple[NormGain, NormGain] | None:
    """The gains of the norms of queries and of keys; None without them."""
    graph = account.graph
    for softmax in softmaxes_in(graph, branch.nodes):
        pair = logits_of(graph, softmax)
        assert pair is not None
        logits, _ = attention_of(graph, softmax, pair, branch.link.layer, branch.nodes)
        if logits.both:
            queries, keys = (
                _gain(account, norm, side) for norm, side in zip(logits.norms, pair[0].inputs, strict=True)
            )
            return queries, keys
    return None


def _gain(account: Account, norm: Node, end: Node) -> NormGain:
    """The gain of a norm, of its own and between it and another node."""
    names = dict.fromkeys((*norm.parameters[:1], *account.graph.term(end).scales))
    values = [account.gains[name][0][0] for name in names if name in account.gains]
    return NormGain(math.prod(values), tuple(names))
