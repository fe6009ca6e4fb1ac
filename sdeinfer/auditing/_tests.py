"""Tests of the parameters against a recipe: σ of each matrix and of each role, laws, biases, norms, named values.

Tests: `tests/auditing/test_audit.py`.
"""

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from scipy import stats

from sdeinfer.auditing._law import FEW_ENTRIES, Law
from sdeinfer.auditing._recipe import Declared, Recipe
from sdeinfer.passes._account import Account, Matrix
from sdeinfer.passes._readings import LOG_SD_TOLERANCE
from sdeinfer.passes._record import StoredTensor

LEVEL = 1e-4
"""Probability of a false alarm of all tests of a correct model together, whatever the number of its tensors."""

FEWEST_ENTRIES = 12
"""Entries below which a σ that passes does not count as tested: three times the declared one would pass too often."""


@dataclasses.dataclass(frozen=True)
class Test:
    """One comparison, or one finding.

    Attributes:
        topic: one of `TOPICS`.
        what: a role, or a tensor's name.
        passed: whether it passed; None for a declaration that was not tested. A note that does not decide is passed.
        says: a clause for the verdict.
        cause: a mistake that explains it.
        mistake: the cause without its tensors, equal in tests that become one clause.
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
    mistake: str = dataclasses.field(default="", repr=False)

    @property
    def of_sigma(self) -> bool:
        """Whether it compares a σ with the declared one, which its clause for the verdict leaves to be said."""
        return self.topic in ("σ", "bias") and math.isfinite(self.ratio)


@dataclasses.dataclass(frozen=True)
class Row:
    """One tensor: its law, and what is declared of it.

    `factor` is that of a writer's output in the sum over the declared one, `strength` the branch's c σ √fan_in.
    """

    matrix: Matrix
    law: Law
    by: Declared | None = None
    factor: float = 1.0
    strength: float = math.nan

    @property
    def declared(self) -> float | None:
        """The declared σ."""
        return None if self.by is None else self.by.sd

    @property
    def ratio(self) -> float:
        """σ over what is declared; of few entries the root of their mean square about the declared mean."""
        if self.by is None or not self.by.sd:
            return math.nan
        away = self.law.mean - self.by.mean if self.law.seen < FEW_ENTRIES else 0.0
        return math.hypot(self.law.sd, away) / self.by.sd

    @property
    def error(self) -> float:
        """Standard deviation of the logarithm of the ratio."""
        return math.hypot(self.law.error, 0.0 if self.by is None else self.by.error)

    @property
    def topic(self) -> str:
        """The topic of the tests of its σ."""
        return "bias" if self.matrix.role == "bias" else "σ"

    @property
    def group(self) -> str:
        """The tensors that its σ is pooled with: a role, or parameters of few entries with one name in all layers."""
        matrix = self.matrix
        if matrix.linear or matrix.role in ("embedding", "position", "bias"):
            return matrix.role
        return matrix.name if self.law.size >= FEW_ENTRIES else pattern_of(matrix.name)


def failed(topic: str, what: str, says: str, *names: str) -> Test:
    """A mistake."""
    return Test(topic, what, passed=False, says=says, names=names)


def rows_of(account: Account, laws: Mapping[str, Law], recipe: Recipe | None) -> list[Row]:
    """All matrices that the pass used, with what a recipe declares of them."""
    rows = []
    for name, matrix in account.matrices.items():
        source = account.plain_source(matrix.array)
        strength = abs(source.factor) * laws[name].sd * math.sqrt(matrix.fan_in) if source else math.nan
        if recipe is None:
            rows.append(Row(matrix, laws[name], strength=strength))
        else:
            factor = account.writer_factor(matrix.array, recipe.multiplier(matrix.layers))
            rows.append(Row(matrix, laws[name], recipe.declared(matrix), factor, strength))
    return rows


def rows_by_name(account: Account, laws: Mapping[str, Law], recipe: Recipe) -> list[Row]:
    """Parameters that the pass did not use, of which a recipe declares something by their names."""
    used = {matrix.array for matrix in account.matrices.values()}
    rows = []
    for name, parameter in account.graph.record.parameters.items():
        if name not in used and (declared := recipe.declared_by_name(name)) is not None:
            matrix = Matrix("other", 0, 0, account.width, account.layers, None, name, parameter.shape, array=name)
            rows.append(Row(matrix, laws[name], declared))
    return rows


def critical(count: int) -> float:
    """The two-sided normal quantile of one of `count` tests, if all together fail a correct model with `LEVEL`."""
    return float(stats.norm.isf(LEVEL / (2 * max(count, 1))))


def differs(log_ratio: float, error: float, z: float) -> bool:
    """Whether the interval of a log σ is outside of ± `LOG_SD_TOLERANCE`: sums of squares of few entries are gamma."""
    beyond, half = abs(log_ratio) - LOG_SD_TOLERANCE, 1 / (4 * error**2)
    if beyond <= 0:
        return False
    low, high = math.exp(-2 * beyond), math.exp(2 * beyond)
    tail = stats.gamma.sf(half * high, half) if log_ratio > 0 else stats.gamma.cdf(half * low, half)
    return bool(tail < stats.norm.sf(z))


def tests_of_rows(rows: Sequence[Row], account: Account, recipe: Recipe) -> list[Test]:
    """All tests of σ, of values and of laws."""
    z = critical(2 * len(rows) + 30)
    groups: dict[str, list[Row]] = {}
    for row in rows:
        if row.by is not None and row.law.size and row.law.name != "not finite" and row.matrix.role != "mask":
            groups.setdefault(row.group, []).append(row)
    of_groups = [test for group, members in groups.items() for test in _of_group(group, members, z)]
    return [*of_groups, *_values(rows, account), *_laws(rows, z), *_of_unknown_layout(rows, recipe)]


def pooled_ratio(rows: Sequence[Row]) -> tuple[float, float]:
    """The log ratio of all entries of tensors together, and its standard deviation."""
    weights = np.array([row.error**-2.0 for row in rows])
    square = np.average(np.square([row.ratio for row in rows]), weights=weights)
    return 0.5 * math.log(square), float(weights.sum() ** -0.5)


def _of_group(group: str, rows: list[Row], z: float) -> Iterator[Test]:
    """Tests of σ of a role, or of a name in all layers, and of each tensor of it."""
    drawn = []
    for row in rows:
        if not row.declared or row.matrix.role in ("norm", "norm bias"):
            continue  # a glob of matrices may also match gains
        if row.law.sd > 0 or (row.law.size == 1 and row.ratio > 0):
            drawn.append(row)
        else:
            says = f"{row.matrix.role} {row.matrix.name} is {value_in_words(row.law)}, where entries are drawn"
            yield failed(row.topic, row.matrix.name, says, row.matrix.name)
    if not drawn:
        return
    names = tuple(row.matrix.name for row in drawn)
    if (size := sum(row.law.seen for row in drawn)) < FEWEST_ENTRIES:
        yield Test("untested", group, None, f"σ of {names[0]}: {size} entries", names=names)
    log_ratio, error = pooled_ratio(drawn)
    alone = [not differs(math.log(row.ratio), row.error, z) for row in drawn]
    # If most tensors pass, those that do not are named, and not the group.
    passed = not differs(log_ratio, error, z) or (not all(alone) and 2 * sum(alone) >= len(alone))
    yield Test("σ", group, passed, _says(drawn, log_ratio, error), "", names, math.exp(log_ratio), error)
    for row, near in zip(drawn, alone, strict=True) if passed else ():
        says, name = _says([row], math.log(row.ratio), row.error), row.matrix.name
        yield Test(row.topic, name, near, says, "", (name,), row.ratio, row.error)


def _says(rows: list[Row], log_ratio: float, error: float) -> str:
    matrix = rows[0].matrix
    name = matrix.name if len(rows) == 1 else pattern_of(matrix.name) if matrix.role in ("inner", "reads") else ""
    name = rows[0].group if rows[0].group not in (matrix.role, matrix.name) else name
    digits, ratio = int(np.clip(-math.floor(math.log10(max(error, 1e-6))), 2, 4)), math.exp(log_ratio)
    subject = " ".join(word for word in (matrix.role.removesuffix("other"), name) if word)
    return f"σ of {subject} is {ratio:.{digits}f} ± {ratio * error:.{digits}f} times"


def pattern_of(name: str) -> str:
    """A name with its places in lists replaced, equal for the layers of a network."""
    return re.sub(r"(?<![^.\[/])\d+(?![^.\]/])", "#", name)


def _values(rows: Sequence[Row], account: Account) -> Iterator[Test]:
    """Parameters that are declared with their values."""
    for row in rows:
        matrix, law, name = row.matrix, row.law, row.matrix.name
        if row.by is None or row.by.sd or law.name == "not finite" or not law.size or matrix.role == "mask":
            continue
        values = row.by.mean if row.by.values is None else row.by.values
        whole = np.size(values) not in (1, len(account.parameters[name].entries()))
        array = account.parameters[matrix.array if whole else name]
        near = bool(np.allclose(array.entries(), values, rtol=_rounding(array), atol=1e-7))
        role = "" if matrix.role == "other" else f"{matrix.role} "
        topic = row.topic if matrix.linear or matrix.role == "bias" else "value"
        says = f"{role}{name} is {value_in_words(law)}, declared {_shown(values)}"
        yield Test(topic, name, near, says, names=(name,))


def _laws(rows: Sequence[Row], z: float) -> Iterator[Test]:
    """Means, and laws."""
    for row in rows:
        law, name = row.law, row.matrix.name
        if row.by is None or not row.by.sd or not law.sd > 0 or row.matrix.role in ("bias", "norm", "norm bias"):
            continue
        if law.seen >= FEW_ENTRIES:
            offset = abs(law.mean - row.by.mean) / law.sd
            centred = offset - z / math.sqrt(law.seen) < LOG_SD_TOLERANCE or bool(row.by.error)
            yield Test("law", name, centred, f"{name} has mean {law.mean:.3g}, which is {offset:.2g} σ", names=(name,))
        if row.by.law is not None and law.seen >= FEW_ENTRIES:
            says = f"{name} is {law.name}, declared {row.by.law}"
            yield Test("law", name, _follows(law, row.by.law), says, names=(name,))


def _follows(law: Law, declared: str) -> bool:
    """Whether entries may have a law; one that is truncated far out is normal, and few entries tell few apart."""
    if law.name == declared or (declared in ("normal", "truncated") and law.seen < 1024):
        return True
    far = law.name == "truncated" and law.edge > 2.4
    return (declared == "normal" and far) or (declared == "truncated" and law.name == "normal")


def _of_unknown_layout(rows: Sequence[Row], recipe: Recipe) -> Iterator[Test]:
    for row in rows:
        if len(row.matrix.roles) > 1 and row.by is None and recipe.sd(row.matrix) is not None:
            says = f"σ of {row.matrix.name}: {', '.join(row.matrix.roles)} are in one array of unknown layout"
            yield Test("untested", row.matrix.name, None, says, names=(row.matrix.name,))


def first_names(names: list[str]) -> str:
    """At most three names."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def value_in_words(law: Law) -> str:
    return "0" if law.name == "zeros" else f"{law.mean:.4g}" if law.sd == 0 else f"{law.name} with σ {law.sd:.3g}"


def _rounding(parameter: StoredTensor) -> float:
    return 1e-2 if "bfloat16" in parameter.dtype else 2e-3 if "float16" in parameter.dtype else 1e-4


def _shown(values: float | np.ndarray) -> str:
    x = np.atleast_1d(values)
    return f"{x[0]:.4g}" if np.ptp(x) <= 1e-6 * abs(x[0]) else f"from {x.min():.3g} to {x.max():.3g}"
