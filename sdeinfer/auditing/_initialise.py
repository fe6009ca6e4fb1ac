"""Initialise a model by a recipe, and audit it at once. Tests: `tests/tuning/test_hand_over.py`."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from sdeinfer._files import InputError
from sdeinfer.auditing._account import Account, Matrix
from sdeinfer.auditing._audit import judged, recipe_of
from sdeinfer.auditing._books import books_of, filled, first_pass, made
from sdeinfer.auditing._graph import Graph
from sdeinfer.auditing._recipe import Recipe
from sdeinfer.auditing._result import Audit
from sdeinfer.auditing._roles import account_of


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Initialised:
    """A model with new weights.

    Attributes:
        model: the model: of PyTorch the same object, of JAX a new one.
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

    Matrices of branches are independent normals, or uniform if the recipe says so, and their biases normal; others, as
    embeddings and norms, are left alone. So is the forward pass: a recipe with a multiplier, a skip or a temperature
    needs a model that has them, and the audit says whether it does.

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
    own = {"width": account.width, "layers": account.layers}
    if account.logits:
        own["head_size"] = account.logits[0].head_size
    for name, needed in {"width": width, "layers": layers, "head_size": head_size}.items():
        if needed is not None and own.get(name, needed) != needed:
            raise InputError(f"{name}: the model has {own[name]}, and {needed} is needed")
    rules = list(recipe) if isinstance(recipe, list | tuple) else None
    if rules is not None and len(rules) != account.layers:
        raise InputError(f"recipe: {len(rules)} were given for {account.layers} layers")
    each = [recipe_of(rule, network) for rule in (rules or [recipe])]
    whole = dataclasses.replace(each[0], sd=lambda m: _of(each, m).sd(m), bias_sd=lambda m: _of(each, m).bias_sd(m))  # pyright: ignore
    drawn, rows = _drawn(account, whole, seed)
    network = filled(network, drawn)
    if not audited:
        return Initialised(network, None, rows)
    books = books_of(network, inputs)
    in_branches = dataclasses.replace(
        whole,
        sd=lambda m: whole.sd(m) if _in_branch(m) else None,
        bias_sd=lambda m: whole.bias_sd(m) if m.layer is not None else None,
    )
    return Initialised(network, judged(books, in_branches, network, causal=whole.causal), rows)


def _of(recipes: Sequence[Any], matrix: Matrix) -> Recipe:
    return recipes[0] if len(recipes) == 1 else recipes[matrix.layer or 0]


def _in_branch(matrix: Matrix) -> bool:
    return matrix.layer is not None and matrix.linear


def _drawn(account: Account, rule: Recipe, seed: int) -> tuple[dict[str, np.ndarray], tuple[Mapping[str, Any], ...]]:
    """New arrays by name; all sizes are checked before the first array is filled."""
    new, rows = {}, []
    for number, (name, matrix) in enumerate(account.matrices.items()):
        rng = np.random.default_rng([seed, number])
        if matrix.role == "bias" and matrix.layer is not None:
            sds = {rule.bias_sd(dataclasses.replace(matrix, role=role, of=role)) for role in matrix.of.split("/")}
            if len(sds) > 1:
                raise InputError(f"model: {name} is the bias of {matrix.of} in one array, with σ that differ")
            if (sd := sds.pop()) is not None:
                new[name] = sd * rng.standard_normal(matrix.shape)
        elif _in_branch(matrix):
            sd = _sd(account, matrix, rule)
            if sd is None:
                raise InputError(f"recipe: {rule.name} has no standard deviation for {name} ({matrix.role})")
            uniform = rule.law(matrix) == "uniform"
            new[name] = sd * (
                rng.uniform(-(3**0.5), 3**0.5, matrix.shape) if uniform else rng.standard_normal(matrix.shape)
            )
            rows.append(
                {
                    "path": name,
                    "layer": matrix.layer,
                    "matrix": matrix.role,
                    "fan_in": matrix.fan_in,
                    "sd": float(np.max(sd)),
                }
            )
    return new, tuple(rows)


def _sd(account: Account, matrix: Matrix, rule: Recipe) -> Any:
    """σ of a matrix, or of each of its outputs if queries, keys and values are in one array."""
    roles = matrix.role.split("/")
    if len(roles) == 1:
        return rule.sd(matrix)
    sds = [rule.sd(dataclasses.replace(matrix, role=role, fan_out=matrix.fan_out // len(roles))) for role in roles]
    if None in sds:
        return rule.sd(matrix)
    if max(sds) - min(sds) < 1e-9 * max(sds):  # pyright: ignore[reportArgumentType]
        return sds[0]
    axis = matrix.shape.index(matrix.fan_out) if matrix.shape.count(matrix.fan_out) == 1 else -1
    sizes = _sizes(account, matrix) if roles == ["query", "key", "value"] and axis >= 0 else None
    if sizes is None:
        raise InputError(f"model: {matrix.name} is {matrix.role} in one array of unknown layout, with σ that differ")
    spread = np.repeat(np.array(sds, float), sizes)
    spread = np.tile(spread, matrix.fan_out // len(spread))
    return spread.reshape([-1 if place == axis else 1 for place in range(len(matrix.shape))])


def _sizes(account: Account, matrix: Matrix) -> tuple[int, int, int] | None:
    """Outputs of queries, keys and values that follow each other, of all heads or of one, by the shapes of their views.

    None if the shapes do not say.
    """
    product = account.uses[matrix.name][0]
    views, shapes = {product.number}, []
    for node in account.graph.record.nodes[product.number + 1 :]:
        if node.kind == "view" and any(each.number in views for each in node.inputs):
            views.add(node.number)
            shapes.append(node.shape)
    for size in {each.head_size for each in account.logits}:
        heads, rest = divmod(matrix.fan_out, 3 * size)
        if heads > 1 and not rest and any(s[-2:] == (heads, 3 * size) or s[-3:] == (heads, 3, size) for s in shapes):
            return size, size, size
    lengths = {shape[-1] for shape in shapes if shape[-1]}
    third = matrix.fan_out // 3
    if any(shape[-3:-1] == (3, third // each.head_size) for shape in shapes for each in account.logits):
        lengths.add(third)
    found = {(q, kv, kv) for q in lengths for kv in lengths if q + 2 * kv == matrix.fan_out}
    return found.pop() if len(found) == 1 else None
