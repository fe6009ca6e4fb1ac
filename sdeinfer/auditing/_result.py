"""The result of an audit, and an initialisation in words. Tests: `tests/auditing/test_audit.py`."""

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sdeinfer._files import write_text
from sdeinfer.auditing._account import IN_BLOCKS, Account
from sdeinfer.auditing._books import Dependences
from sdeinfer.auditing._law import Law
from sdeinfer.auditing._readings import BranchNorms
from sdeinfer.auditing._recipe import Recipe
from sdeinfer.auditing._tests import ALIKE, Row, Test

ORDER = (
    "not finite, dropout, outliers, copies, shards, series, softmax, norm, norms, queries, probabilities, dead, mask, "
    "items, unused, roles, stream, logits, factor, reading, unlike, σ, bias, value, law, outputs"
).split(", ")
"""Topics of tests, causes before consequences."""


TOGETHER = ("norm", "norms", "law", "bias", "factor", "logits", "stream", "value", "reading")
"""Topics whose failed tests are one clause."""


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Audit:
    """A network against what is declared of it.

    Attributes:
        name: what was audited, as "GPT2Model".
        recipe: what was declared; None if nothing was.
        rows: one for each matrix: its name, role, layer and sizes, its law, and what is declared.
        tests: all comparisons, and the findings that need no recipe.
        words: what the initialisation is.
        account: the books: streams, writers with their factors, logits.
        hint: another recipe that the network would pass.
        declared: whether anything was declared.
    """

    name: str
    recipe: Recipe | None
    rows: tuple[Row, ...]
    tests: tuple[Test, ...]
    words: str
    account: Account
    hint: str = ""
    declared: bool = True

    @property
    def failed(self) -> tuple[Test, ...]:
        """The failed tests, causes before consequences."""
        rank = {topic: place for place, topic in enumerate(ORDER)}
        failed = (test for test in self.tests if test.passed is False)
        return tuple(sorted(failed, key=lambda test: rank.get(test.topic, 9)))

    @property
    def untested(self) -> tuple[str, ...]:
        """What was declared and not tested."""
        return tuple(dict.fromkeys(test.says for test in self.tests if test.passed is None))

    @property
    def notes(self) -> tuple[str, ...]:
        """Findings that do not decide."""
        return tuple(test.says for test in self.tests if test.passed and test.topic in ("random", "zeros", "left"))

    @property
    def passed(self) -> bool | None:
        """Whether all that was declared was tested and passed; None if some was not tested, or nothing was declared."""
        if self.failed:
            return False
        return True if self.declared and not self.untested else None

    @property
    def layers(self) -> int:
        """Number of layers L."""
        return self.account.layers

    @property
    def verdict(self) -> str:
        """The verdict in one sentence."""
        if self.passed is None and not self.declared:
            return f"nothing declared: {self.name}: {'; '.join([self.words, *self.notes])}"
        if self.passed is None:
            more = f" (and {len(self.untested) - 3} more)" if len(self.untested) > 3 else ""
            return f"not tested: {'; '.join(self.untested[:3])}{more}; {self.name}: {self._as_declared()}"
        if self.passed:
            return "; ".join([f"passed: {self.name}: {self._as_declared()}", *self.notes])
        clauses = _clauses(self.failed)
        more = f" (also: {len(clauses) - 3} more)" if len(clauses) > 3 else ""
        named = self.recipe is not None and any(each.topic != "copies" for each in self.failed)
        declares = f" [declared: {self.recipe.name}]" if self.recipe is not None and named else ""
        return f"failed: {self.name}: {'; '.join(clauses[:3])}{more}{declares}{f'; {self.hint}' if self.hint else ''}"

    def _as_declared(self) -> str:
        """The σ of each role, which passed."""
        sigma = [test for test in self.tests if test.topic == "σ" and math.isfinite(test.ratio)]
        of_roles = [test for test in sigma if test.names and test.what not in test.names]
        roles = ", ".join(f"{test.what} {test.ratio:.3f} ± {test.error:.3f}" for test in of_roles)
        if self.recipe is None:
            return "as declared"
        return f"σ of {roles} times what {self.recipe.name} declares" if roles else f"as {self.recipe.name} declares"

    def table(self) -> list[dict[str, Any]]:
        """One row for each matrix, as a dict."""
        failed = {name: test.topic for test in self.failed for name in test.names}
        return [
            {
                "name": row.matrix.name,
                "role": row.matrix.role,
                "layer": row.matrix.layer,
                "fan_in": row.matrix.fan_in,
                "fan_out": row.matrix.fan_out,
                "law": row.law.name,
                "mean": row.law.mean,
                "sd": row.law.sd,
                "factor": row.factor,
                "strength": row.strength,
                "declared": row.declared,
                "ratio": row.ratio,
                "error": row.law.error if math.isfinite(row.law.kurtosis) else math.nan,
                "failed": failed.get(row.matrix.name, ""),
            }
            for row in self.rows
        ]

    def to_frame(self) -> Any:
        """A table with one row for each tensor."""
        import pandas as pd

        return pd.DataFrame(self.table()).set_index("name")

    def to_dict(self) -> dict[str, Any]:
        """The result as numbers, text and lists of them, for JSON."""
        return {
            "name": self.name,
            "recipe": None if self.recipe is None else {"name": self.recipe.name, "source": self.recipe.source},
            "passed": self.passed,
            "verdict": self.verdict,
            "words": self.words,
            "hint": self.hint,
            "untested": list(self.untested),
            "tensors": [{key: _plain(value) for key, value in row.items()} for row in self.table()],
            "tests": [{key: _plain(value) for key, value in dataclasses.asdict(test).items()} for test in self.tests],
        }

    def write(self, path: str | Path) -> None:
        """Write `to_dict` as JSON."""
        write_text(Path(path), json.dumps(self.to_dict(), indent=1, ensure_ascii=False) + "\n")

    def __repr__(self) -> str:
        """The verdict; a failed assertion of `passed` shows it."""
        return self.verdict

    def _repr_html_(self) -> str:
        from sdeinfer._html import render

        return render("audit_cell.html.jinja", audit=self)


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return list(value) if isinstance(value, tuple) else value


