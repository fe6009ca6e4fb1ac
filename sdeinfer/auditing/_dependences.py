"""A second pass with one token of one item changed: which tokens, and which items, depend on it, up to rounding.

Tests: `tests/auditing/test_audit.py`.
"""

import dataclasses
from typing import Any

import numpy as np

from sdeinfer.auditing._account import Account
from sdeinfer.auditing._graph import Graph
from sdeinfer.auditing._inputs import Inputs, mapped
from sdeinfer.auditing._record import Node, Record
from sdeinfer.auditing._stream import streams_of

CHANGED = 3e-6
"""Relative change of a row's mean square beyond which it depends on what was changed; below it is rounding."""


@dataclasses.dataclass(frozen=True)
class Dependences:
    """Whether tokens are independent of later ones, and items of each other; None where it was not seen."""

    causal: bool | None = None
    first: str = ""
    leaks: bool | None = None


@dataclasses.dataclass(frozen=True)
class Change:
    """Inputs with a token of the last item, or all of it, changed; the size (items, tokens) if there are tokens."""

    inputs: Inputs
    items: int
    size: tuple[int, int] | None


def changed(inputs: Inputs) -> Change | None:
    """Change a token of the middle in the main input; None if there is one item of one token, or no array."""
    leaves: list[Any] = []
    mapped(inputs, lambda value: leaves.append(value) if getattr(value, "ndim", 0) > 1 else None)
    main = next((inputs[1][name] for name in ("decoder_input_ids", "input_ids") if name in inputs[1]), None)
    main = main if getattr(main, "ndim", 0) > 1 else next(iter(leaves), None)
    if main is None:
        return None
    other = main.clone() if hasattr(main, "clone") else np.array(main)
    items, tokens, *_ = main.shape
    tokenised = main.ndim == 3 or (main.ndim == 2 and "int" in str(main.dtype))
    size = None
    if tokenised and tokens > 1:
        size = items, tokens
        other[-1, tokens // 2] = main[0, 0]
    elif main.ndim == 2 and not tokenised and items > 2:  # one item of several vectors
        size = items, tokens = 1, items
        other[tokens // 2] = main[0]
    elif items > 1 and not (tokenised and tokens == 1 and "int" in str(main.dtype)):
        other[-1] = main[0] * 0.5
    elif items > 1:
        other[-1] = main[0]
    else:
        return None
    return Change(mapped(inputs, lambda value: other if value is main else value), items, size)


def dependences_of(account: Account, record: Record, change: Change) -> Dependences:
    """Compare the streams of a pass with those of a second one."""
    size, items = change.size, change.items
    second = _sums(account, record)
    if second is None:
        return Dependences()
    chains = [
        chain
        for chain in account.streams
        if size is None
        or chain[0].sum.shape[:2] in (size, size[::-1])
        or chain[0].sum.shape[:-1] == (size[0] * size[1],)
    ]
    chain = chains[-1] if chains else (account.streams[-1] if account.streams else [])
    causal, leaks, place = None, (False if chain else None), ""
    for link in chain:
        a, b = link.sum.rows, second[link.sum.number].rows
        shape = link.sum.shape
        if a is None or b is None or a.shape != b.shape or not np.isfinite(a).all():
            return Dependences()
        differs = np.abs(a - b) > CHANGED * (np.abs(a) + np.abs(b)) / 2 + 1e-30
        if size is not None and a.size == size[0] * size[1]:
            turned = shape[:2] == size[::-1] and size[0] != size[1]
            by_item = differs.reshape(size[::-1]).T if turned else differs.reshape(size)
            if causal is None and by_item[-1].any():
                causal = True
            if causal and by_item[-1, : size[1] // 2].any():
                causal, place = False, f"layer {link.layer}"
            others = by_item[:-1]
            if others.any() and not np.delete(others, size[1] // 2, axis=1).any():
                causal, place = False, place or f"layer {link.layer}"  # the first axis is that of tokens
            else:
                leaks = leaks or bool(others.any())
        elif shape[0] == items and a.size % items == 0 and a.size > 1:
            leaks = leaks or bool(differs.reshape(items, -1)[:-1].any())
        else:
            leaks = None if leaks is False else leaks
    return Dependences(causal, place, leaks)


def _sums(account: Account, record: Record) -> dict[int, Node] | None:
    """The sums of the streams in a second pass by their numbers in the first; None if the streams are others."""
    links = [link for chain in account.streams for link in chain]
    if len(account.graph.record.nodes) == len(record.nodes):
        return {link.sum.number: record.nodes[link.sum.number] for link in links}
    # A first pass may make what later ones keep.
    others = [link for chain in streams_of(Graph(record)) for link in chain]
    if [link.sum.shape for link in links] != [link.sum.shape for link in others]:
        return None
    return {link.sum.number: other.sum for link, other in zip(links, others, strict=True)}
