"""Tests of the books against a recipe: σ of each tensor and of each role, laws, biases, norms, factors, logits.

Tests: `tests/auditing/test_audit.py`.
"""

import dataclasses
import math
from collections.abc import Iterator

import numpy as np
from scipy import stats

from sdeinfer.auditing._account import Account, Matrix
from sdeinfer.auditing._graph import Source
from sdeinfer.auditing._law import Law, laws_of_parts
from sdeinfer.auditing._recipe import Recipe

LEVEL = 1e-4
"""Probability of a false alarm of all tests of a correct model together, whatever the number of its tensors."""

ALIKE = 0.02
"""A significant difference of log σ counts if it is larger than this; of a factor in the code, than half of it."""

FEWEST = 64
"""Entries below which the σ of a tensor is not tested: its error is not known."""


@dataclasses.dataclass(frozen=True)
class Test:
    """One comparison, or one finding.

    Attributes:
        topic: "σ", "law", "bias", "norm", "factor", "logits", "stream", "mask", or a finding's name.
        what: a role, or a tensor's name.
        passed: whether it passed; a note that does not decide is passed.
        says: a clause for the verdict.
        cause: what explains it.
        names: the tensors.
        ratio: found over declared, with its error in log.
    """

    topic: str
    what: str
    passed: bool
    says: str = ""
    cause: str = ""
    names: tuple[str, ...] = ()
    ratio: float = math.nan
    error: float = 0.0


@dataclasses.dataclass(frozen=True)
class Row:
    """One tensor: its matrix and law, what is declared of it, and the matrices in it.

    `factor` is that of a writer's output in the sum over the declared one, `strength` the branch's c σ √fan_in.
    """

    matrix: Matrix
    law: Law
    declared: float | None
    declared_law: str | None
    factor: float = 1.0
    strength: float = math.nan
    parts: tuple[tuple[str, Law], ...] = ()

    @property
    def ratio(self) -> float:
        """σ times the factor in the pass, over what is declared."""
        return self.law.sd * abs(self.factor) / self.declared if self.declared else math.nan


def rows_of(account: Account, laws: dict[str, Law], recipe: Recipe | None) -> list[Row]:
    """All tensors that the pass used, with what a recipe declares of them."""
    rows = []
    for name, matrix in account.matrices.items():
        declared = law = None
        factor = 1.0
        if recipe is not None:
            if matrix.role == "bias":
                declared = recipe.bias_sd(matrix)
            elif matrix.linear or matrix.role in ("embedding", "position"):
                declared, law = recipe.sd(matrix), recipe.law(matrix)
            factor = writer_factor(account, name, recipe.multiplier(matrix.layers))
        same = declared and recipe is not None and _is_one_sd(matrix, declared, recipe)
        parts = laws_of_parts(account.graph.record.parameters[name], matrix, laws) if same else {}
        own = tuple((part, law_of_part) for part, (_, law_of_part) in parts.items())
        source = _plain_source(account, name)
        strength = abs(source.factor) * laws[name].sd * math.sqrt(matrix.fan_in) if source else math.nan
        rows.append(Row(matrix, laws[name], declared, law, factor, strength, own))
    return rows


def _is_one_sd(matrix: Matrix, declared: float, recipe: Recipe) -> bool:
    """Whether all roles in one array have one declared σ; otherwise the layout decides which part has which."""
    roles = matrix.role.split("/")
    own = [recipe.sd(dataclasses.replace(matrix, role=role)) for role in roles] if len(roles) > 1 else []
    return all(each is None or math.isclose(each, declared) for each in own)


def _plain_source(account: Account, name: str) -> Source | None:
    """A writer's output in the sum; None for other tensors, or where a norm or a parameter is between."""
    found = account.writers.get(name, [])
    return found[0][1] if found and found[0][1].plain else None


def writer_factor(account: Account, name: str, multiplier: float | None = 1.0) -> float:
    """The factor of a writer's output in the sum over the declared one; 1 where a norm or a parameter is between."""
    source = _plain_source(account, name)
    return source.factor / multiplier if source and source.factor and multiplier is not None else 1.0


def critical(count: int) -> float:
    """Z of one of so many tests at the level of a model."""
    return float(stats.norm.isf(LEVEL / (2 * max(count, 1))))


def tests_of(account: Account, rows: list[Row], recipe: Recipe) -> list[Test]:
    """All tests against a recipe."""
    count = 2 * len(rows) + sum(len(row.parts) for row in rows) + 30
    z = critical(count)
    pooled = list(_pooled(rows, z))
    named = {name for test in pooled if not test.passed for name in test.names}
    single = [test for row in rows for test in _tensor(row, z, recipe, known=row.matrix.name in named)]
    wrong = named | {name for test in single if not test.passed for name in test.names}
    parts = [test for row in rows if row.matrix.name not in wrong for test in _parts(row, z)]
    return [
        *pooled,
        *single,
        *parts,
        *_norms(account, rows, recipe),
        *_factors(account, rows, recipe),
        *_logits(account, recipe),
    ]


