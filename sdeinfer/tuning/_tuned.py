"""The result of tuning."""

import dataclasses
import html
import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float

from sdeinfer._files import staged_file
from sdeinfer.criteria import AbstractCriterion, Constraint
from sdeinfer.layers import AbstractLayer
from sdeinfer.tuning._problem import Problem


@dataclasses.dataclass(frozen=True, eq=False)
class Tuned:
    """A tuned layer, and what it promises.

    Attributes:
        layer: the layer; an `OverDepth` if a parameter changes with depth. With a posterior, parameters that come from
            it have their posterior medians.
        parameters: one row per free parameter: value; error, the Monte Carlo error by way of the active constraints;
            and whether it is at the end of its box.
        criteria: one row per constraint and prompt, and one for the objective: value and Monte Carlo error on fresh
            paths with half the step; bound; slack, positive where the constraint holds; whether it is active; and its
            multiplier, the change of the objective per change of the bound.
        sensitivity: derivative of each free parameter by the bound of each active constraint.
        found: how the answer was found: start, evaluations, iterations, how the search ended, paths, step, seconds,
            share of paths that explode, gap of the slopes at width n and spread of the logits.
        depth: d.
        u: the solution's coordinates.
        problem: the problem that was solved.
    """

    layer: AbstractLayer
    parameters: pd.DataFrame
    criteria: pd.DataFrame
    sensitivity: pd.DataFrame
    found: dict[str, Any]
    depth: int
    u: Float[np.ndarray, " coordinates"] = dataclasses.field(repr=False)
    problem: Problem = dataclasses.field(repr=False)

    @property
    def V0(self) -> Float[np.ndarray, "prompts m m"]:  # noqa: N802
        """Initial covariances, shape (prompts, m, m)."""
        return self.problem.V0

    @property
    def width(self) -> int:
        """Width n."""
        return self.problem.width

    @property
    def objective(self) -> AbstractCriterion | str:
        """The criterion, or the name of a parameter."""
        return self.problem.objective

    @property
    def constraints(self) -> tuple[Constraint, ...]:
        """The constraints."""
        return self.problem.constraints

    @property
    def values(self) -> dict[str, float]:
        """The free parameters' values."""
        return dict(zip(map(str, self.parameters.index), self.parameters["value"].to_numpy(float), strict=True))

    @property
    def notes(self) -> list[str]:
        """Warnings to read before relying on the answer, one sentence each."""
        found, notes = self.found, []
        if found["exploded"] > 0:
            notes.append(f"{found['exploded']:.2%} of paths explode; they count as outside of every range")
        if found["logit_spread"] > 0.5:
            notes.append(
                f"logits have a spread of {found['logit_spread']:.2g} at width {self.width}: the limit is rough"
            )
        if found["gap"] > 0.3:
            notes.append(
                f"the slopes of the ReLU differ by {found['gap']:.2g} at width {self.width}: the limit is rough"
            )
        if not found["converged"]:
            notes.append(f"the search stopped early: {found['message']}")
        at_end = self.parameters.index[self.parameters["at_end"].to_numpy(bool)]
        notes += [f"{name} is at the end of its box; `bounds` widens it" for name in at_end]
        return notes

    def __str__(self) -> str:
        rows = [f"width {self.width}, depth {self.depth}, {self.V0.shape[-1]} tokens"]
        rows += [self.parameters.to_string(float_format=_short), "", self.criteria.to_string(float_format=_short)]
        if len(self.sensitivity.columns):
            rows += ["", "change of each parameter per change of a bound:"]
            rows += [self.sensitivity.to_string(float_format=_short)]
        return "\n".join([*rows, *(f"note: {note}" for note in self.notes)])

    def _repr_html_(self) -> str:
        tables = (self.parameters, self.criteria, self.sensitivity)
        tables = "".join(table.to_html(float_format=_short, border=0) for table in tables if table.size)
        return tables + "".join(f"<p>{html.escape(note)}</p>" for note in self.notes)

    def to_dict(self) -> dict[str, Any]:
        """All figures in plain Python types; `layer` has all parameters of a layer that does not change with depth."""
        tables = {
            "parameters": json.loads(str(self.parameters.to_json(orient="index"))),
            "sensitivity": {
                # JSON has no NaN.
                str(name): {
                    column: None if np.isnan(x) else float(x) for column, x in zip(self.sensitivity, row, strict=True)
                }
                for name, row in zip(self.sensitivity.index, self.sensitivity.to_numpy(float), strict=True)
            },
        }
        criteria = json.loads(str(self.criteria.reset_index().to_json(orient="records")))
        sizes: dict[str, Any] = {"width": self.width, "depth": self.depth, "tokens": int(self.V0.shape[-1])}
        space = self.problem.space
        sizes |= space.kind.attributes()
        if not space.over_depth:
            sizes["layer"] = {name: float(value) for name, value in self.layer.parameters().items()}
        return sizes | tables | {"criteria": criteria, "found": self.found, "notes": self.notes}

    def write(self, path: str | Path) -> None:
        """Write `to_dict` as JSON."""
        with staged_file(Path(path)) as file:
            file.write_text(json.dumps(self.to_dict(), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _short(value: float) -> str:
    return f"{value:.4g}"
