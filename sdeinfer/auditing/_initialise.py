"""Initialise a model by a recipe, and audit it at once."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from sdeinfer._files import InputError
from sdeinfer.auditing._audit import Books, account_only, books_of, is_torch, judged, made, recipe_of
from sdeinfer.auditing._recipe import Recipe
from sdeinfer.auditing._result import Audit
from sdeinfer.auditing._roles import Account, Matrix


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
        audited: whether to audit it.
        seed: seed of the weights.

    Raises:
        InputError: as `audit`; for another width or number of layers, and for an array of several matrices whose σ
            differ. The model is not changed then.
    """
    network = made(model, seed)
    account = account_only(network, inputs)
    if not account.streams:
        raise InputError("model: it has no residual stream, whose branches could be drawn")
    for name, needed, found in (("width", width, account.width), ("layers", layers, account.layers)):
        if needed not in (None, found):
            raise InputError(f"{name}: the model has {found}, and {needed} is needed")
    rules = list(recipe) if isinstance(recipe, list | tuple) else None
    if rules is not None and len(rules) != account.layers:
        raise InputError(f"recipe: {len(rules)} were given for {account.layers} layers")
    each = [recipe_of(rule, network) for rule in (rules or [recipe])]
    whole = dataclasses.replace(each[0], sd=lambda m: _of(each, m).sd(m), bias_sd=lambda m: _of(each, m).bias_sd(m))  # pyright: ignore
    drawn, rows = _drawn(account, whole, seed)
    network = _filled(network, drawn)
    if not audited:
        return Initialised(network, None, rows)
    books: Books = books_of(network, inputs)
    in_branches = dataclasses.replace(
        whole,
        sd=lambda m: whole.sd(m) if _in_branch(m) else None,
        bias_sd=lambda m: whole.bias_sd(m) if m.layer is not None else None,
    )
    return Initialised(network, judged(books, in_branches, network), rows)


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
            sd = rule.bias_sd(dataclasses.replace(matrix, role=matrix.of.split("/")[0]))
            if sd is not None:
                new[name] = sd * rng.standard_normal(matrix.shape)
        elif _in_branch(matrix):
            sd = _sd(matrix, rule)
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


def _sd(matrix: Matrix, rule: Recipe) -> Any:
    """σ of a matrix; of queries, keys and values in one array by its thirds."""
    roles = matrix.role.split("/")
    if len(roles) == 1:
        return rule.sd(matrix)
    sds = [rule.sd(dataclasses.replace(matrix, role=role, fan_out=matrix.fan_out // len(roles))) for role in roles]
    if None in sds:
        return rule.sd(matrix)
    if max(sds) - min(sds) < 1e-9 * max(sds):  # pyright: ignore[reportArgumentType]
        return sds[0]
    axis = matrix.shape.index(matrix.fan_out) if matrix.shape.count(matrix.fan_out) == 1 else -1
    if (
        axis < 0
        or matrix.fan_out % len(roles)
        or matrix.fan_out != len(roles) * matrix.fan_in
        or roles != ["query", "key", "value"]
    ):
        raise InputError(f"model: {matrix.name} is {matrix.role} in one array of unknown layout, with σ that differ")
    spread = np.repeat(np.array(sds, float), matrix.fan_out // len(roles))
    return spread.reshape([-1 if place == axis else 1 for place in range(len(matrix.shape))])


def _filled(network: Any, new: Mapping[str, np.ndarray]) -> Any:
    if not is_torch(network):
        from sdeinfer.auditing._jax import replaced

        return replaced(network, new)
    import sys

    torch = sys.modules["torch"]
    parameters = dict(network.named_parameters())
    with torch.no_grad():
        for name, values in new.items():
            parameters[name].copy_(torch.from_numpy(np.ascontiguousarray(values)).reshape(parameters[name].shape))
    return network
