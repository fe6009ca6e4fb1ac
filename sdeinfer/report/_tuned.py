"""A tuned layer as one HTML page."""

import importlib.metadata
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxtyping import PRNGKeyArray
from matplotlib.figure import Figure

from sdeinfer._files import staged_file
from sdeinfer.criteria import Constraint, Probability
from sdeinfer.plots import plot_tuned
from sdeinfer.report._render import figure_of, inline, render
from sdeinfer.tuning import Tuned

PACKAGES = ("sdeinfer", "jax", "diffrax", "scipy")

NOISE = 2.0
"""Monte Carlo errors within which a value cannot be told from its bound."""

RELAXED = 0.01
"""Relative change of a bound, in the table of what follows from it; absolute for probabilities."""

CAPTION = (
    "Statistics of the constraints over networks, on new paths of the SDE at the tuned parameters. Dashed: the bound, "
    "or the value that a probability is about; red: networks that should be few."
)


def tuned_figures(tuned: Tuned, *, paths: int = 512, key: PRNGKeyArray) -> dict[str, Figure]:
    """Make the figure of a tuned layer, see `plot_tuned`; there is none without constraints."""
    return {"tuned": figure_of(plot_tuned(tuned, paths=paths, key=key))} if tuned.constraints else {}


def write_tuned(tuned: Tuned, drawn: Mapping[str, Figure], path: str | Path, *, command: str = "") -> None:
    """Write the page of a tuned layer.

    Arguments:
        tuned: the result of `tune`.
        drawn: figures by name, as of `tuned_figures`.
        path: the file to write.
        command: the command that reproduces it, if there is one.
    """
    rows = _constraints(tuned)
    missed = sum(row["state"] == "fail" for row in rows)
    page = render(
        "tuned.html.jinja",
        title=f"{tuned.problem.space.kind.name}, width {tuned.width}, depth {tuned.depth}",
        verdict=_verdict(tuned, missed),
        passed=not missed,
        parameters=_parameters(tuned),
        constraints=rows,
        notes=tuned.notes,
        relaxed=_relaxed(tuned),
        free=list(tuned.parameters.index),
        goal=None if isinstance(tuned.objective, str) else str(tuned.objective),
        figures=[(name, CAPTION, inline(figure)) for name, figure in drawn.items()],
        provenance=_provenance(tuned),
        time=tuned.depth / tuned.width,
        command=command,
    )
    with staged_file(path) as temporary:
        temporary.write_text(page, encoding="utf-8")


def _verdict(tuned: Tuned, missed: int) -> str:
    """The answer in one sentence."""
    if isinstance(tuned.objective, str):
        own = tuned.parameters[[str(name).split("[")[0] == tuned.objective for name in tuned.parameters.index]]
        value, error = own["value"].mean(), own["error"].mean()
    else:
        # The worst prompt decides.
        last = tuned.criteria.iloc[_prompts(tuned) * len(tuned.constraints) :]
        worst = last["value"].to_numpy(float).argsort()[0 if tuned.problem.sign > 0 else -1]
        value, error = last["value"].iloc[worst], last["error"].iloc[worst]
    found = f"{tuned.objective} = {value:.4g} ± {error:.2g}"
    most = "largest" if tuned.problem.sign > 0 else "smallest"
    if missed:
        count = f"{missed} of {len(tuned.constraints) * _prompts(tuned)} constraints"
        return f"{found}, but {count} {'misses its bound' if missed == 1 else 'miss their bounds'} on new paths"
    if not tuned.constraints:
        return f"{found} is the {most}, without constraints"
    return f"{found} is the {most} for which every constraint holds"


def _prompts(tuned: Tuned) -> int:
    return 1 if tuned.problem.over == "mean" else len(tuned.V0)


