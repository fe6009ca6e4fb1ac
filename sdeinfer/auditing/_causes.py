"""Mistakes that explain the ratio of a σ to the declared one, by matrix. Tests: `tests/auditing/test_audit.py`."""

import dataclasses
import math
from collections.abc import Iterator

from sdeinfer.auditing._recipe import Recipe
from sdeinfer.auditing._tests import Row, Test, pooled_ratio

NEAR = 0.03
"""A ratio is explained by one within so much of its logarithm, and within four of its standard deviations."""


def explained(tests: list[Test], rows: list[Row], recipe: Recipe) -> list[Test]:
    """The failed tests of σ with their causes."""
    by_name = {row.matrix.name: row for row in rows}
    failed = [
        test
        for test in tests
        if test.topic in ("σ", "bias") and not test.passed and test.names and math.isfinite(test.ratio)
    ]
    found = {}
    for test in failed:
        own = [by_name[name] for name in test.names]
        found[id(test)] = _swapped(test, failed, by_name) or cause_of(test, own, recipe)
    return [dataclasses.replace(test, cause=found.get(id(test), test.cause)) for test in tests]


def cause_of(test: Test, own: list[Row], recipe: Recipe) -> str:
    """The first mistake that explains a ratio in all tensors of a role."""
    log_ratio, error = pooled_ratio(own)
    near = min(max(4 * error, 0.01), NEAR)
    for symbol, values, says in _candidates(own, recipe):
        logs = [math.log(row.ratio / value) for row, value in zip(own, values, strict=True) if value > 0]
        if len(logs) < len(own) or max(abs(math.log(value)) for value in values) < 2 * near:
            continue
        weights = [row.law.error**-2 for row in own]
        mean = sum(w * x for w, x in zip(weights, logs, strict=True)) / sum(weights)
        if abs(mean) < near and all(abs(x) < max(6 * row.law.error, near) for x, row in zip(logs, own, strict=True)):
            typical = math.exp(sum(math.log(value) for value in values) / len(values))
            return f"{symbol} = {typical:.3g}: {says}"
    return ""


def _candidates(own: list[Row], recipe: Recipe) -> Iterator[tuple[str, list[float], str]]:
    matrices = [row.matrix for row in own]
    sds = [float(row.declared or math.nan) for row in own]
    where = f"the {matrices[0].role} {'matrix' if len(own) == 1 else 'matrices'}"
    for name in dict.fromkeys(key for matrix in matrices for key in recipe.factors(matrix)):
        factors = [recipe.factors(matrix).get(name, 1.0) for matrix in matrices]
        inverse = name[2:] if name.startswith("1/√(") else f"1/({name})"
        yield inverse, [1 / f for f in factors], f"the factor {name} of {where} is missing"
        yield name, factors, f"the factor {name} of {where} is there twice"
    depth = [math.sqrt(2 * max(matrix.layers, 1)) for matrix in matrices]
    if not any("2L" in key for key in recipe.factors(matrices[0])):
        yield "1/√(2L)", [1 / d for d in depth], f"{where} are scaled with depth, which is not declared"
        yield "√(2L)", depth, f"{where} are multiplied by √(2L)"
    yield "√2", [math.sqrt(2)] * len(own), f"{where} have twice the variance, as with a gain of ReLU"
    number = [math.sqrt(2 * ((matrix.layer or 0) + 1)) for matrix in matrices]
    yield "1/√(2(l + 1))", [1 / x for x in number], f"{where} are scaled by their own layer"
    if "2L" in str([*recipe.factors(matrices[0])]):
        yield (
            "√(2L)/√(2(l + 1))",
            [d / x for d, x in zip(depth, number, strict=True)],
            f"{where} are scaled by their own layer, not by L",
        )
    fans = [(max(matrix.fan_in, 1), max(matrix.fan_out, 1)) for matrix in matrices]
    yield (
        "default/σ",
        [1 / math.sqrt(3 * i) / sd for (i, _), sd in zip(fans, sds, strict=True)],
        f"{where} have the default 1/√(3 fan_in) of torch.nn.Linear, as if never initialised",
    )
    if all(i != o for i, o in fans):
        yield "√(fan_in/fan_out)", [math.sqrt(i / o) for i, o in fans], f"fan_out is taken for fan_in in {where}"
        yield "√(fan_out/fan_in)", [math.sqrt(o / i) for i, o in fans], f"fan_in is taken for fan_out in {where}"
    yield "σ", sds, f"the variance is taken for the standard deviation in {where}"
    yield "1/√σ", [sd**-0.5 for sd in sds], f"the standard deviation is taken for the variance in {where}"
    yield (
        ".02/σ",
        [0.02 / sd for sd in sds],
        f"{where} have a standard deviation of 0.02, the default of many configurations",
    )
    yield "1/σ", [1 / sd for sd in sds], f"{where} have a standard deviation of 1, the default of torch.nn.Embedding"
    yield ".880", [0.8796] * len(own), f"{where} are truncated at ±2σ without a correction"
    yield "√3", [3**0.5] * len(own), f"{where} have σ for the bound of a uniform law"


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
