"""Tests of the parameters against a recipe: σ of each matrix and of each role, laws, biases, norms, named values.

Tests: `tests/auditing/test_audit.py`.
"""

import dataclasses
import fnmatch
import math
import re
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from scipy import stats

from sdeinfer.auditing._account import Account, Matrix
from sdeinfer.auditing._graph import Source
from sdeinfer.auditing._law import Law
from sdeinfer.auditing._recipe import Declared, Recipe
from sdeinfer.auditing._record import Parameter

LEVEL = 1e-4
"""Probability of a false alarm of all tests of a correct model together, whatever the number of its tensors."""

ALIKE = 0.02
"""A difference of log σ counts if its whole interval is beyond this; a factor in the code may differ by half of it."""

FEWEST = 12
"""Entries below which a σ is not tested: three times the declared one would pass too often."""


@dataclasses.dataclass(frozen=True)
class Test:
    """One comparison, or one finding.

    Attributes:
        topic: "σ", "law", "bias", "norm", "factor", "logits", "stream", "mask", or a finding's name.
        what: a role, or a tensor's name.
        passed: whether it passed; None for a declaration that was not tested. A note that does not decide is passed.
        says: a clause for the verdict.
        cause: what explains it.
        names: the tensors.
        ratio: found over declared, with its error in log.
    """

    topic: str
    what: str
    passed: bool | None
    says: str = ""
    cause: str = ""
    names: tuple[str, ...] = ()
    ratio: float = math.nan
    error: float = 0.0


@dataclasses.dataclass(frozen=True)
class Row:
    """One matrix: its law, and what is declared of it.

    `factor` is that of a writer's output in the sum over the declared one, `strength` the branch's c σ √fan_in.
    """

    matrix: Matrix
    law: Law
    declared: float | None
    declared_law: str | None
    factor: float = 1.0
    strength: float = math.nan
    declared_error: float = 0.0

    @property
    def ratio(self) -> float:
        """σ over what is declared."""
        return self.law.sd / self.declared if self.declared else math.nan

    @property
    def error(self) -> float:
        """Standard deviation of the logarithm of the ratio."""
        return math.hypot(self.law.error, self.declared_error)


def rows_of(account: Account, laws: Mapping[str, Law], recipe: Recipe | None) -> list[Row]:
    """All matrices that the pass used, with what a recipe declares of them."""
    rows = []
    for name, matrix in account.matrices.items():
        source = _plain_source(account, matrix.array)
        strength = abs(source.factor) * laws[name].sd * math.sqrt(matrix.fan_in) if source else math.nan
        if recipe is None:
            rows.append(Row(matrix, laws[name], None, None, strength=strength))
            continue
        factor = writer_factor(account, matrix.array, recipe.multiplier(matrix.layers))
        declared, law = recipe.declared_sd(matrix), recipe.law(matrix)
        rows.append(Row(matrix, laws[name], declared, law, factor, strength, recipe.error(matrix)))
    return rows


def _plain_source(account: Account, array: str) -> Source | None:
    """A writer's output in the sum; None for other tensors, or where a norm or a parameter is between."""
    found = account.writers.get(array, [])
    return found[0][1] if found and found[0][1].plain else None


def writer_factor(account: Account, array: str, multiplier: float | None = 1.0) -> float:
    """The factor of a writer's output in the sum over the declared one; 1 where a norm or a parameter is between."""
    source = _plain_source(account, array)
    return source.factor / multiplier if source and source.factor and multiplier else 1.0


def critical(count: int) -> float:
    """Z of one of so many tests at the level of a model."""
    return float(stats.norm.isf(LEVEL / (2 * max(count, 1))))


def tests_of_rows(rows: list[Row], recipe: Recipe) -> list[Test]:
    """All tests of matrices, tables and biases by their role."""
    z = critical(2 * len(rows) + 30)
    pooled = list(_pooled(rows, z))
    named = {name for test in pooled if not test.passed for name in test.names}
    single = [test for row in rows for test in _of_matrix(row, z, recipe, known=row.matrix.name in named)]
    return [*pooled, *single, *_laws(rows, z), *_of_unknown_layout(rows, recipe)]


