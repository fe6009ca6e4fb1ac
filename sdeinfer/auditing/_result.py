"""The result of an audit."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr
from jaxtyping import Float

from sdeinfer._files import write_text
from sdeinfer._html import render
from sdeinfer.auditing._estimates import Estimate
from sdeinfer.auditing._recipe import Recipe
from sdeinfer.diagnostics import Verdict
from sdeinfer.layers import Stack


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Audit:
    """The residual branches of a network against their declared blocks.

    Attributes:
        name: what was audited, as "GPT2Model".
        recipe: what was declared; None if nothing was.
        strengths: for each block its strength over the declared one, common to all layers.
        shapes: gains and temperatures over the declared ones, where the data identify them.
        assumed: gains and temperatures that the data do not identify.
        branches: one row for each branch: block, layer, strength, ratio to the declared one, its 95 % interval, the
            standard deviation of its log, and the p-value of its increments, by their law at the common strength.
        verdicts: tests of the law of the blocks, and of the strengths against the declared ones.
        causes: for a failed test, by its name, the mistakes that explain it, likely ones first.
        words: what the weights of the branches are, without a recipe.
        architecture: the declared blocks of one layer.
        data: the observed Dataset of branches.
        stream: covariances of the residual stream before the first and after each layer, shape (networks, layers + 1,
            tokens, tokens); None if it was not seen.
    """

    name: str
    recipe: Recipe | None
    strengths: tuple[Estimate, ...]
    shapes: tuple[Estimate, ...]
    assumed: tuple[str, ...]
    branches: pd.DataFrame
    verdicts: tuple[Verdict, ...]
    causes: Mapping[str, tuple[str, ...]]
    words: str
    architecture: Stack
    data: xr.Dataset
    stream: Float[np.ndarray, "networks layers m m"] | None

    @property
    def passed(self) -> bool:
        """Whether every test passed."""
        return all(verdict.passed for verdict in self.verdicts)

    @property
    def layers(self) -> int:
        """Number of layers L."""
        return 1 + int(self.branches["layer"].to_numpy().max())

    @property
    def failed(self) -> tuple[Verdict, ...]:
        """The failed tests, causes before consequences."""
        return tuple(verdict for verdict in self.verdicts if not verdict.passed)

    @property
    def found(self) -> Stack:
        """The blocks of one layer with the strengths that were found."""
        return self.architecture.with_parameters({each.name: each.value for each in self.strengths})

    @property
    def verdict(self) -> str:
        """The verdict in one sentence."""
        if self.passed:
            ratios = ", ".join(f"{each.name} {each}" for each in self.strengths)
            found = self.words if self.recipe is None else f"{ratios} times what {self.recipe.name} declares"
            assumed = f"; assumed: {', '.join(self.assumed)}" if self.assumed else ""
            return f"passed: {self.name}: {found}{assumed}"
        first = self.failed[0]
        if first.topic == "declared":
            reasons = [each for each in self.failed if each.topic == "declared"]
            what = " and ".join([*(each.advice.partition(" times ")[0] for each in reasons[:-1]), reasons[-1].advice])
            likely = _joined([self.causes[each.name][0] for each in reasons if each.name in self.causes])
            what += f": {likely}" if likely else ""
        else:
            reasons, what = [first], "; ".join(self.causes.get(first.name, (first.advice,)))
        others = ", ".join(each.name for each in self.failed if each not in reasons)
        return f"failed: {self.name}: {what}" + (f" (also: {others})" if others else "")

    def to_frame(self) -> pd.DataFrame:
        """A table with one row for each block, and for each branch."""
        pooled = pd.DataFrame(
            [
                {"branch": f"all {block}", "block": block, **each.row}
                for each in self.strengths
                for block in [each.name.partition(".")[0]]
            ]
        ).set_index("branch")
        return pd.concat([pooled, self.branches])

    def to_dict(self) -> dict[str, Any]:
        """The result as numbers, text and lists of them, for JSON."""
        return {
            "name": self.name,
            "recipe": None if self.recipe is None else {"name": self.recipe.name, "source": self.recipe.source},
            "passed": self.passed,
            "verdict": self.verdict,
            "causes": {name: list(sentences) for name, sentences in self.causes.items()},
            "strengths": [_estimate(each) for each in self.strengths],
            "shapes": [_estimate(each) for each in self.shapes],
            "assumed": list(self.assumed),
            "branches": self.branches.reset_index().to_dict("records"),
            "tests": [dataclasses.asdict(each) for each in self.verdicts],
        }

    def write(self, path: str | Path) -> None:
        """Write `to_dict` as JSON."""
        write_text(Path(path), json.dumps(self.to_dict(), indent=1) + "\n")

    def __repr__(self) -> str:
        """The verdict; a failed assertion of `passed` shows it."""
        notes = (
            [] if self.passed else [f"  {each.name} {each.value:.3g} > {each.threshold:.3g}" for each in self.failed]
        )
        return "\n".join([self.verdict, *notes])

    def _repr_html_(self) -> str:
        return render("audit_cell.html.jinja", audit=self)


def _joined(sentences: list[str]) -> str:
    """Sentences that differ in the middle only, as in a name of a matrix, become one."""
    found: list[str] = []
    for sentence in dict.fromkeys(sentences):
        before, after = (found[-1].split() if found else []), sentence.split()
        same = [a == b for a, b in zip(before, after, strict=False)]
        start = same.index(False) if False in same else 0
        end = next((k for k in range(len(same)) if before[-1 - k] != after[-1 - k]), 0)
        if start and ":" in " ".join(after[:start]) and len(before) == len(after):
            between = [*before[start : len(before) - end], "and", *after[start : len(after) - end]]
            found[-1] = " ".join([*before[:start], *between, *after[len(after) - end :]])
        else:
            found.append(sentence)
    return "; ".join(found)


def _estimate(each: Estimate) -> dict[str, Any]:
    numbers = {"declared": each.declared, **each.row}
    return {"name": each.name} | {key: float(value) for key, value in numbers.items() if key != "strength"}
