"""The commands that design data and tune networks: `design` and `tune`."""

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

import sdeinfer as si
from sdeinfer._files import staged_folder
from sdeinfer.cli import _groups as flags
from sdeinfer.cli._app import phase, say
from sdeinfer.cli._groups import bounds_by, fixed_by, key_of, with_groups
from sdeinfer.cli._results import table_of

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.figure import Figure

FIGURE_PATHS = 2048
"""Largest number of paths in the figure of a tuned layer."""


@with_groups
def design_command(
    *,
    kind: flags.Kind,
    parameter: Annotated[str, typer.Option(help="parameter to identify: gamma, tau0 or c_gap")] = "tau0",
    relative_sd: Annotated[float, typer.Option(help="target: its relative sd; for γ, the sd of logit γ")] = 0.05,
    width: flags.Width = 256,
    depth: flags.Depth = 16,
    tokens: flags.Tokens = 4,
    truth: flags.Truth,
    seed: flags.Seed = 0,
) -> None:
    """Find tokens and a number of networks to identify a parameter. Its flags are a guess at the truth."""
    layer = truth.layer(kind.of({"architecture": "transformer"}, tokens))
    goal = {"parameter": parameter, "relative_sd": relative_sd}
    found = si.design(layer, tokens=tokens, width=width, depth=depth, **goal, progress=True, key=key_of(seed, 0))
    say(f"{found.networks} networks of width {width} and depth {depth}, all layers observed, from tokens with")
    say(f"norms ‖x‖/√n   {_row(found.norms)}\ncorrelations")
    for row in found.correlations:
        say(f"               {_row(row)}")
    say(f"expected standard deviations, relative except for logit γ:\n{table_of(found.expected.to_frame('sd'))}")


SubjectTo = Annotated[
    list[str] | None,
    typer.Option(
        help="constraint, as in 'P(norm factor < 2) >= 0.95', of squared norms, or "
        "'q95(largest correlation) <= 0.9'; may be repeated"
    ),
]
Bounds = Annotated[
    list[str] | None,
    typer.Option(help="range of a free parameter, as in gamma=0.1:0.9; depth=8:64 tunes the depth; may be repeated"),
]


@with_groups
def tune_command(
    *,
    kind: flags.Kind,
    width: flags.Width = 256,
    depth: flags.Depth = 16,
    start: flags.Start,
    maximise: Annotated[
        str | None, typer.Option(help="parameter or criterion, as in gamma or 'E[effective rank]'")
    ] = None,
    minimise: Annotated[str | None, typer.Option(help="the same, to be minimised; one of the two is needed")] = None,
    subject_to: SubjectTo = None,
    fix: Annotated[
        list[str] | None, typer.Option(help="fix a parameter that is not tuned, as in tau0=1; may be repeated")
    ] = None,
    bound: Bounds = None,
    law: Annotated[
        Literal["finite-width", "limit"], typer.Option(help="law of the networks: at their width, or in the limit")
    ] = "finite-width",
    paths: Annotated[int, typer.Option(help="number of paths, and of networks", min=1)] = 4096,
    step: Annotated[float | None, typer.Option(help="longest step in depth-time; as in si.tune if not given")] = None,
    seed: flags.Seed = 0,
    out: Annotated[Path, typer.Option(help="folder for the results")] = Path("tuned"),
) -> None:
    """Choose γ, τ0, c± or the depth for stated properties. What --fix does not name is free, within --bound."""
    from sdeinfer.tuning import parse_constraint, parse_criterion

    most, least = (None if text is None else parse_criterion(text) for text in (maximise, minimise))
    constraints, bounds = [parse_constraint(text) for text in subject_to or []], bounds_by(bound)
    architecture, V0 = start.of(kind)
    depths = _whole(bounds.pop("depth")) if "depth" in bounds else depth
    with staged_folder(out) as folder:
        tuned = si.tune(
            architecture,
            V0,
            width=width,
            depth=depths,
            maximise=most,
            minimise=least,
            subject_to=constraints,
            fixed=fixed_by(fix),
            bounds=bounds,
            law=law,
            paths=paths,
            step=step,
            key=key_of(seed, 0),
        )
        drawn = _write_tuned(tuned, folder, paths=min(paths, FIGURE_PATHS), seed=seed)
    say(str(tuned))
    say("error: of Monte Carlo; at_end: at an end of its range; active: this goal limits the answer")
    say(f"written to {out}: report.html, tuned.json{', figures/' if drawn else ''}")


def _write_tuned(tuned: "si.Tuned", folder: Path, *, paths: int, seed: int) -> dict[str, "Figure"]:
    """Write the result, its figures, which are returned, and its page."""
    phase("drawing the figure")
    drawn = si.report.tuned_figures(tuned, paths=paths, key=key_of(seed, 1))
    phase("writing the report")
    tuned.write(folder / "tuned.json")
    si.report.write_figures(drawn, folder / "figures")
    command = shlex.join(["uv", "run", "sdeinfer", *sys.argv[1:]])
    si.report.write_tuned(tuned, drawn, folder / "report.html", command=command)
    return drawn


def _whole(ends: tuple[float, float]) -> tuple[int, int]:
    """Ends of a range of depths."""
    if not all(end.is_integer() for end in ends):
        raise si.InputError(f"--bound: depth: whole numbers are needed, got {ends[0]:g}:{ends[1]:g}")
    return int(ends[0]), int(ends[1])


def _row(values: "np.ndarray") -> str:
    return "  ".join(f"{value:6.3f}" for value in values)
