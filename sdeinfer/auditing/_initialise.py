"""Initialise a model by a recipe, and audit it at once. Tests: `tests/tuning/test_hand_over.py`."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from scipy import stats

from sdeinfer._files import InputError
from sdeinfer.auditing._audit import audit_of_books, recipe_of
from sdeinfer.auditing._books import books_of
from sdeinfer.auditing._recipe import Declared, Recipe, nothing
from sdeinfer.auditing._result import Audit
from sdeinfer.passes._account import Account, Matrix
from sdeinfer.passes._graph import Graph
from sdeinfer.passes._models import filled, made
from sdeinfer.passes._passes import first_pass
from sdeinfer.passes._roles import account_of


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Initialised:
    """A model with new weights.

    Attributes:
        model: the model; PyTorch has the same object, JAX a new one.
        audit: its audit against the recipe; None if it was not asked for.
        rows: one for each matrix: its name, layer, role, fan-in and standard deviation.
    """

    model: Any
    audit: Audit | None
    rows: tuple[Mapping[str, Any], ...]

    @property
    def matrices(self) -> Any:
        """A table of `rows`."""
        import pandas as pd

        return pd.DataFrame(list(self.rows))

    def __repr__(self) -> str:
        """The verdict of the audit."""
        return f"{len(self.rows)} matrices drawn; {'not audited' if self.audit is None else self.audit}"


def initialise(
    model: Any,
    recipe: str | Recipe | Mapping[str, Any] | Sequence[Recipe],
    inputs: Any = None,
    *,
    width: int | None = None,
    layers: int | None = None,
    head_size: int | None = None,
    audited: bool = True,
    seed: int = 0,
) -> Initialised:
    """Draw the weights of a model's residual branches by a recipe, and audit what the model then is.

    Matrices of branches have the recipe's law, independent normals if it says none, and their biases are normal;
    others, as embeddings and norms, are left alone unless a rule has their name or role. So is the forward pass: a
    recipe with a multiplier, a skip or a temperature needs a model that has them, and the audit says whether it does.

    Arguments:
        model: a module of PyTorch, which is changed in place; of JAX, of which a new one is made; see `audit`.
        recipe: see `audit`; or one `Recipe` for each layer.
        inputs: the model's input, see `audit`.
        width: n, to be checked; None for any.
        layers: L, to be checked; None for any.
        head_size: d_k, to be checked; None for any.
        audited: whether to audit it.
        seed: seed of the weights.

    Raises:
        InputError: as `audit`; for another width or number of layers, and for an array of several matrices whose σ
            differ. The model is not changed then.
    """
    network = made(model, seed)
    account = account_of(Graph(first_pass(network, inputs)[0]))
    if not account.streams:
        raise InputError("model: it has no residual stream, whose branches could be drawn")
    sizes = {"width": account.width, "layers": account.layers}
    if account.logits:
        sizes["head_size"] = account.logits[0].head_size
    for name, needed in {"width": width, "layers": layers, "head_size": head_size}.items():
        if needed is not None and sizes.get(name, needed) != needed:
            raise InputError(f"{name}: the model has {sizes[name]}, and {needed} is needed")
    if isinstance(recipe, list | tuple):
        rules: list[Any] = [recipe_of(rule, network) for rule in recipe]
    else:
        rules = [recipe_of(recipe, network)] * account.layers
    if len(rules) != account.layers:
        raise InputError(f"recipe: {len(rules)} were given for {account.layers} layers")
    of_branches = {
        matrix: _declared(rules[matrix.layer or 0], matrix)
        for matrix in account.matrices.values()
        if _in_branch(matrix) or rules[matrix.layer or 0].entries(matrix) is not None
    }
    drawn, rows = _drawn(account, of_branches, seed, name=rules[0].name)
    network = filled(network, drawn)
    if not audited:
        return Initialised(network, None, rows)
    books = books_of(network, inputs)
    by_name = {matrix.name: declared for matrix, declared in of_branches.items()}

    def entries(matrix: Matrix) -> Declared | None:
        drawn_or_unused = matrix.name in by_name or not matrix.role
        return by_name.get(matrix.name) if drawn_or_unused else rules[0].entries(matrix)

    in_branches = dataclasses.replace(rules[0], entries=entries, sd=nothing, bias_sd=nothing)
    return Initialised(network, audit_of_books(books, in_branches, network), rows)


def _declared(recipe: Recipe, matrix: Matrix) -> Declared | None:
    """The law that a recipe declares for a matrix; None for a law that was measured, and is not known."""
    law = recipe.declared(matrix)
    return None if law is None or law.error or law.values is not None else law


def _in_branch(matrix: Matrix) -> bool:
    return matrix.layer is not None and (matrix.linear or matrix.role == "bias")


def _drawn(
    account: Account, declared: Mapping[Matrix, Declared | None], seed: int, *, name: str
) -> tuple[dict[str, np.ndarray], tuple[Mapping[str, Any], ...]]:
    """New arrays by name; all σ are checked before the first array is filled."""
    for matrix, law in declared.items():
        if law is None and len(matrix.roles) > 1:
            roles = ", ".join(matrix.roles)
            raise InputError(f"model: {matrix.name} is {roles} in one array of unknown layout, with σ that differ")
        if law is None and matrix.role != "bias":
            raise InputError(f"recipe: {name} has no standard deviation for {matrix.name} ({matrix.role})")
    new: dict[str, np.ndarray] = {}
    rows = []
    for number, (matrix, law) in enumerate(declared.items()):
        if law is None:
            continue
        rng = np.random.default_rng([seed, number, 1])  # not those of `default_rng(seed)`
        values = law.mean + law.sd * _unit(law.law, rng, matrix.shape)
        if matrix.places is None:
            new[matrix.array] = values
        else:
            whole = account.graph.record.parameters[matrix.array]
            array = new.setdefault(matrix.array, whole.read(slice(None)))
            array[matrix.places(np.arange(matrix.places.size))] = values.ravel()
        if matrix.role != "bias":
            place = {"path": matrix.name, "layer": matrix.layer, "matrix": matrix.role}
            rows.append(place | {"fan_in": matrix.fan_in, "sd": law.sd})
    shapes = {name: account.graph.record.parameters[name].shape for name in new}
    return {name: array.reshape(shapes[name]) for name, array in new.items()}, tuple(rows)


def _unit(law: str | None, rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Entries of variance 1 by a law."""
    match law:
        case "uniform":
            return rng.uniform(-(3**0.5), 3**0.5, shape)
        case "truncated":
            cut = stats.truncnorm(-2.0, 2.0)
            return cut.rvs(shape, random_state=rng) / cut.std()
        case "orthogonal":
            rows, columns = shape[0], math.prod(shape[1:])
            Q, R = np.linalg.qr(rng.standard_normal((max(rows, columns), min(rows, columns))))
            Q *= np.sign(np.diagonal(R))
            return (Q if rows >= columns else Q.T).reshape(shape) * max(rows, columns) ** 0.5
    return rng.standard_normal(shape)
