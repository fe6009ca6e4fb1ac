"""Two models beside each other: their roles, what one is as a recipe for the other, and their outputs.

Tests: `tests/auditing/test_torch_audit.py`.
"""

import copy
from typing import Any

import numpy as np

from sdeinfer.auditing._books import Books, filled, is_torch, tap
from sdeinfer.auditing._graph import Graph
from sdeinfer.auditing._recipe import Recipe
from sdeinfer.auditing._roles import account_of
from sdeinfer.auditing._tests import Test

SAME = 3e-5
"""Relative difference of mean squares below which two implementations differ by rounding."""


def other_roles(books: Books, other: Books) -> list[Test]:
    """Roles, and numbers of layers, of two models that differ."""
    own, theirs = (
        {matrix.role for matrix in each.account.matrices.values() if matrix.linear} for each in (books, other)
    )
    tests = []
    for role in sorted(theirs - own):
        tests.append(Test("roles", role, passed=False, says=f"no matrix is a {role}, where {other.name} has one"))
    if books.account.layers != other.account.layers:
        says = f"{books.account.layers} layers, where {other.name} has {other.account.layers}"
        tests.append(Test("roles", "layers", passed=False, says=says))
    return tests


def other_outputs(like: Any, books: Books, other: Books) -> list[Test]:
    """Whether the other model returns the same values with the weights of this one, by equal names of parameters."""
    own, theirs = (each.account.graph.record.parameters for each in (books, other))
    if {name: each.shape for name, each in own.items()} != {name: each.shape for name, each in theirs.items()}:
        return []
    if any("[" in name and name.endswith("]") for name in own) and not is_torch(like):
        return []  # layers that a scan cuts out of one array
    values = {name: each.read(slice(None)).reshape(each.shape) for name, each in own.items()}
    record = tap(like)[0](filled(copy.deepcopy(like) if is_torch(like) else like, values), books.inputs)
    ends = zip(*([c[-1].sum.rows for c in a.streams] for a in (books.account, account_of(Graph(record)))), strict=False)
    far = max((float(np.abs(a / b - 1).max()) for a, b in ends if a.shape == b.shape and b.all()), default=0.0)
    says = f"with the same weights {other.name} returns other values (rows of the stream differ by {100 * far:.2g} %)"
    return [Test("outputs", "outputs", far < SAME, says)]


def as_found(books: Books) -> Recipe:
    """Another model as a recipe: σ and laws by role and layer, factors, logits."""
    account, laws = books.account, books.laws
    exact: dict[tuple, tuple[float, str]] = {}
    for name, matrix in account.matrices.items():
        law = laws[name]
        for key in ((matrix.role, matrix.of, matrix.layer), (matrix.role, matrix.of, None)):
            exact.setdefault(key, (law.sd, law.name))

    def found(matrix: Any) -> tuple[float | None, str | None]:
        own = exact.get((matrix.role, matrix.of, matrix.layer)) or exact.get((matrix.role, matrix.of, None))
        return own or (None, None)

    logits = {each.layer: each.factor for each in account.logits}
    writers = [source for each in account.writers.values() for _, source in each if source.plain]
    skips = [link.skip.factor for chain in account.streams for link in chain[1:]]
    return Recipe(
        f"like {books.name}",
        "another model",
        lambda matrix: found(matrix)[0],
        lambda matrix: found(matrix)[0],
        lambda matrix: law if (law := found(matrix)[1]) in ("normal", "uniform", "orthogonal") else None,
        multiplier=lambda layers: abs(writers[0].factor) if writers else None,
        skip=lambda layers: skips[0] if skips else None,
        logits=lambda each: logits.get(each.layer),
        causal=books.dependences.causal,
    )
