"""All that an audit reads of a network: a pass, the laws of its parameters, and passes with a token changed.

Tests: `tests/auditing/test_audit.py`.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np

from sdeinfer.auditing._law import Law, law_of
from sdeinfer.passes._account import Account
from sdeinfer.passes._graph import Graph
from sdeinfer.passes._inputs import Inputs, mapped
from sdeinfer.passes._passes import first_pass, record_of
from sdeinfer.passes._readings import BranchNorms, Reading, norms_of, readings_of
from sdeinfer.passes._record import Node, Record
from sdeinfer.passes._roles import account_of
from sdeinfer.passes._stream import Link, streams_of

PASS_ROUNDING = 3e-6
"""Relative difference of a row's mean square up to which two passes differ by rounding."""


@dataclasses.dataclass(frozen=True)
class Dependences:
    """Whether tokens are independent of later ones, and items of each other; None where it was not seen.

    Attributes:
        causal: whether tokens are independent of later ones.
        first: the place where they first depend on these.
        leaks: whether an item changes another one.
        alone: whether no token changes another one, as where all branches are 0.
        next_alone: whether each token first depends on the next one alone.
        axis: the axis along which tokens change others, 0 or 1; None if none changes another one.
    """

    causal: bool | None = None
    first: str = ""
    leaks: bool | None = None
    alone: bool = False
    next_alone: bool = False
    axis: int | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class Books:
    """An account, with the laws of the weights, what matrices read, and the dependences that changed tokens show."""

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


def books_from(network: Any, record: Record, inputs: Inputs) -> Books:
    """Read the books of a pass, with up to three passes with a token changed, and the laws of all parameters."""
    account = account_of(Graph(record))
    dependences = Dependences()
    # The first change decides, but where it shows no dependence on later tokens, those of other tokens may show one.
    for changed_inputs, items in changes(inputs):
        update = dependences_of(account, record_of(network, changed_inputs), items)
        dependences = update if update.causal is False or dependences == Dependences() else dependences
        if dependences.causal is not True:
            break
    laws = {name: law_of(parameter) for name, parameter in account.parameters.items()}
    readings = readings_of(account)
    return Books(account, laws, dependences, readings, norms_of(account, readings), record.name, inputs)


