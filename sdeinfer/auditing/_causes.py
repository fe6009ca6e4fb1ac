"""Mistakes that explain the ratio of what is found to what is declared, in all layers at once.

Tests: `tests/auditing/test_audit.py`.
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence

import numpy as np
from scipy import stats

from sdeinfer.auditing._recipe import Recipe
from sdeinfer.auditing._tests import Row, Test, pooled_ratio
from sdeinfer.passes._attention import Logits

RATIO_WIDTH = 0.03
"""A ratio is explained by one within so much of its logarithm, and within four of its standard deviations."""


def explained(tests: list[Test], rows: list[Row], recipe: Recipe) -> list[Test]:
    """The failed tests of σ with their causes."""
    by_name = {row.matrix.name: row for row in rows}
    wrong = [test for test in tests if test.topic in ("σ", "bias") and test.passed is False]
    failed = [test for test in wrong if 0 < test.ratio < math.inf]
    causes = {}
    for test in failed:
        cause = cause_of([by_name[name] for name in test.names], recipe)
        causes[id(test)] = cause if "fan" in cause else _swapped(test, failed, by_name) or cause
    return [dataclasses.replace(test, cause=causes.get(id(test), test.cause)) for test in tests]


def cause_of(rows: list[Row], recipe: Recipe) -> str:
    """The first mistake that explains a ratio in all tensors of a role."""
    _, error = pooled_ratio(rows)
    near = min(max(4 * error, 0.01), RATIO_WIDTH)
    ratios, errors = (np.array([getattr(row, name) for row in rows]) for name in ("ratio", "error"))
    for symbol, factor, says in _candidates(rows, recipe):
        expected = np.broadcast_to(factor, ratios.shape)
        if not (expected > 0).all() or np.abs(np.log(expected)).max() < 2 * near:
            continue
        logs = np.log(ratios / expected)
        mean = np.average(logs, weights=errors**-2)
        if abs(mean) < near and (np.abs(logs) < np.maximum(6 * errors, near)).all():
            return f"{symbol} = {math.exp(np.log(expected).mean()):.3g}: {says}"
    return ""


def _candidates(rows: list[Row], recipe: Recipe) -> Iterator[tuple[str, np.ndarray | float, str]]:
    matrices = [row.matrix for row in rows]
    where = f"the {matrices[0].role} {'matrix' if len(rows) == 1 else 'matrices'}"
    sd = np.array([row.declared or math.nan for row in rows])
    n, fan_in, fan_out, L = (
        np.array([max(getattr(matrix, name), 1) for matrix in matrices])
        for name in ("width", "fan_in", "fan_out", "layers")
    )
    depth, layer = np.sqrt(2 * L), np.sqrt([2 * ((matrix.layer or 0) + 1) for matrix in matrices])
    if _scaled_with_depth(rows, recipe):
        yield "√(2L)", depth, f"the factor 1/√(2L) of {where} is missing"
        yield "1/√(2L)", 1 / depth, f"the factor 1/√(2L) of {where} is there twice"
        yield "√(2L)/√(2(l + 1))", depth / layer, f"{where} are scaled by their own layer, not by L"
        yield "√2", math.sqrt(2), f"{where} are scaled by 1/√L, not by 1/√(2L)"
    else:
        yield "1/√(2L)", 1 / depth, f"{where} are scaled with depth, which is not declared"
        yield "√(2L)", depth, f"{where} are multiplied by √(2L)"
    wholes = [matrix.places.outputs for matrix in matrices if matrix.places is not None]
    if len(wholes) == len(rows):
        packed = np.sqrt((fan_in + fan_out) / (fan_in + wholes))
        yield "√((i + o)/(i + Σo))", packed, f"{where} have the fan_out of all matrices in one array"
    yield "√2", math.sqrt(2), f"{where} have twice the variance, as with a gain of ReLU"
    yield "1/√2", math.sqrt(0.5), f"{where} have half the variance, as without a gain of ReLU"
    yield "1/√(2(l + 1))", 1 / layer, f"{where} are scaled by their own layer"
    says = f"{where} have the default 1/√(3 fan_in) of torch.nn.Linear, as if never initialised"
    if all(row.law.name != "normal" for row in rows):
        yield "default/σ", 1 / np.sqrt(3 * fan_in) / sd, says
    if (fan_in != fan_out).all():
        yield "√(fan_in/fan_out)", np.sqrt(fan_in / fan_out), f"fan_out is taken for fan_in in {where}"
        yield "√(fan_out/fan_in)", np.sqrt(fan_out / fan_in), f"fan_in is taken for fan_out in {where}"
    areas = np.array([math.prod(matrix.shape[2:]) for matrix in matrices])
    if areas.min() > 1:
        yield "√area", np.sqrt(areas), f"the area of the kernel is not in the fans of {where}"
        yield "1/√area", 1 / np.sqrt(areas), f"the area of the kernel is not in the fans of {where}"
    yield "σ", sd, f"the variance is taken for the standard deviation in {where}"
    yield "1/√σ", 1 / np.sqrt(sd), f"the standard deviation is taken for the variance in {where}"
    yield ".02/σ", 0.02 / sd, f"{where} have a standard deviation of 0.02, the default of many configurations"
    yield "1/σ", 1 / sd, f"{where} have a standard deviation of 1, the default of torch.nn.Embedding"
    if all(len(matrix.shape) == 3 for matrix in matrices):
        head_size = np.array([matrix.shape[-1] for matrix in matrices])
        yield "1/(σ√d_k)", 1 / np.sqrt(head_size) / sd, f"{where} have σ = 1/√d_k, the size of a head"
    yield "1/(σ√n)", 1 / np.sqrt(n) / sd, f"{where} have σ = 1/√n"
    yield "1/(σ√fan_in)", 1 / np.sqrt(fan_in) / sd, f"{where} have σ = 1/√fan_in"
    if rows[0].law.name == "truncated":
        edge = rows[0].law.edge
        cut = float(stats.truncnorm.std(-edge, edge))
        yield f"{cut:.3f}", cut, f"{where} are truncated at ±{edge:.2g}σ without a correction"
    yield "√3", math.sqrt(3), f"{where} have the bound of a uniform law for σ"
    if rows[0].law.name == "uniform":
        yield "1/√3", 1 / math.sqrt(3), f"{where} have σ for the bound of a uniform law"


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
