"""A second pass with one token of one item changed: which tokens, and which items, depend on it, up to rounding.

Tests: `tests/auditing/test_audit.py`.
"""

import dataclasses
from typing import Any

import numpy as np

from sdeinfer.auditing._account import Account
from sdeinfer.auditing._record import Record

CHANGED = 3e-6
"""Relative change of a row's mean square beyond which it depends on what was changed; below it is rounding."""


@dataclasses.dataclass(frozen=True)
class Dependences:
    """Whether tokens are independent of later ones, and items of each other; None where it was not asked."""

    causal: bool | None = None
    first: str = ""
    leaks: bool | None = None


def changed(inputs: dict[str, Any]) -> tuple[dict[str, Any], tuple[int, int] | None] | None:
    """Inputs with a token of the last item, or all of it, changed, and the size (items, tokens) if there are tokens."""
    found, place = {}, None
    names = [name for name in ("decoder_input_ids", "input_ids") if name in inputs] or list(inputs)[:1]
    if not names or len(getattr(inputs[names[0]], "shape", ())) < 2 or inputs[names[0]].shape[0] < 2:
        return None
    name, value = names[0], inputs[names[0]]
    other = value.clone() if hasattr(value, "clone") else np.array(value)
    if value.ndim == 2 and not _floating(value):
        middle = value.shape[1] // 2
        other[-1, middle] = value[0, 0]
        place = tuple(value.shape)
    elif value.ndim == 2 and value.shape[0] > 2:
        other[value.shape[0] // 2] = value[0]
        place = (1, value.shape[0])
    elif value.ndim == 3:
        middle = value.shape[1] // 2
        other[-1, middle] = value[0, 0]
        place = tuple(value.shape[:2])
    else:
        other[-1] = value[0] * 0.5
    found = {**inputs, name: other}
    return found, place


def _floating(value: Any) -> bool:
    return "float" in str(value.dtype)


def dependences_of(account: Account, record: Record, size: tuple[int, int] | None, items: int) -> Dependences:
    """Compare the streams of a pass with those of a second one."""
    first = account.graph.record.nodes
    if len(first) != len(record.nodes):
        return Dependences()
    chains = [
        chain
        for chain in account.streams
        if size is None
        or chain[0].sum.shape[:2] in (size, size[::-1])
        or chain[0].sum.shape[:-1] == (size[0] * size[1],)
    ]
    chain = chains[-1] if chains else (account.streams[-1] if account.streams else [])
    causal, leaks, place = (True if size is not None and chains else None), (False if chain else None), ""
    for link in chain:
        a, b = link.sum.rows, record.nodes[link.sum.number].rows
        shape = link.sum.shape
        if a is None or b is None or a.shape != b.shape or not np.isfinite(a).all():
            return Dependences()
        differs = np.abs(a - b) > CHANGED * (np.abs(a) + np.abs(b)) / 2 + 1e-30
        if size is not None and a.size == size[0] * size[1]:
            by_item = (
                differs.reshape(size[::-1]).T
                if shape[:2] == size[::-1] and size[0] != size[1]
                else differs.reshape(size)
            )
            if by_item[-1, : size[1] // 2].any() and causal:
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
