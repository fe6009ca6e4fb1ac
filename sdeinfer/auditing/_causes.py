"""Mistakes that explain the ratio of what is found to what is declared, in all layers at once.

Tests: `tests/auditing/test_audit.py`.
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence

from scipy import stats

from sdeinfer.auditing._recipe import Recipe
from sdeinfer.auditing._tests import Row, Test, pooled_ratio
from sdeinfer.passes._attention import Logits

NEAR = 0.03
"""A ratio is explained by one within so much of its logarithm, and within four of its standard deviations."""


def explained(tests: list[Test], rows: list[Row], recipe: Recipe) -> list[Test]:
    """The failed tests of σ with their causes."""
    by_name = {row.matrix.name: row for row in rows}
    wrong = [test for test in tests if test.topic in ("σ", "bias") and test.passed is False]
    failed = [test for test in wrong if 0 < test.ratio < math.inf]
    found = {}
    for test in failed:
        own = [by_name[name] for name in test.names]
        cause = cause_of(own, recipe)
        found[id(test)] = cause if "fan" in cause else _swapped(test, failed, by_name) or cause
    return [dataclasses.replace(test, cause=found.get(id(test), test.cause)) for test in tests]


def cause_of(own: list[Row], recipe: Recipe) -> str:
    """The first mistake that explains a ratio in all tensors of a role."""
    _, error = pooled_ratio(own)
    near = min(max(4 * error, 0.01), NEAR)
    for symbol, values, says in _candidates(own, recipe):
        logs = [math.log(row.ratio / value) for row, value in zip(own, values, strict=True) if value > 0]
        if len(logs) < len(own) or max(abs(math.log(value)) for value in values) < 2 * near:
            continue
        weights = [row.error**-2 for row in own]
        mean = sum(w * x for w, x in zip(weights, logs, strict=True)) / sum(weights)
        if abs(mean) < near and all(abs(x) < max(6 * row.error, near) for x, row in zip(logs, own, strict=True)):
            typical = math.exp(sum(math.log(value) for value in values) / len(values))
            return f"{symbol} = {typical:.3g}: {says}"
    return ""


def _candidates(own: list[Row], recipe: Recipe) -> Iterator[tuple[str, list[float], str]]:
    matrices, count = [row.matrix for row in own], len(own)
    sds = [float(row.declared or math.nan) for row in own]
    where = f"the {matrices[0].role} {'matrix' if count == 1 else 'matrices'}"
    depth = [math.sqrt(2 * max(matrix.layers, 1)) for matrix in matrices]
    layer = [math.sqrt(2 * ((matrix.layer or 0) + 1)) for matrix in matrices]
    if _scaled_with_depth(own, recipe):
        yield "√(2L)", depth, f"the factor 1/√(2L) of {where} is missing"
        yield "1/√(2L)", [1 / d for d in depth], f"the factor 1/√(2L) of {where} is there twice"
        own_layer = [d / x for d, x in zip(depth, layer, strict=True)]
        yield "√(2L)/√(2(l + 1))", own_layer, f"{where} are scaled by their own layer, not by L"
        yield "√2", [math.sqrt(2)] * count, f"{where} are scaled by 1/√L, not by 1/√(2L)"
    else:
        yield "1/√(2L)", [1 / d for d in depth], f"{where} are scaled with depth, which is not declared"
        yield "√(2L)", depth, f"{where} are multiplied by √(2L)"
    fans = [(max(matrix.fan_in, 1), max(matrix.fan_out, 1)) for matrix in matrices]
    wholes = [matrix.places.outputs for matrix in matrices if matrix.places is not None]
    if len(wholes) == count:
        packed = [math.sqrt((i + o) / (i + whole)) for (i, o), whole in zip(fans, wholes, strict=True)]
        yield "√((i + o)/(i + Σo))", packed, f"{where} have the fan_out of all matrices in one array"
    yield "√2", [math.sqrt(2)] * count, f"{where} have twice the variance, as with a gain of ReLU"
    yield "1/√2", [math.sqrt(0.5)] * count, f"{where} have half the variance, as without a gain of ReLU"
    yield "1/√(2(l + 1))", [1 / x for x in layer], f"{where} are scaled by their own layer"
    default = [1 / math.sqrt(3 * i) / sd for (i, _), sd in zip(fans, sds, strict=True)]
    says = f"{where} have the default 1/√(3 fan_in) of torch.nn.Linear, as if never initialised"
    if all(row.law.name != "normal" for row in own):
        yield "default/σ", default, says
    if all(i != o for i, o in fans):
        yield "√(fan_in/fan_out)", [math.sqrt(i / o) for i, o in fans], f"fan_out is taken for fan_in in {where}"
        yield "√(fan_out/fan_in)", [math.sqrt(o / i) for i, o in fans], f"fan_in is taken for fan_out in {where}"
    for symbol, sizes in _areas(own):
        yield symbol, sizes, f"the area of the kernel is not in the fans of {where}"
    yield "σ", sds, f"the variance is taken for the standard deviation in {where}"
    yield "1/√σ", [sd**-0.5 for sd in sds], f"the standard deviation is taken for the variance in {where}"
    usual = f"{where} have a standard deviation of 0.02, the default of many configurations"
    yield ".02/σ", [0.02 / sd for sd in sds], usual
    yield "1/σ", [1 / sd for sd in sds], f"{where} have a standard deviation of 1, the default of torch.nn.Embedding"
    if all(len(matrix.shape) == 3 for matrix in matrices):
        of_head = [matrix.shape[-1] ** -0.5 / sd for matrix, sd in zip(matrices, sds, strict=True)]
        yield "1/(σ√d_k)", of_head, f"{where} have σ = 1/√d_k, the size of a head"
    width = [max(matrix.width, 1) ** -0.5 / sd for matrix, sd in zip(matrices, sds, strict=True)]
    yield "1/(σ√n)", width, f"{where} have σ = 1/√n"
    of_fan = [i**-0.5 / sd for (i, _), sd in zip(fans, sds, strict=True)]
    yield "1/(σ√fan_in)", of_fan, f"{where} have σ = 1/√fan_in"
    if own[0].law.name == "truncated":
        edge = own[0].law.edge
        cut = float(stats.truncnorm.std(-edge, edge))
        yield f"{cut:.3f}", [cut] * count, f"{where} are truncated at ±{edge:.2g}σ without a correction"
    yield "√3", [3**0.5] * count, f"{where} have the bound of a uniform law for σ"
    if own[0].law.name == "uniform":
        yield "1/√3", [3**-0.5] * count, f"{where} have σ for the bound of a uniform law"


def _scaled_with_depth(own: list[Row], recipe: Recipe) -> bool:
    """Whether a last matrix is declared with 1/√(2L) of the σ of a first one."""
    matrix = own[0].matrix
    first = {"attention output": "value", "mlp output": "up"}.get(matrix.role)
    value = own[0].declared
    usual = recipe.sd(dataclasses.replace(matrix, role=first, name="", array="")) if first else None
    return bool(value and usual and math.isclose(value * math.sqrt(2 * max(matrix.layers, 1)), usual, rel_tol=0.01))


def _areas(own: list[Row]) -> Iterator[tuple[str, list[float]]]:
    areas = [math.prod(row.matrix.shape[2:]) if len(row.matrix.shape) > 2 else 1 for row in own]
    if min(areas) > 1:
        yield "√area", [math.sqrt(a) for a in areas]
        yield "1/√area", [1 / math.sqrt(a) for a in areas]


def _swapped(test: Test, failed: list[Test], by_name: dict[str, Row]) -> str:
    """Whether two roles have each other's σ."""
    own = by_name[test.names[0]]
    for other in failed:
        row = by_name[other.names[0]]
        if other is test or test.what == other.what or not own.declared or not row.declared:
            continue
        ratio = row.declared / own.declared
        if (
            abs(math.log(ratio)) > 2 * NEAR
            and abs(math.log(test.ratio / ratio)) < NEAR
            and abs(math.log(other.ratio * ratio)) < NEAR
        ):
            first, second = sorted((test.what, other.what))
            return f"the standard deviations of {first} and {second} are swapped"
    return ""