def _clauses(failed: tuple[Test, ...]) -> list[str]:
    """Sentences of failed tests; those with one cause, or of one topic for several tensors, become one."""
    found: dict[tuple[str, str], list[Test]] = {}
    for test in failed:
        alone = test.says if test.topic not in TOGETHER else ""
        key = test.cause.split(": ", 1)[-1].split(" of the ")[0] if test.cause else alone
        found.setdefault((test.topic, key), []).append(test)
    clauses = []
    for own in found.values():
        first = own[0]
        roles = list(dict.fromkeys(test.what for test in own))
        if first.topic == "σ" and first.cause and len(roles) > 1:
            alike = [test for test in own if abs(math.log(test.ratio / first.ratio)) < ALIKE]
            same = list(dict.fromkeys(test.what for test in alike))
            others = [test.says for test in own if test not in alike]
            says = "; ".join([first.says.replace(first.what, " and ".join(same), 1), *others[:2]])
            causes = dict.fromkeys(test.cause for test in own)
            clauses.append(f"{says} the declared: {'; '.join(list(causes)[:2])}")
            continue
        more = f" (and {len(own) - 1} more)" if len(own) > 1 else ""
        tail = " the declared" if first.says.endswith("times") else ""
        clauses.append(f"{first.says}{tail}{f': {first.cause}' if first.cause else ''}{more}")
    return clauses


def words_of(account: Account, laws: Mapping[str, Law], dependences: Dependences, norms: Sequence[BranchNorms]) -> str:
    """σ of each role, scaled with depth or not; the logits' factor; multipliers of the stream; the mask."""
    parts = [_size(account, norms), *_sds(account, laws), *_logits(account), *_stream(account)]
    if dependences.causal is not None and account.logits:
        parts.append("causal" if dependences.causal else "not causal")
    return "; ".join(parts)


def _size(account: Account, norms: Sequence[BranchNorms]) -> str:
    if not account.streams:
        return "no residual stream"
    layers = " and ".join(f"{chain[-1].layer + 1} layers" for chain in account.streams)
    return f"{layers} of width {account.width}, {_places(norms)}"


def _places(norms: Sequence[BranchNorms]) -> str:
    if any(each.link.normed for each in norms):
        return "norms after sums"
    known = [each.before for each in norms if each.before is not None]
    if known and all(known):
        return "norms before and after branches" if all(each.of_branch for each in norms) else "norms before branches"
    if norms and all(each.of_branch for each in norms):
        return "norms after branches"
    return "norms before some branches" if any(known) else "no norms of the stream"


def _sds(account: Account, laws: Mapping[str, Law]) -> list[str]:
    by_role: dict[str, list[float]] = {}
    for name, matrix in account.matrices.items():
        if (matrix.linear or matrix.role == "embedding") and math.isfinite(laws[name].sd):
            by_role.setdefault(matrix.role, []).append(laws[name].sd)
    by_text: dict[str, list[str]] = {}
    for role in (role for role in ("embedding", *IN_BLOCKS, "head") if role in by_role):
        low, *_, high = [*sorted(by_role[role]), max(by_role[role])]
        middle = sorted(by_role[role])[len(by_role[role]) // 2]
        text = f"{middle:.2g}" if high <= 1.15 * low or high == 0 else f"{low:.2g} to {high:.2g}"
        by_text.setdefault(text, []).append(role)
    sds = [f"{text} ({', '.join(roles)})" for text, roles in by_text.items()]
    return (["σ " + ", ".join(sds)] if sds else []) + _depth(account, by_role)


def _depth(account: Account, by_role: Mapping[str, list[float]]) -> list[str]:
    last, first = (by_role.get(role, []) for role in ("mlp output", "up"))
    if account.layers < 2 or not last or not first or not min(*last, *first) > 0:
        return []
    ratio = sum(last) / len(last) / (sum(first) / len(first))
    if abs(math.log(ratio * math.sqrt(2 * account.layers))) < 0.05:
        return ["scaled with depth, by 1/√(2L)"]
    return ["not scaled with depth" if abs(math.log(ratio)) < 0.05 else f"mlp output over up {ratio:.2g}"]


def _logits(account: Account) -> list[str]:
    found = dict.fromkeys(
        _factor(each.factor, each.head_size) + (" (q, k normed)" if each.normed else "") for each in account.logits
    )
    return [f"logits × {', '.join(list(found)[:3])}"] if found else []


def _factor(factor: float, size: int) -> str:
    if math.isclose(factor, size**-0.5, rel_tol=0.01):
        return "1/√d_k"
    return "1/d_k" if math.isclose(factor, 1 / size, rel_tol=0.01) else f"{factor:.3g}"


def _stream(account: Account) -> list[str]:
    links = [link for chain in account.streams for link in chain]
    sources = [source for link in links for source in link.writers]
    factors = {
        "branches": {f"{abs(source.factor):.3g}" for source in sources if source.plain},
        "stream": {f"{link.skip.factor:.3g}" for chain in account.streams for link in chain[1:]},
        "embedding": {f"{chain[0].skip.factor:.3g}" for chain in account.streams},
    }
    found = [f"{what} × {', '.join(sorted(values))}" for what, values in factors.items() if values - {"1"}]
    scales = any(source.scales and not source.normed for source in sources)
    return found + (["branches × parameters (LayerScale)"] if scales else [])
