"""Two models beside each other: their roles, what one is as a recipe for the other, and their outputs.

Tests: `tests/auditing/test_torch_audit.py`.
"""

import collections
import copy
from typing import Any

import numpy as np

from sdeinfer.auditing._books import PASS_ROUNDING, Books
from sdeinfer.auditing._recipe import Declared, Recipe, nothing
from sdeinfer.auditing._tests import Test, failed
from sdeinfer.passes._account import Account, Matrix
from sdeinfer.passes._graph import Graph
from sdeinfer.passes._models import filled, is_torch
from sdeinfer.passes._passes import record_of
from sdeinfer.passes._roles import account_of


def other_roles(books: Books, peer: Books) -> list[Test]:
    """Roles, and numbers of layers, of two models that differ."""
    roles, peer_roles = (
        {matrix.role for matrix in side.account.matrices.values() if matrix.linear} for side in (books, peer)
    )
    says = {role: f"no matrix is a {role}, where {peer.name} has one" for role in sorted(peer_roles - roles)}
    says |= {role: f"{peer.name} has no {role}, where there is one" for role in sorted(roles - peer_roles)}
    if books.account.layers != peer.account.layers:
        says["layers"] = f"{books.account.layers} layers, where {peer.name} has {peer.account.layers}"
    return [failed("roles", subject, clause) for subject, clause in says.items()]


def other_outputs(like: Any, books: Books, peer: Books) -> list[Test]:
    """Whether the other model returns the same values with the weights of this one, by equal names or equal roles."""
    names = _names(books.account, peer.account)
    if names is None:
        why = "parameters of the two models are not the same by name or by role"
        return [Test("untested", "outputs", None, f"outputs with the same weights: {why}")]
    parameters = books.account.graph.record.parameters
    values = {
        peer_name: parameters[name].read(slice(None)).reshape(parameters[name].shape)
        for name, peer_name in names.items()
    }
    record = record_of(filled(copy.deepcopy(like) if is_torch(like) else like, values), books.inputs)
    ends = zip(*([c[-1].sum.rows for c in a.streams] for a in (books.account, account_of(Graph(record)))), strict=False)
    rows = [(a, b) for a, b in ends if a is not None and b is not None and a.shape == b.shape and b.all()]
    if not rows:
        return [Test("untested", "outputs", None, "outputs with the same weights: no stream was seen")]
    far = max(float(np.abs(a / b - 1).max()) for a, b in rows)
    says = f"with the same weights {peer.name} returns other values (rows of the stream differ by {100 * far:.2g} %)"
    return [Test("outputs", "outputs", far < 10 * PASS_ROUNDING, says)]


def _names(account: Account, peer: Account) -> dict[str, str] | None:
    """The other model's name of each parameter: the same, or that of the only one with its role, layer and shape."""
    parameters, peer_parameters = (side.graph.record.parameters for side in (account, peer))
    if {name: parameter.shape for name, parameter in parameters.items()} == {
        name: parameter.shape for name, parameter in peer_parameters.items()
    }:
        return {name: name for name in parameters}
    keys, peer_keys = _keys(account), _keys(peer)
    by_key = {key: name for name, key in peer_keys.items()}
    if len(by_key) != len(peer_keys) or len({*keys.values()}) != len(keys) or {*keys.values()} != {*by_key}:
        return None
    return {name: by_key[key] for name, key in keys.items()}


def _keys(account: Account) -> dict[str, tuple]:
    """Each parameter's layer, roles and shape; norms, which are alike in these, in the order of their use."""
    matrices: dict[str, list[Matrix]] = {}
    for matrix in account.matrices.values():
        matrices.setdefault(matrix.array, []).append(matrix)
    keys: dict[str, tuple] = {name: (name,) for name in account.graph.record.parameters if name not in matrices}
    count = collections.Counter[tuple]()
    for name, parts in matrices.items():
        place = parts[0].role, parts[0].of, parts[0].layer
        roles = tuple((matrix.role, matrix.of) for matrix in parts)
        keys[name] = parts[0].layer, roles, account.graph.record.parameters[name].shape, count[place]
        count[place] += len(parts)
    return keys


def as_found(books: Books, subject: Account) -> Recipe:
    """Another model as a recipe: σ with its error and laws of each parameter, factors, gains, logits.

    Arguments:
        books: those of the other model.
        subject: the account of the model that is compared with it.
    """
    account, laws = books.account, books.laws
    pairs = _pairs(subject, account)

    def entries(matrix: Matrix) -> Declared | None:
        peer_name = pairs.get(matrix.name)
        if peer_name is None or laws[peer_name].name == "not finite":
            return None
        law = laws[peer_name]
        if law.sd == 0:
            same = subject.parameters[matrix.name].shape == account.parameters[peer_name].shape
            return Declared(law.mean, 0.0, values=account.parameters[peer_name].entries() if same else None)
        known = law.name in ("normal", "uniform", "orthogonal") and law.seen >= 4096  # few entries tell few laws apart
        return Declared(law.mean, law.sd, law.name if known else None, error=law.error)

    def gain(matrix: Matrix) -> float | None:
        peer_name = pairs.get(matrix.name)
        if peer_name is None or laws[peer_name].sd > 0:
            return None
        return account.gains.get(peer_name, [(laws[peer_name].mean, 0.0)])[0][0]

    factors = {attention.layer: attention.factor for attention in account.logits}
    writers = [source for sources in account.writers.values() for source in sources if source.plain]
    skips = [link.skip.factor for chain in account.streams for link in chain[1:]]
    return Recipe(
        f"like {books.name}",
        "another model",
        nothing,
        nothing,
        multiplier=lambda layers: abs(writers[0].factor) if writers else None,
        skip=lambda layers: skips[0] if skips else None,
        logits=lambda logits: factors.get(logits.layer),
        gain=gain,
        entries=entries,
        causal=books.dependences.causal,
    )


def _pairs(account: Account, peer: Account) -> dict[str, str]:
    """The other model's name of each array and of each matrix in one: the same, or that of its role and layer."""
    names = _names(account, peer) or {}
    by_role: dict[tuple, str] = {}
    for name, matrix in peer.matrices.items():
        for layer in (matrix.layer, None):
            by_role.setdefault((matrix.role, matrix.of, layer), name)
    parts = {matrix.array for matrix in account.matrices.values() if matrix.places is not None}
    pairs = {name: peer_name for name, peer_name in names.items() if name not in parts}
    for name, matrix in account.matrices.items():
        keys = [(matrix.role, matrix.of, layer) for layer in (matrix.layer, None)]
        peer_name = next((by_role[key] for key in keys if key in by_role), None)
        if name not in pairs and peer_name is not None:
            pairs[name] = peer_name
    return pairs
