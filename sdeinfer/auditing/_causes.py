"""Mistakes that explain the ratio of what is found to what is declared, in all layers at once.

Tests: `tests/auditing/test_audit.py`.
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from scipy import stats

from sdeinfer.auditing._recipe import Recipe
from sdeinfer.auditing._tests import Row, Test, pooled_ratio
from sdeinfer.passes._attention import Logits

RATIO_WIDTH = 0.03
"""A mistake explains a ratio if their logarithms differ by less than this, and by less than four standard errors."""


class Mistake(NamedTuple):
    """A mistake in the σ of all tensors of a role.

    Attributes:
        symbol: what it multiplies σ by, as a formula; "" for a number without one.
        factor: the same as a number, or as one for each tensor.
        cause: the mistake in words.
        name: what the cause has in common with those of other roles; "" for all of it.
        of_fans: whether numbers of inputs and outputs explain it, which two roles with swapped σ do not do better.
    """

    symbol: str
    factor: np.ndarray | float
    cause: str
    name: str = ""
    of_fans: bool = False


def explained(tests: list[Test], rows: list[Row], recipe: Recipe) -> list[Test]:
    """The failed tests of σ with their causes."""
    by_name = {row.matrix.name: row for row in rows}
    wrong = [test for test in tests if test.topic in ("σ", "bias") and test.passed is False]
    failed = [test for test in wrong if 0 < test.ratio < math.inf]
    causes: dict[int, dict[str, str]] = {}
    for test in failed:
        mistake = mistake_of([by_name[name] for name in test.names], recipe)
        swapped = "" if mistake is not None and mistake.of_fans else _swapped(test, failed, by_name)
        if swapped:
            causes[id(test)] = {"cause": swapped, "mistake": swapped}
        elif mistake is not None:
            number = math.exp(np.log(mistake.factor).mean())
            cause = f"{mistake.symbol} = {number:.3g}: {mistake.cause}" if mistake.symbol else mistake.cause
            causes[id(test)] = {"cause": cause, "mistake": mistake.name or mistake.cause}
    return [dataclasses.replace(test, **causes.get(id(test), {})) for test in tests]


def mistake_of(rows: list[Row], recipe: Recipe) -> Mistake | None:
    """The first mistake that explains a ratio in all tensors of a role."""
    _, error = pooled_ratio(rows)
    near = min(max(4 * error, 0.01), RATIO_WIDTH)
    ratios, errors = (np.array([getattr(row, name) for row in rows]) for name in ("ratio", "error"))
    for mistake in _candidates(rows, recipe):
        expected = np.broadcast_to(mistake.factor, ratios.shape)
        if not (expected > 0).all() or np.abs(np.log(expected)).max() < 2 * near:
            continue
        logs = np.log(ratios / expected)
        mean = np.average(logs, weights=errors**-2)
        if abs(mean) < near and (np.abs(logs) < np.maximum(6 * errors, near)).all():
            return mistake
    return None


def _candidates(rows: list[Row], recipe: Recipe) -> Iterator[Mistake]:
    matrices = [row.matrix for row in rows]
    matrix_or_matrices, are, have = ("matrix", "is", "has") if len(rows) == 1 else ("matrices", "are", "have")
    where = f"the {matrices[0].role} {matrix_or_matrices}"
    sd = np.array([row.declared or math.nan for row in rows])
    n, fan_in, fan_out, L = (
        np.array([max(getattr(matrix, name), 1) for matrix in matrices])
        for name in ("width", "fan_in", "fan_out", "layers")
    )
    depth, layer = np.sqrt(2 * L), np.sqrt([2 * ((matrix.layer or 0) + 1) for matrix in matrices])
    if _scaled_with_depth(rows, recipe):
        yield Mistake("√(2L)", depth, f"the factor 1/√(2L) of {where} is missing", name="depth missing")
        yield Mistake("1/√(2L)", 1 / depth, f"the factor 1/√(2L) of {where} is there twice", name="depth twice")
        yield Mistake("√(2L)/√(2(l + 1))", depth / layer, f"{where} {are} scaled by their own layer, not by L")
        yield Mistake("√2", math.sqrt(2), f"{where} {are} scaled by 1/√L, not by 1/√(2L)")
        yield Mistake("√L", np.sqrt(L), f"the factor 1/√L of {where} is missing")
    else:
        yield Mistake("1/√(2L)", 1 / depth, f"{where} {are} scaled with depth, which is not declared")
        yield Mistake("√(2L)", depth, f"{where} {are} multiplied by √(2L)")
    wholes = [matrix.places.outputs for matrix in matrices if matrix.places is not None]
    if len(wholes) == len(rows):
        packed = np.sqrt((fan_in + fan_out) / (fan_in + wholes))
        says = f"{where} {have} the fan_out of all matrices in one array"
        yield Mistake("√((i + o)/(i + Σo))", packed, says, of_fans=True)
    yield Mistake("√2", math.sqrt(2), f"{where} {have} twice the variance, as with a gain of ReLU")
    yield Mistake("1/√2", math.sqrt(0.5), f"{where} {have} half the variance, as without a gain of ReLU")
    yield Mistake("1/√(2(l + 1))", 1 / layer, f"{where} {are} scaled by their own layer")
    says = f"{where} {have} the default 1/√(3 fan_in) of torch.nn.Linear, as if never initialised"
    if all(row.law.name != "normal" for row in rows):
        yield Mistake("default/σ", 1 / np.sqrt(3 * fan_in) / sd, says, of_fans=True)
    if (fan_in != fan_out).all():
        yield Mistake(
            "√(fan_in/fan_out)", np.sqrt(fan_in / fan_out), f"fan_out is taken for fan_in in {where}", of_fans=True
        )
        yield Mistake(
            "√(fan_out/fan_in)", np.sqrt(fan_out / fan_in), f"fan_in is taken for fan_out in {where}", of_fans=True
        )
    areas = np.array([math.prod(matrix.shape[2:]) for matrix in matrices])
    if areas.min() > 1:
        says = f"the area of the kernel is not in the fans of {where}"
        yield Mistake("√area", np.sqrt(areas), says, name="area", of_fans=True)
        says = f"the last axes of {where} are counted in the fans, as the area of a kernel"
        yield Mistake("1/√area", 1 / np.sqrt(areas), says, name="area twice", of_fans=True)
    yield Mistake("σ", sd, f"the variance is taken for the standard deviation in {where}")
    yield Mistake("1/√σ", 1 / np.sqrt(sd), f"the standard deviation is taken for the variance in {where}")
    yield Mistake(
        ".02/σ", 0.02 / sd, f"{where} {have} a standard deviation of 0.02, the default of many configurations"
    )
    yield Mistake("1/σ", 1 / sd, f"{where} {have} a standard deviation of 1, the default of torch.nn.Embedding")
    if all(len(matrix.shape) == 3 for matrix in matrices):
        head_size = np.array([matrix.shape[-1] for matrix in matrices])
        yield Mistake("1/(σ√d_k)", 1 / np.sqrt(head_size) / sd, f"{where} {have} σ = 1/√d_k, the size of a head")
    yield Mistake("1/(σ√n)", 1 / np.sqrt(n) / sd, f"{where} {have} σ = 1/√n")
    yield Mistake("1/(σ√fan_in)", 1 / np.sqrt(fan_in) / sd, f"{where} {have} σ = 1/√fan_in", of_fans=True)
    if rows[0].law.name == "truncated":
        edge = rows[0].law.edge
        cut = float(stats.truncnorm.std(-edge, edge))
        yield Mistake("", cut, f"{where} {are} truncated at ±{edge:.2g}σ without a correction")
    yield Mistake("√3", math.sqrt(3), f"{where} {have} the bound of a uniform law for σ")
    if rows[0].law.name == "uniform":
        yield Mistake("1/√3", 1 / math.sqrt(3), f"{where} {have} σ for the bound of a uniform law")


def _scaled_with_depth(rows: list[Row], recipe: Recipe) -> bool:
    """Whether a last matrix is declared with 1/√(2L) of the σ of a first one."""
    matrix = rows[0].matrix
    first = {"attention output": "value", "mlp output": "up"}.get(matrix.role)
    value = rows[0].declared
    usual = recipe.sd(dataclasses.replace(matrix, role=first, name="", array="")) if first else None
    return bool(value and usual and math.isclose(value * math.sqrt(2 * max(matrix.layers, 1)), usual, rel_tol=0.01))


def _swapped(test: Test, failed: list[Test], by_name: dict[str, Row]) -> str:
    """Whether two roles have each other's σ."""
    row = by_name[test.names[0]]
    for partner in failed:
        partner_row = by_name[partner.names[0]]
        if partner is test or test.what == partner.what or not row.declared or not partner_row.declared:
            continue
        ratio = partner_row.declared / row.declared
        if (
            abs(math.log(ratio)) > 2 * RATIO_WIDTH
            and abs(math.log(test.ratio / ratio)) < RATIO_WIDTH
            and abs(math.log(partner.ratio * ratio)) < RATIO_WIDTH
        ):
            first, second = sorted((test.what, partner.what))
            return f"the standard deviations of {first} and {second} are swapped"
    return ""


