"""Two models beside each other: their roles, what one is as a recipe for the other, and their outputs.

Tests: `tests/auditing/test_torch_audit.py`.
"""

import collections
import copy
from typing import Any

import numpy as np

from sdeinfer.auditing._books import ROUNDING, Books
from sdeinfer.auditing._recipe import Declared, Recipe, nothing
from sdeinfer.auditing._tests import Test, failed
from sdeinfer.passes._account import Account, Matrix
from sdeinfer.passes._graph import Graph
from sdeinfer.passes._models import filled, is_torch
from sdeinfer.passes._pass import record_of
from sdeinfer.passes._roles import account_of


def other_roles(books: Books, other: Books) -> list[Test]:
    """Roles, and numbers of layers, of two models that differ."""
    own, theirs = (
        {matrix.role for matrix in each.account.matrices.values() if matrix.linear} for each in (books, other)
    )
    says = {role: f"no matrix is a {role}, where {other.name} has one" for role in sorted(theirs - own)}
    says |= {role: f"{other.name} has no {role}, where there is one" for role in sorted(own - theirs)}
    if books.account.layers != other.account.layers:
        says["layers"] = f"{books.account.layers} layers, where {other.name} has {other.account.layers}"
    return [failed("roles", what, clause) for what, clause in says.items()]


def other_outputs(like: Any, books: Books, other: Books) -> list[Test]:
    """Whether the other model returns the same values with the weights of this one, by equal names or equal roles."""
    names = _names(books.account, other.account)
    if names is None:
        why = "parameters of the two models are not the same by name or by role"
        return [Test("untested", "outputs", None, f"outputs with the same weights: {why}")]
    own = books.account.graph.record.parameters
    values = {theirs: own[name].read(slice(None)).reshape(own[name].shape) for name, theirs in names.items()}
    record = record_of(filled(copy.deepcopy(like) if is_torch(like) else like, values), books.inputs)
    ends = zip(*([c[-1].sum.rows for c in a.streams] for a in (books.account, account_of(Graph(record)))), strict=False)
    rows = [(a, b) for a, b in ends if a is not None and b is not None and a.shape == b.shape and b.all()]
    if not rows:
        return [Test("untested", "outputs", None, "outputs with the same weights: no stream was seen")]
    far = max(float(np.abs(a / b - 1).max()) for a, b in rows)
    says = f"with the same weights {other.name} returns other values (rows of the stream differ by {100 * far:.2g} %)"
    return [Test("outputs", "outputs", far < 10 * ROUNDING, says)]


def _names(own: Account, other: Account) -> dict[str, str] | None:
    """The other model's name of each parameter: the same, or that of the only one with its role, layer and shape."""
    ours, theirs = (each.graph.record.parameters for each in (own, other))
    if {name: each.shape for name, each in ours.items()} == {name: each.shape for name, each in theirs.items()}:
        return {name: name for name in ours}
    keys, others = _keys(own), _keys(other)
    by_key = {key: name for name, key in others.items()}
    if len(by_key) != len(others) or len({*keys.values()}) != len(keys) or {*keys.values()} != {*by_key}:
        return None
    return {name: by_key[key] for name, key in keys.items()}


def _keys(account: Account) -> dict[str, tuple]:
    """Each parameter's layer, roles and shape; norms, which are alike in these, in the order of their use."""
    matrices: dict[str, list[Matrix]] = {}
    for matrix in account.matrices.values():
        matrices.setdefault(matrix.array, []).append(matrix)
    found: dict[str, tuple] = {name: (name,) for name in account.graph.record.parameters if name not in matrices}
    count = collections.Counter[tuple]()
    for name, own in matrices.items():
        place = own[0].role, own[0].of, own[0].layer
        roles = tuple((matrix.role, matrix.of) for matrix in own)
        found[name] = own[0].layer, roles, account.graph.record.parameters[name].shape, count[place]
        count[place] += len(own)
    return found


def as_found(books: Books, own: Account) -> Recipe:
    """Another model as a recipe: σ with its error and laws of each parameter, factors, gains, logits.

    Arguments:
        books: those of the other model.
        own: the account of the model that is compared with it.
    """
    account, laws = books.account, books.laws
    pairs = _pairs(own, account)

    def named(name: str) -> Declared | None:
        other = pairs.get(name)
        if other is None or laws[other].name == "not finite":
            return None
        law = laws[other]
        if law.sd == 0:
            same = own.parameters[name].shape == account.parameters[other].shape
            return Declared(law.mean, 0.0, values=account.parameters[other].entries() if same else None)
        known = law.name in ("normal", "uniform", "orthogonal") and law.seen >= 4096  # few entries tell few laws apart
        return Declared(law.mean, law.sd, law.name if known else None, error=law.error)

    def gain(matrix: Matrix) -> float | None:
        other = pairs.get(matrix.name)
        if other is None or laws[other].sd > 0:
            return None
        return account.gains.get(other, [(laws[other].mean, 0.0)])[0][0]

    logits = {each.layer: each.factor for each in account.logits}
    writers = [source for each in account.writers.values() for _, source in each if source.plain]
    skips = [link.skip.factor for chain in account.streams for link in chain[1:]]
    return Recipe(
        f"like {books.name}",
        "another model",
        nothing,
        nothing,
        multiplier=lambda layers: abs(writers[0].factor) if writers else None,
        skip=lambda layers: skips[0] if skips else None,
        logits=lambda found: logits.get(found.layer),
        gain=gain,
        named=named,
        causal=books.dependences.causal,
    )


def _pairs(own: Account, other: Account) -> dict[str, str]:
    """The other model's name of each array and of each matrix in one: the same, or that of its role and layer."""
    names = _names(own, other) or {}
    by_role: dict[tuple, str] = {}
    for name, matrix in other.matrices.items():
        for layer in (matrix.layer, None):
            by_role.setdefault((matrix.role, matrix.of, layer), name)
    parts = {matrix.array for matrix in own.matrices.values() if matrix.places is not None}
    found = {name: theirs for name, theirs in names.items() if name not in parts}
    for name, matrix in own.matrices.items():
        keys = [(matrix.role, matrix.of, layer) for layer in (matrix.layer, None)]
        theirs = next((by_role[key] for key in keys if key in by_role), None)
        if name not in found and theirs is not None:
            found[name] = theirs
    return found
