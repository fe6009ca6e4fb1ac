"""The result of tuning. Tests: `tests/tuning/test_tune.py`."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float, PRNGKeyArray

from sdeinfer._files import write_text
from sdeinfer._html import render
from sdeinfer.auditing import Initialised, Recipe
from sdeinfer.criteria import AbstractCriterion, Constraint
from sdeinfer.layers import AbstractLayer, kind_in_words
from sdeinfer.layers._templates import attributes_of_layer
from sdeinfer.tuning._hand_over import blocks_of, initialised, recipes_of
from sdeinfer.tuning._problem import Law, Problem
from sdeinfer.tuning._recipes import standard_deviations

NOISE = 2.0
"""Monte Carlo errors within which a value cannot be told from its bound."""

FEWEST = 50
"""Paths below which neither criteria nor their Monte Carlo errors are known."""


@dataclasses.dataclass(frozen=True, eq=False)
class Tuned:
    """A tuned layer, and what it promises.

    Attributes:
        layer: the layer; an `OverDepth` if a parameter changes with depth.
        parameters: one row per free parameter: value; error, the Monte Carlo error by way of the active constraints;
            and whether it is at the end of its box.
        criteria: one row per constraint and prompt, and one for the objective: value and Monte Carlo error on fresh
            networks, or by the limit on fresh paths with half the step; bound; slack, positive where the constraint
            holds; whether it is active; and its multiplier, the change of the objective per change of the bound.
        sensitivity: derivative of each free parameter by the bound of each active constraint.
        found: how the answer was found: start, evaluations, iterations, how the search ended, paths, step, seconds,
            share of paths that explode, gap of the slopes at width n and spread of the logits.
        law: "finite-width", if criteria are those of networks of width n; else "limit".
        u: the solution's coordinates.
        problem: the problem that was solved.
    """

    layer: AbstractLayer
    parameters: pd.DataFrame
    criteria: pd.DataFrame
    sensitivity: pd.DataFrame
    found: dict[str, Any]
    law: Law
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
    def depth(self) -> int:
        """Depth d."""
        return self.problem.depth

    @property
    def kind(self) -> str:
        """The kind of layer in words."""
        return kind_in_words(self.problem.space.kind)

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
        values = self.parameters["value"].astype(float)
        return dict(zip(map(str, values.index), values.tolist(), strict=True))

    @property
    def samples(self) -> str:
        """The word for the samples that criteria are estimated on."""
        return "paths" if self.law == "limit" else "networks"

    @property
    def _few(self) -> str:
        """The number of samples, with the word for them."""
        return f"{self.problem.paths} {self.samples if self.problem.paths > 1 else self.samples[:-1]}"

    def sample(self, *, paths: int = 512, key: PRNGKeyArray) -> pd.DataFrame:
        """The statistics of new networks, or of new paths by the limit, at the tuned parameters.

        Returns:
            one row per prompt and network: a column for each statistic of the criteria, and whether it `exploded`.
        """
        fresh = self.problem.fresh(self.law, paths=paths, key=key)
        names = [str(statistic) for statistic in fresh.statistics]
        tables = [
            pd.DataFrame(sample.values.T, columns=names).assign(exploded=sample.exploded)
            for sample in fresh.samples(self.u)
        ]
        return pd.concat(tables, keys=range(len(tables)), names=["prompt", "network"])

    @property
    def recipes(self) -> list[Recipe]:
        """The recipe of the weights of each layer of tuned blocks, one object if all are alike."""
        return recipes_of(self.layer, width=self.width, depth=self.depth)

    @property
    def standard_deviations(self) -> pd.DataFrame:
        """The weights of tuned blocks, for those who draw them elsewhere: matrix, fan-in, fan-out, standard deviation.

        There is one row for each matrix of a layer, or of each layer if these differ.
        """
        return standard_deviations(blocks_of(self.layer), self.recipes, width=self.width)

    def initialise(self, model: Any, inputs: Any = None, **settings: Any) -> Initialised:
        """Draw the weights of a model by the tuned blocks, and audit it: see `si.audit.initialise`.

        A module of PyTorch is changed in place; of Flax and Equinox a new one is made.

        Arguments:
            model: a model of the tuned width, depth and blocks.
            inputs: its input, see `si.audit`.
            settings: other arguments of `si.audit.initialise` than the recipe, the architecture and the width. With
                `audited=False` the model's blocks are not compared with the tuned ones either.

        Returns:
            `Initialised`: its `model`, `audit` and `matrices`.

        Raises:
            InputError: for shaped layers; for a model of another width or depth, or of other blocks; and as
                `si.audit.initialise`. The model is not changed then.
        """
        return initialised(self.layer, model, inputs, width=self.width, depth=self.depth, **settings)

    @property
    def notes(self) -> list[str]:
        """Warnings to read before relying on the answer, one sentence each."""
        search, notes = self.found, []
        if search["paths"] < FEWEST:
            notes.append(f"{self._few}: values and errors of criteria need some hundreds; raise `paths`")
        if search["exploded"] > 0:
            notes.append(f"{search['exploded']:.2%} of {self.samples} explode; they count as outside of every range")
        exact = self.problem.of_chains
        by_limit = self.law == "limit" or any(statistic not in exact for statistic in self.problem.statistics)
        if by_limit and search["logit_spread"] > 0.5:
            spread = f"{search['logit_spread']:.2g} at width {self.width}"
            notes.append(f"logits have a spread of {spread}: the limit is rough")
        if by_limit and search["gap"] > 0.3:
            gap = f"{search['gap']:.2g} at width {self.width}"
            notes.append(f"the slopes of the ReLU differ by {gap}: the limit is rough")
        if not search["converged"]:
            notes.append(f"the search stopped early: {search['message']}")
        at_end = self.parameters.index[self.parameters["at_end"].to_numpy(bool)]
        notes += [f"{name} is at the end of its box; `bounds` widens it" for name in at_end]
        return notes

    @property
    def missed(self) -> int:
        """Rows of constraints that miss their bounds on new paths, by more than two Monte Carlo errors."""
        return sum(row["state"] == "fail" for row in self.constraint_rows())

    @property
    def verdict(self) -> str:
        """The answer in one sentence."""
        if isinstance(self.objective, str):
            # The objective of a parameter with knots is its mean over depth.
            shares = self.problem.space.mean_of(self.objective)
            value, error = (shares @ self.parameters[column].to_numpy(float) for column in ("value", "error"))
        else:
            # The worst prompt decides.
            rows = self.criteria.iloc[len(self.V0) * len(self.constraints) :]
            worst = rows["value"].to_numpy(float).argsort()[0 if self.problem.sign > 0 else -1]
            value, error = rows["value"].iloc[worst], rows["error"].iloc[worst]
        answer = f"{self.objective} = {value:.4g} ± {error:.2g}"
        extreme, missed = "largest" if self.problem.sign > 0 else "smallest", self.missed
        if missed:
            count = f"{missed} of {len(self.V0) * len(self.constraints)} constraints"
            miss = "misses its bound" if missed == 1 else "miss their bounds"
            return f"{answer}, but {count} {miss} on new {self.samples}"
        if self.problem.paths < FEWEST:
            return f"{answer}, of {self._few} only: raise `paths`"
        if not self.constraints:
            return f"{answer} is the {extreme}, without constraints"
        return f"{answer} is the {extreme} for which every constraint holds"

    def parameter_rows(self) -> list[dict[str, Any]]:
        """Free parameters, fixed ones, and those of the layer that follow: name, value, error, origin and meaning."""
        space, fixed = self.problem.space, self.problem.fixed
        parameters = space.kind.coordinates.declared | space.kind.coordinates.sampled
        values, errors = (self.parameters[column].tolist() for column in ("value", "error"))
        origins = ["tuned, at an end" if at_end else "tuned" for at_end in self.parameters["at_end"]]
        listed = list(zip(space.names, values, errors, origins, strict=True))
        listed += [(name, math.nan if name in space.profiled else float(x), None, "fixed") for name, x in fixed.items()]
        layer_values = {} if space.over_depth else self.layer.parameters()
        listed += [
            (name, float(x), None, "follows") for name, x in layer_values.items() if name not in {*space.names, *fixed}
        ]
        rows: list[dict[str, Any]] = [
            dict(zip(("name", "value", "error", "origin"), row, strict=True)) for row in listed
        ]
        # A name of several parts has the meaning of the first.
        first_members = {coordinate.name: coordinate.members[0] for coordinate in space.free}
        for row in rows:
            name = str(row["name"].split("[")[0])
            parameter = parameters[first_members.get(name, name)]
            row["meaning"] = f"{parameter.symbol}, {parameter.meaning}"
        return rows

    def constraint_rows(self) -> list[dict[str, Any]]:
        """The constraints, for each prompt: name, value and error on new paths, and whether they hold."""
        rows = []
        for name, row in self.criteria.iloc[: len(self.V0) * len(self.constraints)].iterrows():
            slack, error = float(row["slack"]), float(row["error"])
            state = "fail" if slack < -NOISE * error else "pass"
            holds = "holds" if slack > NOISE * error else "holds, at its bound"
            words = "misses its bound" if state == "fail" else holds
            rows.append({"name": name, "value": row["value"], "error": error, "state": state, "words": words})
        return rows

    def __str__(self) -> str:
        rows = [f"width {self.width}, depth {self.depth}, {self.V0.shape[-1]} tokens"]
        rows += [self.parameters.to_string(float_format=_short), "", self.criteria.to_string(float_format=_short)]
        if len(self.sensitivity.columns):
            rows += ["", "change of each parameter per change of a bound:"]
            rows += [self.sensitivity.to_string(float_format=_short)]
        return "\n".join([*rows, *(f"note: {note}" for note in self.notes)])

    def _repr_html_(self) -> str:
        return render("tuned_cell.html.jinja", tuned=self)

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
        sizes |= attributes_of_layer(space.kind)
        if not space.over_depth:
            sizes["layer"] = {name: float(value) for name, value in self.layer.parameters().items()}
        return sizes | tables | {"criteria": criteria, "found": self.found, "notes": self.notes}

    def write(self, path: str | Path) -> None:
        """Write `to_dict` as JSON."""
        write_text(path, json.dumps(self.to_dict(), indent=2, ensure_ascii=False) + "\n")


def _short(value: float) -> str:
    return f"{value:.4g}"