def by_role(rows: list[Row]) -> dict[str, list[Row]]:
    """Rows whose σ is declared, and is not zero, by role."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        if row.declared and row.law.sd > 0 and math.isfinite(row.law.sd) and row.law.seen >= FEWEST:
            found.setdefault(row.matrix.role, []).append(row)
    return found


def pooled_ratio(rows: list[Row]) -> tuple[float, float]:
    """The log ratio that tensors have in common, and its standard deviation."""
    weights = np.array([row.error**-2.0 for row in rows])
    return float(weights @ np.log([row.ratio for row in rows]) / weights.sum()), float(weights.sum() ** -0.5)


def differs(log_ratio: float, error: float, z: float) -> bool:
    """Whether the interval of a logarithm is outside of ± `ALIKE`."""
    return bool(abs(log_ratio) - z * error > ALIKE)


def _pooled(rows: list[Row], z: float) -> Iterator[Test]:
    for role, own in by_role(rows).items():
        log_ratio, error = pooled_ratio(own)
        passed = not differs(log_ratio, error, z)
        alone = [not differs(math.log(row.ratio), row.error, z) for row in own]
        # If most tensors of a role pass, those that do not are named, and not the role.
        passed = passed or (not all(alone) and 2 * sum(alone) >= len(alone))
        names = tuple(row.matrix.name for row in own)
        yield Test("σ", role, passed, _says(own, log_ratio, error), "", names, math.exp(log_ratio), error)


def _says(own: list[Row], log_ratio: float, error: float) -> str:
    matrix = own[0].matrix
    name = matrix.name if len(own) == 1 else pattern_of(matrix.name) if matrix.role in ("inner", "reads") else ""
    digits, ratio = int(np.clip(-math.floor(math.log10(max(error, 1e-6))), 2, 4)), math.exp(log_ratio)
    return f"σ of {matrix.role}{f' {name}' if name else ''} is {ratio:.{digits}f} ± {ratio * error:.{digits}f} times"


def pattern_of(name: str) -> str:
    """A name with its places in lists replaced, equal for the layers of a network."""
    return re.sub(r"(?<![^.\[/])\d+(?![^.\]/])", "#", name)


def _of_matrix(row: Row, z: float, recipe: Recipe, *, known: bool) -> Iterator[Test]:
    """Tests of one matrix: zeros, constants, σ."""
    matrix, law, name = row.matrix, row.law, row.matrix.name
    if row.declared is None or law.name == "not finite" or not law.size:
        return
    kind = "bias" if matrix.role == "bias" else "σ"
    if row.declared == 0:
        zero = law.name == "zeros"
        says = f"{kind if kind == 'bias' else matrix.role} {name} is {value_in_words(law)}, declared 0"
        yield Test(kind, name, zero, says, names=(name,))
    elif law.size < FEWEST:
        if recipe.named(matrix.array) is None:
            yield Test("untested", name, None, f"σ of {name}: {law.size} entries", names=(name,))
    elif law.sd == 0:
        says = f"{matrix.role} {name} is {value_in_words(law)}"
        yield Test(kind, name, passed=False, says=says, names=(name,))
    elif not known:
        log_ratio = math.log(row.ratio)
        passed = not differs(log_ratio, row.error, z)
        yield Test(kind, name, passed, _says([row], log_ratio, row.error), "", (name,), row.ratio, row.error)


def _laws(rows: list[Row], z: float) -> Iterator[Test]:
    """Means, which are declared 0, and laws."""
    for row in rows:
        law, name = row.law, row.matrix.name
        if not row.declared or not law.sd > 0 or row.matrix.role == "bias":
            continue
        offset = abs(law.mean) / law.sd
        centred = offset - z / math.sqrt(law.seen) < ALIKE or bool(row.declared_error)
        yield Test("law", name, centred, f"{name} has mean {law.mean:.3g}, which is {offset:.2g} σ", names=(name,))
        if row.declared_law is not None and law.seen >= 256:
            says = f"{name} is {law.name}, declared {row.declared_law}"
            yield Test("law", name, _follows(law, row.declared_law), says, names=(name,))


def _follows(law: Law, declared: str) -> bool:
    """Whether entries may have a law; one that is truncated far out is normal, and few entries tell few apart."""
    match declared:
        case "normal":
            return law.name == "normal" or (law.name == "truncated" and law.edge > 2.4) or law.seen < 1024
        case "truncated":
            return law.name in ("normal", "truncated") or law.seen < 1024
    return law.name == declared


def _of_unknown_layout(rows: list[Row], recipe: Recipe) -> Iterator[Test]:
    for row in rows:
        if len(row.matrix.roles) > 1 and row.declared is None and recipe.sd(row.matrix) is not None:
            says = f"σ of {row.matrix.name}: {', '.join(row.matrix.roles)} are in one array of unknown layout"
            yield Test("untested", row.matrix.name, None, says, names=(row.matrix.name,))


def some(names: list[str]) -> str:
    """At most three names."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def value_in_words(law: Law) -> str:
    return "0" if law.name == "zeros" else f"{law.mean:.4g}" if law.sd == 0 else f"{law.name} with σ {law.sd:.3g}"