def changes(inputs: Inputs) -> Iterator[tuple[Inputs, int]]:
    """Inputs whose last item has one token, or the lower half of an image, changed; and the number of items."""
    leaves: list[Any] = []
    mapped(inputs, lambda value: leaves.append(value) if getattr(value, "ndim", 0) > 1 else None)
    main = next((inputs[1][name] for name in ("decoder_input_ids", "input_ids") if name in inputs[1]), None)
    main = main if getattr(main, "ndim", 0) > 1 else next(iter(leaves), None)
    if main is None:
        return
    items, tokens, *_ = main.shape
    whole = "int" in str(main.dtype)

    def change(place: Any, values: Any, count: int = items) -> tuple[Inputs, int]:
        array = main.clone() if hasattr(main, "clone") else np.array(main)
        array[place] = values
        return mapped(inputs, lambda value: array if value is main else value), count

    if main.ndim == 2 and not whole and items > 2:  # one item of several vectors
        for token in dict.fromkeys((items // 2, 1, items - 1)):
            yield change(token, main[0], 1)
    elif (main.ndim == 3 or (main.ndim == 2 and whole)) and tokens > 1:
        for token in dict.fromkeys((tokens // 2, 1, tokens - 1)):
            yield change((-1, token), _another(main, token) if whole else main[0, 0])
    elif main.ndim > 3:
        half = (..., slice(main.shape[-2] // 2, None), slice(None))
        yield change((-1, *half), main[(0, *half)] * 0.5, min(len(leaf) for leaf in leaves))  # patches are no items
    elif items > 1:
        yield change(-1, main[0] if whole else main[0] * 0.5)


def _another(tokens: Any, place: int) -> int:
    """A token of the input that is not the last item's one at a place; one less, or more, if all are equal."""
    last = int(tokens[-1, place].reshape(-1)[0])
    candidates = [token for token in np.asarray(tokens).reshape(-1).tolist() if token != last]
    return candidates[0] if candidates else last - 1 if last else last + 1


def dependences_of(account: Account, record: Record, items: int) -> Dependences:
    """Compare the streams of a pass with those of a second one: which rows differ at the start, and which later."""
    seconds = _seconds(account, record)
    if seconds is None or not account.streams:
        return Dependences()
    leaks = False
    dependences = Dependences()
    for chain in account.streams:
        start, *sums = [_differ(state, seconds[state.number], items) for state in _states(account.graph, chain)]
        differ = [rows for rows in sums if rows is not None]
        if len(differ) < len(sums):
            return Dependences()
        leaks = leaks or any(bool(rows[:-1].any()) for rows in differ)
        if start is not None and start.any():
            update = _of_stream(chain, start, differ)
            dependences = update if not update.alone or dependences == Dependences() else dependences
    return dependences if dependences.leaks is not None else Dependences(leaks=leaks)


def _of_stream(chain: list[Link], start: np.ndarray, sums: list[np.ndarray]) -> Dependences:
    first = int(np.flatnonzero(start[-1]).min(initial=start.shape[1]))
    seen = 0 < first < start.shape[1]
    causal, place, leaks, axis, earliest = True if seen else None, "", False, None, first
    pairs = [(link, _by_token(link, differs, start)) for link, differs in zip(chain, sums, strict=True)]
    known = [(link, differs) for link, differs in pairs if differs is not None]
    if not known:
        return Dependences()
    for link, differs in known:
        other_items = differs[:-1]
        turned = seen and other_items.any() and not other_items[:, ~start[-1]].any()  # the first axis is that of tokens
        if causal and (differs[-1, :first].any() or turned):
            causal, place = False, f"layer {link.layer}"
            earliest = int(np.flatnonzero(differs[-1]).min(initial=first))
        leaks = leaks or bool(other_items.any() and not turned)
        if axis is None and (turned or differs[-1, ~start[-1]].any()):
            axis = 0 if turned else 1
    if seen and axis is None and not start[-1, -1]:  # no later token can follow from the last one
        return Dependences(None, "", leaks, alone=True)
    return Dependences(causal, place, leaks, next_alone=first - earliest == 1, axis=axis)


def _by_token(link: Link, differs: np.ndarray, start: np.ndarray) -> np.ndarray | None:
    """Which tokens of a sum differ, also where each has several rows; None if the tokens are not those of the start."""
    if differs.shape == start.shape:
        return differs
    if link.sum.shape[1:2] != start.shape[1:] or differs.shape[1] % start.shape[1]:
        return None
    return differs.reshape(*start.shape, -1).any(axis=-1)


def _differ(state: Node | None, second: Node | None, items: int) -> np.ndarray | None:
    """Which rows of a state differ between two passes, by item and token; None if they cannot be compared."""
    a, b = (None if node is None else node.rows for node in (state, second))
    if state is None or a is None or b is None or a.shape != b.shape or not np.isfinite(a).all() or a.size % items:
        return None
    differ = np.abs(a - b) > PASS_ROUNDING * (np.abs(a) + np.abs(b)) / 2 + 1e-30
    tokens_first = state.shape[0] != items and state.shape[1:2] == (items,)
    return differ.reshape(-1, items).T if tokens_first else differ.reshape(items, -1)


def _states(graph: Graph, chain: list[Link]) -> list[Node]:
    """The stream before its first sum, and before a norm there, which hides how large a row was; and all sums."""
    first = chain[0]
    node = first.stream(graph)
    while node.inputs and (node.kind == "norm" or node.rows is None):
        node = node.inputs[0]
    return [node, *(link.sum for link in chain)]


def _seconds(account: Account, record: Record) -> dict[int, Node] | None:
    """The states of the streams in a second pass by their numbers in the first; None if the streams are others."""
    graph = account.graph
    states = [state for chain in account.streams for state in _states(graph, chain)]
    if len(graph.record.nodes) == len(record.nodes):
        return {state.number: record.nodes[state.number] for state in states}
    # A first pass may make what later ones keep.
    second_graph = Graph(record)
    seconds = [state for chain in streams_of(second_graph) for state in _states(second_graph, chain)]
    if [state.shape for state in states] != [state.shape for state in seconds]:
        return None
    return {state.number: second for state, second in zip(states, seconds, strict=True)}
