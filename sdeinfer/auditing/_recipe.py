"""Recipes of initialisation: what is declared of each parameter of a network, and of its forward pass.

Tests: `tests/auditing/test_audit.py`.
"""

import dataclasses
import fnmatch
import math
from collections.abc import Callable, Mapping
from typing import Any

from sdeinfer._files import InputError
from sdeinfer.auditing._account import Logits, Matrix


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A rule that gives the parameters of a network their laws; None where it declares nothing.

    Attributes:
        name: its name in sentences.
        source: where it is defined: a paper with its equation or table, or a file of a library.
        sd: standard deviation σ of the entries of a matrix or an embedding; 0 for zeros.
        bias_sd: standard deviation of the entries of the bias that is added after a matrix.
        law: "normal", "uniform", "truncated" or "orthogonal"; "normal" is met by weights truncated far out.
        multiplier: the factor of every branch in the forward pass, a function of L.
        skip: the factor of the residual stream in every sum, a function of L.
        temperature: the softmax temperature over √d_k, a function of d_k: √d_k for logits that are divided by d_k.
        factors: by name, factors of the standard deviation of a matrix and, for a last matrix, of the multiplier: those
            that an implementation may miss.
        logits: the factor of q kᵀ before softmax, in place of 1/(√d_k temperature), also where q and k are normed.
        gain: the factor that a norm multiplies by, as it is used (1 + w if it is so), or of a norm's bias its value.
        embedding: the factor of the embedding in the stream.
        layer_scale: what parameters that multiply branches start from.
        norm: "pre" or "post", where the norms are.
        causal: whether tokens are independent of later ones.
        zeros: roles whose matrices may be zeros.
    """

    name: str
    source: str
    sd: Callable[[Matrix], float | None]
    bias_sd: Callable[[Matrix], float | None] = lambda matrix: 0.0
    law: Callable[[Matrix], str | None] = lambda matrix: None
    multiplier: Callable[[int], float | None] = lambda layers: 1.0
    skip: Callable[[int], float | None] = lambda layers: 1.0
    temperature: Callable[[int], float | None] = lambda size: 1.0
    factors: Callable[[Matrix], Mapping[str, float]] = lambda matrix: {}
    logits: Callable[[Logits], float | None] | None = None
    gain: Callable[[Matrix], float | None] = lambda matrix: 1.0 if matrix.role == "norm" else 0.0
    embedding: float | None = None
    layer_scale: Callable[[Matrix], float | None] = lambda matrix: None
    norm: str | None = None
    causal: bool | None = None
    zeros: tuple[str, ...] = ()

    def logits_factor(self, found: Logits) -> float | None:
        """The declared factor of q kᵀ."""
        if self.logits is not None:
            return self.logits(found)
        temperature = self.temperature(found.head_size)
        return None if temperature is None or found.normed else 1 / (math.sqrt(found.head_size) * temperature)


def applies(key: str, matrix: Matrix) -> bool:
    """Whether the key of a rule is a role of a matrix, or a glob that its name matches."""
    return key == matrix.role or key in matrix.role.split("/") or fnmatch.fnmatchcase(matrix.name, key)


def of_rules(
    rules: Mapping[str, Any], *, name: str = "the given standard deviations", source: str = "the user"
) -> Recipe:
    """A recipe of rules: the first key that is a role of a matrix, or a glob that its name matches, decides.

    Arguments:
        rules: values are standard deviations, functions of a `Matrix` that return them, or pairs of one and a law, as
            `{"*.wo.weight": lambda matrix: 0.02 / (2 * (matrix.layer + 1)) ** 0.5, "embedding": (0.02, "truncated")}`.
        name: its name in sentences.
        source: where it is from.
    """
    for key, value in rules.items():
        first = value[0] if isinstance(value, tuple) and value else value
        if not (
            callable(first)
            or (isinstance(first, int | float) and not isinstance(first, bool) and 0 <= first < math.inf)
        ):
            raise InputError(
                f"recipe: a standard deviation, or a function of a Matrix, is needed for {key}, got {value!r}"
            )

    def rule(matrix: Matrix) -> tuple[Any, str | None]:
        for key, value in rules.items():
            if applies(key, matrix):
                return value if isinstance(value, tuple) else (value, None)
        return None, None

    def sd(matrix: Matrix) -> float | None:
        value: Any = rule(matrix)[0]
        found: Any = value(matrix) if callable(value) else value
        return found

    def bias_sd(matrix: Matrix) -> float | None:
        value = sd(matrix)
        return 0.0 if value is None else value

    def factors(matrix: Matrix) -> dict[str, float]:
        value, of_first = sd(matrix), {"attention output": "value", "mlp output": "up"}.get(matrix.role)
        first = sd(dataclasses.replace(matrix, role=of_first, name="")) if of_first else None
        scale = 1 / math.sqrt(2 * max(matrix.layers, 1))
        return {"1/√(2L)": scale} if value and first and math.isclose(value, scale * first, rel_tol=0.01) else {}

    return Recipe(name, source, sd, bias_sd, lambda matrix: rule(matrix)[1], factors=factors)
