"""The result of an audit. Tests: `tests/auditing/test_audit.py`."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

from sdeinfer._files import write_text
from sdeinfer.auditing._recipe import Recipe
from sdeinfer.auditing._tests import Row, Test
from sdeinfer.auditing._topics import TOPICS
from sdeinfer.auditing._words import clauses_of
from sdeinfer.passes._account import Account


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Audit:
    """A network against what is declared of it.

    Attributes:
        name: name of the network, as "GPT2Model".
        recipe: the declaration; None if nothing was declared.
        rows: one for each matrix: its name, role, layer and sizes, its law, and what is declared.
        tests: all comparisons, and the findings that need no recipe.
        words: the initialisation in words.
        account: what the pass shows: streams, writers with their factors, logits.
        hint: another recipe that the network would pass.
        declared: whether anything was declared.
    """

    name: str
    recipe: Recipe | None
    rows: tuple[Row, ...]
    tests: tuple[Test, ...]
    words: str
    account: Account
    hint: str
    declared: bool

    @property
    def failed(self) -> tuple[Test, ...]:
        """The failed tests, causes before consequences."""
        order = [*TOPICS]
        failed = (test for test in self.tests if test.passed is False)
        return tuple(sorted(failed, key=lambda test: order.index(test.topic)))

    @property
    def untested(self) -> tuple[str, ...]:
        """The declarations that were not tested."""
        return tuple(dict.fromkeys(test.says for test in self.tests if test.passed is None))

    @property
    def notes(self) -> tuple[str, ...]:
        """Findings that do not decide."""
        return tuple(test.says for test in self.tests if test.passed and TOPICS[test.topic].note)

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
            tail = f" (and {len(self.untested) - 3} more)" if len(self.untested) > 3 else ""
            return f"not tested: {'; '.join(self.untested[:3])}{tail}; {self.name}: {self._as_declared()}"
        if self.passed:
            return "; ".join([f"passed: {self.name}: {self._as_declared()}", *self.notes])
        clauses = clauses_of(self.failed)
        tail = f" (also: {len(clauses) - 3} more)" if len(clauses) > 3 else ""
        named = self.recipe is not None and any(test.topic != "copies" for test in self.failed)
        declares = f" [declared: {self.recipe.name}]" if self.recipe is not None and named else ""
        return f"failed: {self.name}: {'; '.join(clauses[:3])}{tail}{declares}{f'; {self.hint}' if self.hint else ''}"

    def _as_declared(self) -> str:
        """The σ of each role, which passed."""
        sigma = [test for test in self.tests if test.topic == "σ" and test.of_sigma]
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
