"""Recipes of initialisation: what is declared of each parameter of a network, and of its forward pass.

Tests: `tests/auditing/test_audit.py`.
"""

import dataclasses
import fnmatch
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from sdeinfer._files import InputError
from sdeinfer.passes._account import Account, Matrix
from sdeinfer.passes._attention import Logits


class Declared(NamedTuple):
    """The declared entries of a parameter: a law with its mean and σ, or all of its values.

    `error` is the standard deviation of log σ, where this was itself measured.
    """

    mean: float
    sd: float
    law: str | None = None
    values: np.ndarray | None = None
    error: float = 0.0


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A rule that gives the parameters of a network their laws; None where it declares nothing.

    Attributes:
        name: its name in sentences.
        source: a paper with its equation or table, or a file of a library, that defines it.
        sd: standard deviation σ of the entries of a matrix or an embedding; 0 for zeros.
        bias_sd: standard deviation of the entries of the bias that is added after a matrix.
        law: "normal", "uniform", "truncated" or "orthogonal"; "normal" is met by weights truncated far out.
        multiplier: the factor of every branch in the forward pass, a function of L.
        skip: the factor of the residual stream in every sum, a function of L.
        temperature: the softmax temperature over √d_k, a function of d_k: √d_k for logits that are divided by d_k.
        logits: the factor of q kᵀ before softmax, in place of 1/(√d_k temperature), also where q and k are normed.
        gain: the factor that a norm multiplies by, as it is used (1 + w if it is so), or of a norm's bias its value.
        embedding: the factor of the embedding in the stream.
        free_readout: whether any factor of what the head reads is as declared.
        layer_scale: the initial value of parameters that multiply branches.
        entries: the declared entries of a parameter of any role, before all other rules; the role of one that is known
            by its name alone is "".
        norm: "pre", "post", "sandwich" or "qk", where the norms are; several with "+" between.
        causal: whether tokens are independent of later ones.
    """

    name: str
    source: str
    sd: Callable[[Matrix], float | None]
    bias_sd: Callable[[Matrix], float | None] = lambda matrix: 0.0
    law: Callable[[Matrix], str | None] = lambda matrix: None
    multiplier: Callable[[int], float | None] = lambda layers: 1.0
    skip: Callable[[int], float | None] = lambda layers: 1.0
    temperature: Callable[[int], float | None] = lambda size: 1.0
    logits: Callable[[Logits], float | None] | None = None
    gain: Callable[[Matrix], float | None] = lambda matrix: 1.0 if matrix.role == "norm" else 0.0
    embedding: float | None = None
    free_readout: bool = False
    layer_scale: Callable[[Matrix], float | None] = lambda matrix: None
    entries: Callable[[Matrix], Declared | None] = lambda matrix: None
    norm: str | None = None
    causal: bool | None = None

    def declared(self, matrix: Matrix) -> Declared | None:
        """The declared entries of a matrix, a table or a bias."""
        if (entries := self.entries(matrix)) is not None:
            return entries
        sd = self._sd_by_role(matrix)
        return None if sd is None else Declared(0.0, sd, self.law(matrix))

    def declared_by_name(self, name: str) -> Declared | None:
        """The declared entries of a parameter, or of a matrix in one, whatever its role."""
        return self.entries(Matrix("", 0, 0, 0, 0, name=name, array=name))

    def _sd_by_role(self, matrix: Matrix) -> float | None:
        if matrix.role == "bias":
            return self.bias_sd(matrix)
        if not (matrix.linear or matrix.role in ("embedding", "position", "offset")):
            return None
        sds = {self.sd(dataclasses.replace(matrix, role=role, roles=())) for role in matrix.roles or (matrix.role,)}
        return sds.pop() if len(sds) == 1 else None  # roles of one array may differ

    def logits_factor(self, found: Logits) -> float | None:
        """The declared factor of q kᵀ."""
        if self.logits is not None:
            return self.logits(found)
        temperature = self.temperature(found.head_size)
        return None if temperature is None or found.normed else 1 / (math.sqrt(found.head_size) * temperature)

    def changes(self, name: str) -> bool:
        """Whether a function is another one than that of an ordinary network."""
        return getattr(self, name) is not Recipe.__dataclass_fields__[name].default


def applies(key: str, matrix: Matrix) -> bool:
    """Whether the key of a rule is a role of a matrix, or a glob that its name matches."""
    names = {matrix.name, matrix.array} - {""}
    return key in (matrix.role, *matrix.roles) or any(fnmatch.fnmatchcase(name, key) for name in names)


def unmatched(rules: Mapping[str, Any], account: Account) -> str | None:
    """The first key of rules that matches neither a matrix nor a parameter."""
    names, matrices = account.graph.record.parameters, account.matrices.values()
    for key in rules:
        if not any(applies(key, matrix) for matrix in matrices) and not fnmatch.filter(names, key):
            return key
    return None


def of_rules(rules: Mapping[str, Any], *, name: str = "the given recipe", source: str = "the user") -> Recipe:
    """A recipe of rules: the first key that is a role of a matrix, or a glob that a parameter's name matches, decides.

    Arguments:
        rules: values are standard deviations, functions of a `Matrix` that return them, or pairs of one and a law, as
            `{"*.wo.weight": lambda matrix: 0.02 / (2 * (matrix.layer + 1)) ** 0.5, "embedding": (0.02, "truncated")}`;
            `(0.2, "constant")` declares the value of all entries.
        name: its name in sentences.
        source: its origin.
    """
    pairs = {key: _value_and_law(key, rule) for key, rule in rules.items()}

    def rule(matrix: Matrix) -> tuple[Any, str | None]:
        value, law = next((pair for key, pair in pairs.items() if applies(key, matrix)), (None, None))
        if callable(value):
            value = value(matrix) if matrix.role else None  # a function needs the place in the pass
        return value, law

    def sd(matrix: Matrix) -> float | None:
        value, law = rule(matrix)
        return None if law == "constant" else value

    def entries(matrix: Matrix) -> Declared | None:
        # Roles of one array may differ, so that its name alone decides.
        value, law = rule(dataclasses.replace(matrix, role="", roles=()) if matrix.roles else matrix)
        if value is None:
            return None
        return Declared(value, 0.0, law) if law == "constant" else Declared(0.0, value, law)

    def law(matrix: Matrix) -> str | None:
        return rule(matrix)[1]

    return Recipe(name, source, sd, sd, law, nothing, nothing, nothing, gain=nothing, entries=entries)


def nothing(operand: Any) -> None:
    """A rule that declares nothing."""


def _value_and_law(key: str, rule: Any) -> tuple[Any, str | None]:
    value, law = rule if isinstance(rule, tuple) and len(rule) == 2 else (rule, None)
    number = isinstance(value, int | float) and math.isfinite(value) and (value >= 0 or law == "constant")
    if callable(value) or (number and not isinstance(value, bool)):
        return value, law
    raise InputError(f"recipe: a standard deviation, or a function of a Matrix, is needed for {key}, got {rule!r}")