def tests_of_named(account: Account, laws: Mapping[str, Law], recipe: Recipe, rows: Sequence[Row]) -> Iterator[Test]:
    """Tests of what is declared of a parameter by its name, and is not tested by its role.

    Parameters of few entries are pooled over layers.
    """
    done = {row.matrix.array for row in rows if row.declared is not None and row.law.size >= FEWEST}
    arrays = account.graph.record.parameters
    norms = {matrix.array for matrix in account.matrices.values() if matrix.role in ("norm", "norm bias")}
    groups: dict[str, list[tuple[str, Declared]]] = {}
    count = 0
    for name, parameter in arrays.items():
        declared = recipe.named(name)
        if declared is None or name in done or not parameter.size or parameter.masks:
            continue
        if name in norms and declared.sd > 0:
            continue  # a glob of matrices that also matches gains
        count += 1
        few = parameter.size < 256
        groups.setdefault(pattern_of(name) if few else name, []).append((name, declared))
    z = critical(2 * count + 30)
    for own in groups.values():
        yield from _of_names(own, arrays, laws, z)


def _of_names(
    own: list[tuple[str, Declared]], arrays: Mapping[str, Parameter], laws: Mapping[str, Law], z: float
) -> Iterator[Test]:
    drawn = []
    for name, declared in own:
        law, x = laws[name], arrays[name].entries()
        if law.name == "not finite":
            continue
        if declared.sd == 0 or declared.values is not None:
            values = declared.mean if declared.values is None else declared.values
            near = bool(np.allclose(x, values, rtol=_rounding(arrays[name]), atol=1e-7))
            says = f"{name} is {value_in_words(law)}, declared {_shown(values)}"
            yield Test("value", name, near, says, names=(name,))
        else:
            drawn.append((name, declared, x))
    yield from _of_few(drawn, z)
    if not drawn:
        return
    names, size = tuple(name for name, _, _ in drawn), sum(len(x) for _, _, x in drawn)
    what = names[0] if len(names) == 1 else pattern_of(names[0])
    found, declared = (np.concatenate(parts) for parts in zip(*[_scaled(d, x) for _, d, x in drawn], strict=True))
    sd, expected = (float(np.sqrt(np.square(part).mean())) for part in (found, declared))
    constant = size > 1 and found.std() < 1e-6 * expected
    if size < FEWEST and not constant:
        yield Test("untested", what, None, f"{what}: {size} entries, which are drawn", names=names)
        return
    log_ratio = math.log(sd / expected) if sd else -math.inf
    error = math.hypot(*(_error(part) for part in (found, declared) if len(part) > 1))
    wrong = constant or differs(log_ratio, error, z)
    says = f"σ of {what} is {sd / expected:.3g} ± {sd / expected * error:.2g} times"
    if constant:
        says = f"{what} is {value_in_words(laws[names[0]])}, where entries are drawn"
    yield Test("σ", what, not wrong, says, "", names, sd / expected, error)


def _of_few(drawn: list[tuple[str, Declared, np.ndarray]], z: float) -> Iterator[Test]:
    """Single parameters of few normal entries by the exact law of their sum of squares."""
    for name, declared, x in drawn:
        if len(x) < FEWEST and declared.law == "normal":
            total = float(np.square((x - declared.mean) / declared.sd).sum())
            tails = stats.chi2.sf(total, len(x)), stats.chi2.cdf(total, len(x))
            says = f"{name} has entries up to {np.abs(x).max():.3g}, declared σ {declared.sd:.3g}"
            yield Test("σ", name, bool(min(tails) > stats.norm.sf(z)), says, names=(name,))


def _scaled(declared: Declared, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Entries and what they are compared with, over their declared mean and σ."""
    if declared.sample is None:
        return (x - declared.mean) / declared.sd, np.ones(1)
    middle, sd = declared.sample.mean(), declared.sample.std() or 1.0
    return (x - middle) / sd, (declared.sample - middle) / sd


def _error(x: np.ndarray) -> float:
    """Standard deviation of the logarithm of a root mean square."""
    kurtosis = float((x**4).mean() / np.square(x).mean() ** 2 - 3) if len(x) >= 256 else 0.0
    return math.sqrt(max(2 + kurtosis, 0.05) / (4 * len(x)))


def _rounding(parameter: Parameter) -> float:
    return 1e-2 if "bfloat16" in parameter.dtype else 2e-3 if "float16" in parameter.dtype else 1e-4


def _shown(values: float | np.ndarray) -> str:
    x = np.atleast_1d(values)
    return f"{x[0]:.4g}" if np.ptp(x) <= 1e-6 * abs(x[0]) else f"from {x.min():.3g} to {x.max():.3g}"


def unmatched(recipe_keys: Mapping[str, object], account: Account) -> Iterator[str]:
    """Keys of rules that match neither a matrix nor a parameter."""
    names = {*account.graph.record.parameters}
    for key in recipe_keys:
        roles = any(key in (m.role, *m.roles) or fnmatch.fnmatchcase(m.name, key) for m in account.matrices.values())
        if not roles and not any(fnmatch.fnmatchcase(name, key) for name in names):
            yield key