def by_role(rows: list[Row]) -> dict[str, list[Row]]:
    """Rows whose σ is declared, and is not zero, by role."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        if row.declared and row.law.sd > 0 and math.isfinite(row.law.sd) and row.law.seen >= FEWEST:
            found.setdefault(row.matrix.role, []).append(row)
    return found


def pooled_ratio(rows: list[Row]) -> tuple[float, float]:
    """The log ratio that tensors have in common, and its standard deviation."""
    weights = np.array([row.law.error**-2.0 for row in rows])
    return float(weights @ np.log([row.ratio for row in rows]) / weights.sum()), float(weights.sum() ** -0.5)


def _pooled(rows: list[Row], z: float) -> Iterator[Test]:
    for role, own in by_role(rows).items():
        log_ratio, error = pooled_ratio(own)
        passed = abs(log_ratio) < max(z * error, ALIKE)
        alone = [abs(math.log(row.ratio)) < max(z * row.law.error, ALIKE) for row in own]
        # If most tensors of a role pass, those that do not are named, and not the role.
        passed = passed or (not all(alone) and 2 * sum(alone) >= len(alone))
        names = tuple(row.matrix.name for row in own)
        yield Test("σ", role, passed, _says(own, log_ratio, error), "", names, math.exp(log_ratio), error)


def _says(own: list[Row], log_ratio: float, error: float) -> str:
    few = f" of {own[0].matrix.name}" if len(own) == 1 else ""
    digits, ratio = _digits(error), math.exp(log_ratio)
    return f"σ of {own[0].matrix.role}{few} is {ratio:.{digits}f} ± {ratio * error:.{digits}f} times"


def _digits(error: float) -> int:
    return int(np.clip(-math.floor(math.log10(max(error, 1e-6))), 2, 4))


def _tensor(row: Row, z: float, recipe: Recipe, *, known: bool) -> Iterator[Test]:
    """Tests of one tensor: zeros, σ, law."""
    matrix, law, name = row.matrix, row.law, row.matrix.name
    if row.declared is None or law.name == "not finite":
        return
    kind = "bias" if matrix.role == "bias" else "σ"
    if row.declared == 0:
        zero = law.name == "zeros" or matrix.role in recipe.zeros
        says = f"{kind if kind == 'bias' else matrix.role} {name} is {_value(law)}, declared 0"
        yield Test(kind, name, zero, says, names=(name,))
    elif law.sd == 0:
        zeros = {matrix.role, *matrix.role.split("/")} & {*recipe.zeros}
        yield Test(kind, name, bool(zeros) or law.seen < 2, f"{matrix.role} {name} is {_value(law)}", names=(name,))
    elif not known and law.seen >= FEWEST:
        yield _compared(row, z, kind, name)
    if row.declared and law.sd > 0 and matrix.role != "bias":
        offset = abs(law.mean) / law.sd
        centred = offset < max(z / math.sqrt(law.seen), 0.02)
        yield Test("law", name, centred, f"{name} has mean {law.mean:.3g}, which is {offset:.2g} σ", names=(name,))
        if row.declared_law is not None and law.seen >= 256:
            truncated = row.declared_law == "normal" and law.name == "truncated" and law.edge > 2.4
            # Small samples tell few laws apart.
            small = law.seen < 4096 and bool({law.name, row.declared_law} & {"truncated", "other"})
            alike = law.name == row.declared_law or truncated or small
            yield Test("law", name, alike, f"{name} is {law.name}, declared {row.declared_law}", names=(name,))


def _compared(row: Row, z: float, topic: str, name: str) -> Test:
    """The σ of one matrix against the declared one, as a test of a tensor."""
    log_ratio, error = math.log(row.ratio), row.law.error
    passed = abs(log_ratio) < max(z * error, ALIKE)
    return Test(topic, name, passed, _says([row], log_ratio, error), "", (name,), row.ratio, error)


def _parts(row: Row, z: float) -> Iterator[Test]:
    """Tests of the matrices in one array."""
    for name, law in row.parts:
        part = dataclasses.replace(row, law=law, matrix=dataclasses.replace(row.matrix, name=name))
        if law.sd > 0 and law.seen >= FEWEST:
            yield _compared(part, z, "σ", row.matrix.name)
        elif row.law.sd > 0 and law.seen >= FEWEST:
            says = f"{name} is {_value(law)}"
            yield Test("σ", row.matrix.name, passed=False, says=says, names=(row.matrix.name,))


def _value(law: Law) -> str:
    return "0" if law.name == "zeros" else f"{law.mean:.4g}" if law.sd == 0 else f"{law.name} with σ {law.sd:.3g}"


def _norms(account: Account, rows: list[Row], recipe: Recipe) -> Iterator[Test]:
    """Gains of norms as they are used, their offsets, and parameters that scale branches."""
    scales = {name for found in account.writers.values() for _, source in found for name in source.scales}
    for row in rows:
        name, law = row.matrix.name, row.law
        declared = recipe.gain(row.matrix) if row.matrix.role in ("norm", "norm bias") else None
        if declared is not None and row.matrix.role == "norm":
            mean, sd = account.gains.get(name, [(law.mean, law.sd)])[0]
            # A gain that the code of the model fills with another number than 1 is used as it is, or as 1 + w.
            of_code = declared != 1.0 and law.sd == 0 and abs(law.mean - declared) < 1e-6
            declared = declared if of_code or declared else 1.0
            says = f"norm {name} multiplies by {mean:.3g}{f' ± {sd:.2g}' if sd else ''}, declared {declared:g}"
            passed = of_code or (abs(mean - declared) < ALIKE and sd < ALIKE)
            yield Test("norm", name, passed, says, names=(name,), ratio=mean)
        elif declared is not None:
            passed = law.sd == 0 and abs(law.mean - declared) < 1e-6
            says = f"norm offset {name} is {_value(law)}, declared {declared:g}"
            yield Test("norm", name, passed, says, names=(name,))
        elif name in scales and (scale := recipe.layer_scale(row.matrix)) and row.matrix.role != "norm":
            passed = law.sd == 0 and math.isclose(law.mean, scale, rel_tol=1e-2)
            says = f"LayerScale {name} is {_value(law)}, declared {scale:g}"
            yield Test("factor", name, passed, says, names=(name,), ratio=law.mean / scale)


def _factors(account: Account, rows: list[Row], recipe: Recipe) -> Iterator[Test]:
    """Factors of branches beside those of constant parameters, of the stream and of the embedding."""
    scales = {row.matrix.name: row.law.mean for row in rows if row.law.sd == 0}
    scales |= {name: found[0][0] for name, found in account.gains.items() if found[0][1] < ALIKE}
    for chain in account.streams:
        multiplier, skip = recipe.multiplier(chain[-1].layer + 1), recipe.skip(chain[-1].layer + 1)
        for link in chain:
            place = f"{link.kind}, layer {link.layer}"
            if skip is not None and link is not chain[0]:
                found = link.skip.factor
                says = f"the stream is multiplied by {found:.4g} at {place}, declared {skip:.4g}"
                yield Test("stream", place, _near(found, skip), says, ratio=found / skip)
            for source in link.writers:
                known = [scales.get(name, math.nan) for name in source.scales]
                if multiplier is not None and not source.gated and math.isfinite(math.prod(known)) and math.prod(known):
                    found = abs(source.factor / math.prod(known))
                    says = f"the branch of {place} is multiplied by {found:.4g}, declared {multiplier:.4g}"
                    names, ratio = source.node.parameters[:1], found / multiplier
                    yield Test("factor", place, _near(found, multiplier), says, ratio=ratio, names=names)
            if recipe.norm is not None and link is not chain[0]:
                found = "post" if link.normed else "pre"
                says = "the stream itself is normalised" if found == "post" else "the stream is not normalised"
                yield Test("stream", place, found == recipe.norm, says)
        start = account.graph.sources(chain[0].skip.origin)
        for source in start if recipe.embedding is not None else ():
            matrix = account.matrices.get(source.node.parameters[0]) if source.node.parameters else None
            if matrix and matrix.role == "embedding" and not source.normed and recipe.embedding:
                found = abs(source.factor * chain[0].skip.factor)
                says = f"the embedding is multiplied by {found:.4g}, declared {recipe.embedding:.4g}"
                yield Test("stream", "embedding", _near(found, recipe.embedding), says, ratio=found / recipe.embedding)


def _near(found: float, declared: float) -> bool:
    return math.isclose(found, declared, rel_tol=ALIKE / 2)


def _logits(account: Account, recipe: Recipe) -> Iterator[Test]:
    for each in account.logits:
        declared = recipe.logits_factor(each)
        if declared is None:
            continue
        ratio = each.factor / declared
        says = f"logits of layer {each.layer} are multiplied by {each.factor:.4g}, declared {declared:.4g}"
        cause = _of_logits(ratio, each.head_size, each.layer)
        yield Test("logits", f"layer {each.layer}", _near(each.factor, declared), says, cause, ratio=ratio)


def _of_logits(ratio: float, size: int, layer: int | None) -> str:
    """The likely cause of a wrong factor of the logits."""
    candidates = {
        math.sqrt(size): "1/√d_k is missing",
        1 / math.sqrt(size): "1/√d_k is there twice",
        float(size): "√d_k multiplies and does not divide",
        (layer or 0) + 1.0: "the factor 1/(l + 1) of the layer is missing",
        1 / ((layer or 0) + 1.0): "the factor 1/(l + 1) of the layer is there",
    }
    return next(
        (says for value, says in candidates.items() if value != 1.0 and math.isclose(ratio, value, rel_tol=0.02)), ""
    )