def cause_of_logits(wrong: Sequence[tuple[Logits, float]], width: int) -> str:
    """The mistake that explains the ratios of all wrong factors of logits."""
    root = [math.sqrt(each.head_size) for each, _ in wrong]
    ones, heads = [1.0] * len(wrong), [math.sqrt(each.heads) for each, _ in wrong]
    layers = [(each.layer or 0) + 1.0 for each, _ in wrong]
    wide = [math.sqrt(max(width, 1))] * len(wrong)
    candidates = [
        ([r * r for r in root], ones, "√d_k multiplies and does not divide"),
        (root, ones, "1/√d_k is missing"),
        (ones, root, "1/√d_k is there twice"),
        (root, wide, "1/√n is taken for 1/√d_k"),
        (root, heads, "1/√heads is taken for 1/√d_k"),
    ]
    if len({*layers}) > 1:
        candidates += [
            (layers, ones, "the factor 1/(l + 1) of the layer is missing"),
            (ones, layers, "the factor 1/(l + 1) of the layer is there"),
        ]
    for over, under, says in candidates:
        expected = [a / b for a, b in zip(over, under, strict=True)]
        near = [math.isclose(ratio, e, rel_tol=0.02) for (_, ratio), e in zip(wrong, expected, strict=True)]
        if wrong and all(near) and any(not math.isclose(e, 1.0, rel_tol=0.02) for e in expected):
            return says
    return ""