def cause_of_logits(wrong: Sequence[tuple[Logits, float]], width: int) -> str:
    """The mistake that explains the ratios of all wrong factors of logits."""
    if not wrong:
        return ""
    ratios = np.array([ratio for _, ratio in wrong])
    root, heads = (np.sqrt([getattr(logits, name) for logits, _ in wrong]) for name in ("head_size", "heads"))
    layers, ones, wide = np.array([(logits.layer or 0) + 1.0 for logits, _ in wrong]), 1.0, math.sqrt(max(width, 1))
    candidates = [
        (root**2, ones, "√d_k multiplies and does not divide"),
        (root, ones, "1/√d_k is missing"),
        (ones, root, "1/√d_k is there twice"),
        (root, wide, "1/√n is taken for 1/√d_k"),
        (root, heads, "1/√heads is taken for 1/√d_k"),
    ]
    if np.ptp(layers):
        candidates += [
            (layers, ones, "the factor 1/(l + 1) of the layer is missing"),
            (ones, layers, "the factor 1/(l + 1) of the layer is there"),
        ]
    for over, under, says in candidates:
        expected = over / under
        if np.allclose(ratios, expected, rtol=0.02, atol=0.0) and not np.allclose(expected, 1.0, rtol=0.02):
            return says
    return ""