def _parameters(tuned: Tuned) -> list[dict[str, Any]]:
    """The free parameters, the fixed ones, and those of the layer that follow from them."""
    space, fixed = tuned.problem.space, tuned.problem.fixed
    known = space.kind.coordinates.declared | space.kind.coordinates.sampled
    values, errors = (tuned.parameters[column].to_numpy(float) for column in ("value", "error"))
    origins = ["tuned, at an end" if at_end else "tuned" for at_end in tuned.parameters["at_end"]]
    rows: list[dict[str, Any]] = [
        {"name": name, "value": value, "error": error, "origin": origin}
        for name, value, error, origin in zip(space.names, values, errors, origins, strict=True)
    ]
    own = {} if space.over_depth else {name: float(x) for name, x in tuned.layer.parameters().items()}
    for name, value in fixed.items():
        origin = "median of the posterior" if name in space.drawn else "fixed"
        number = own.get(name, math.nan) if name in space.drawn or name in space.profiled else float(value)
        rows.append({"name": name, "value": number, "error": None, "origin": origin})
    listed = {row["name"] for row in rows}
    rows += [
        {"name": name, "value": value, "error": None, "origin": "follows"}
        for name, value in own.items()
        if name not in listed
    ]
    for row in rows:
        parameter = known.get(row["name"].split("[")[0])
        row["meaning"] = f"{parameter.symbol}, {parameter.meaning}" if parameter else "d, number of layers"
    return rows


def _constraints(tuned: Tuned) -> list[dict[str, Any]]:
    """The constraints, of each prompt, with their values on new paths and whether they hold."""
    count = _prompts(tuned) * len(tuned.constraints)
    rows = []
    for name, row in tuned.criteria.iloc[:count].iterrows():
        slack, error = float(row["slack"]), float(row["error"])
        state = "fail" if slack < -NOISE * error else "pass"
        words = "misses its bound" if state == "fail" else "holds" if slack > NOISE * error else "holds, at its bound"
        rows.append({"name": name, "value": row["value"], "error": error, "state": state, "words": words})
    return rows


def _relaxed(tuned: Tuned) -> list[dict[str, Any]]:
    """The consequences of a small step of each active bound."""
    count, prompts = _prompts(tuned) * len(tuned.constraints), _prompts(tuned)
    rows = []
    # One column per active row, in their order.
    columns = iter(tuned.sensitivity.to_numpy(float).T)
    for number, (name, row) in enumerate(tuned.criteria.iloc[:count].iterrows()):
        if not row["active"]:
            continue
        constraint = tuned.constraints[number // prompts]
        step = _step(constraint)
        rows.append(
            {
                "name": name,
                "bound": constraint.bound + step,
                "objective": float(row["multiplier"]) * step,
                "parameters": [float(slope) * step for slope in next(columns)],
                "multiplier": float(row["multiplier"]),
            }
        )
    return rows


def _step(constraint: Constraint) -> float:
    """A small step of a bound, to the side that demands less."""
    bound = constraint.bound
    if isinstance(constraint.criterion, Probability):
        size = min(RELAXED, bound / 5, (1 - bound) / 5)
    else:
        size = RELAXED * (abs(bound) or 1.0)
    return -constraint.sign * size


def _sizes(attributes: Mapping[str, Any]) -> list[str]:
    """The sizes of an architecture in words."""
    return [
        f"{name.replace('_', ' ')} {value if isinstance(value, str) else format(value, 'g')}"
        for name, value in attributes.items()
    ]


def _provenance(tuned: Tuned) -> dict[str, str]:
    found, attributes = tuned.found, tuned.problem.space.kind.attributes()
    return {
        "architecture": ", ".join([attributes.pop("architecture"), *_sizes(attributes)]),
        "tokens": str(tuned.V0.shape[-1]) + (f", {len(tuned.V0)} prompts" if len(tuned.V0) > 1 else ""),
        "search": f"{found['paths']} paths, step {found['step']:g}, {found['evaluations']} evaluations, "
        f"{found['iterations']} iterations, {found['seconds']:.0f} s",
        "search ended": found["message"],
        "values": f"{found['paths']} new paths, step {found['step'] / 2:g}",
        "start": ", ".join(f"{name} = {value:.4g}" for name, value in found["start"].items()),
        "exploded paths": f"{found['exploded']:.2%}",
        "spread of logits": f"{found['logit_spread']:.2g}",
        "page by": ", ".join(f"{name} {importlib.metadata.version(name)}" for name in PACKAGES),
    }
