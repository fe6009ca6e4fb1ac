"""A tuned layer as one HTML page."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxtyping import PRNGKeyArray
from matplotlib.figure import Figure

from sdeinfer._files import write_text
from sdeinfer._html import render
from sdeinfer.criteria import Constraint, Probability
from sdeinfer.report._render import figure_of, inline, versions
from sdeinfer.tuning import Tuned

RELAXED = 0.01
"""Relative change of a bound, in the table of what follows from it; absolute for probabilities."""

CAPTION = (
    "Statistics of the constraints over new networks, or paths of the SDE, at the tuned parameters. Dashed: the bound, "
    "or the value that a probability is about; red and hatched: networks that should be few."
)


def tuned_figures(tuned: Tuned, *, paths: int = 512, key: PRNGKeyArray) -> dict[str, Figure]:
    """Make the figure of a tuned layer, see `Tuned.plot`; there is none without constraints."""
    return {"tuned": figure_of(tuned.plot(paths=paths, key=key))} if tuned.constraints else {}


def write_tuned(tuned: Tuned, drawn: Mapping[str, Figure], path: str | Path, *, command: str = "") -> None:
    """Write the page of a tuned layer.

    Arguments:
        tuned: the result of `tune`.
        drawn: figures by name, as of `tuned_figures`.
        path: the file to write.
        command: the command that reproduces it, if there is one.
    """
    page = render(
        "tuned.html.jinja",
        title=f"{tuned.problem.space.kind}, width {tuned.width}, depth {tuned.depth}",
        verdict=tuned.verdict,
        passed=not tuned.missed,
        parameters=tuned.parameter_rows(),
        constraints=tuned.constraint_rows(),
        notes=tuned.notes,
        relaxed=_relaxed(tuned),
        free=list(tuned.parameters.index),
        goal=None if isinstance(tuned.objective, str) else str(tuned.objective),
        figures=[(name, CAPTION, inline(figure)) for name, figure in drawn.items()],
        provenance=_provenance(tuned),
        time=tuned.depth / tuned.width,
        command=command,
    )
    write_text(path, page)


def _relaxed(tuned: Tuned) -> list[dict[str, Any]]:
    """The consequences of a small step of each active bound."""
    prompts = tuned.rows_per_constraint
    rows = []
    # One column per active row, in their order.
    columns = iter(tuned.sensitivity.to_numpy(float).T)
    for number, (name, row) in enumerate(tuned.criteria.iloc[: prompts * len(tuned.constraints)].iterrows()):
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


def _provenance(tuned: Tuned) -> dict[str, str]:
    found = tuned.found
    return {
        "architecture": str(tuned.problem.space.kind),
        "tokens": str(tuned.V0.shape[-1]) + (f", {len(tuned.V0)} prompts" if len(tuned.V0) > 1 else ""),
        "search": f"{found['paths']} paths, step {found['step']:g}, {found['evaluations']} evaluations, "
        f"{found['iterations']} iterations, {found['seconds']:.0f} s",
        "search ended": found["message"],
        "values": f"{found['paths']} new {tuned.samples}"
        + (f", step {found['step'] / 2:g}" if tuned.law == "limit" else ""),
        "start": ", ".join(f"{name} = {value:.4g}" for name, value in found["start"].items()),
        f"exploded {tuned.samples}": f"{found['exploded']:.2%}",
        "spread of logits": f"{found['logit_spread']:.2g}",
        "page by": versions("sdeinfer", "jax", "diffrax", "scipy"),
    }
