"""The command that tunes networks: `tune`."""

import shlex
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

import sdeinfer as si
from sdeinfer._files import staged_folder
from sdeinfer.cli import _groups as flags
from sdeinfer.cli._app import named_phase, say
from sdeinfer.cli._groups import bounds_by, fixed_by, key_of, with_groups

FIGURE_PATHS = 2048
"""Largest number of paths in the figure of a tuned layer."""


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
    subject_to: Annotated[
        list[str] | None,
        typer.Option(
            help="constraint, as in 'P(norm factor < 2) >= 0.95', of squared norms, or "
            "'q95(largest correlation) <= 0.9'; may be repeated"
        ),
    ] = None,
    fix: Annotated[
        list[str] | None, typer.Option(help="fix a parameter that is not tuned, as in tau0=1; may be repeated")
    ] = None,
    bound: Annotated[
        list[str] | None, typer.Option(help="range of a free parameter, as in gamma=0.1:0.9; may be repeated")
    ] = None,
    law: Annotated[
        Literal["finite-width", "limit"], typer.Option(help="law of the networks: at their width, or in the limit")
    ] = "finite-width",
    paths: Annotated[int, typer.Option(help="number of paths, and of networks", min=1)] = 4096,
    step: Annotated[float | None, typer.Option(help="longest step in depth-time; as in si.tune if not given")] = None,
    seed: flags.Seed = 0,
    out: Annotated[Path, typer.Option(help="folder for the results")] = Path("tuned"),
) -> None:
    """Choose γ, τ0 or c± for stated properties. What --fix does not name is free, within --bound."""
    from sdeinfer.report._tuned import tuned_figures
    from sdeinfer.tuning import parse_constraint, parse_criterion

    most, least = (None if text is None else parse_criterion(text) for text in (maximise, minimise))
    constraints = [parse_constraint(text) for text in subject_to or []]
    architecture, V0 = start.of(kind)
    with staged_folder(out) as folder:
        tuned = si.tune(
            architecture,
            V0,
            width=width,
            depth=depth,
            maximise=most,
            minimise=least,
            subject_to=constraints,
            fixed=fixed_by(fix),
            bounds=bounds_by(bound),
            law=law,
            paths=paths,
            step=step,
            key=key_of(seed, 0),
        )
        named_phase("drawing the figure")
        drawn = tuned_figures(tuned, paths=min(paths, FIGURE_PATHS), key=key_of(seed, 1))
        named_phase("writing the report")
        tuned.write(folder / "tuned.json")
        si.report.write_figures(drawn, folder / "figures")
        command = shlex.join(["uv", "run", "sdeinfer", *sys.argv[1:]])
        si.report.write_tuned(tuned, drawn, folder / "report.html", command=command)
    say(str(tuned))
    say("error: of Monte Carlo; at_end: at an end of its range; active: this goal limits the answer")
    say(f"written to {out}: report.html, tuned.json{', figures/' if drawn else ''}")
