"""The results of a fit, in files and in the terminal, and the commands for them: `check` and `report`."""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import sdeinfer as si
from sdeinfer._files import staged_folder
from sdeinfer.cli._app import phase, say

if TYPE_CHECKING:
    import pandas as pd
    import xarray as xr

    from sdeinfer.diagnostics import Check, Verdict

Posterior = Annotated[Path, typer.Argument(help="NetCDF file that `fit` wrote")]


def check_command(posterior: Posterior) -> None:
    """Check a fit and print the verdicts."""
    post = _read(posterior)
    phase("checking the fit")
    print_results(post, si.check(post))


def report_command(
    posterior: Posterior,
    *,
    out: Annotated[Path, typer.Option(help="folder for the results")] = Path("calibration"),
) -> None:
    """Write the report of a fit: page, figures and summary."""
    post = _read(posterior)
    with staged_folder(out) as folder:
        write_results(post, folder)
    say(f"written to {out}: report.html, summary.json, figures/")


def _read(posterior: Path) -> "xr.DataTree":
    phase("reading the posterior")
    return si.observation.read_posterior(posterior)


def write_results(post: "xr.DataTree", folder: Path) -> "Check":
    """Check a fit, and write its figures, summary and report."""
    phase("checking the fit")
    verdicts = si.check(post)
    phase("drawing the figures")
    drawn = si.report.figures(post)
    si.report.write_figures(drawn, folder / "figures")
    phase("writing the report")
    si.report.write_summary(post, verdicts, folder / "summary.json")
    si.report.write_report(post, verdicts, drawn, folder / "report.html")
    return verdicts


def print_results(post: "xr.DataTree", verdicts: "Check") -> None:
    """Print the table of parameters and the verdicts."""
    say(table_of(si.summarise(post)))
    for name, value in si.diagnostics.fixed_of(post).items():
        say(f"fixed: {name} = {value:g}")
    if post.attrs.get("left_out"):
        say(f"left out: {post.attrs['left_out']:.1%} of transitions, which start outside the range of the law")
    print_tests(verdicts.verdicts)
    for note in verdicts.notes:
        say(f"  note    {note}")
    say(f"verdict: {verdicts.verdict}")


def print_tests(tests: Iterable["Verdict"]) -> None:
    """Print what each test found, beside its threshold."""
    for test in tests:
        mark = {"pass": "passed", "unsure": "unsure", "fail": "FAILED"}[test.state]
        found, threshold = f"{test.value:.4g}", f"{test.threshold:.4g}"
        signs = {"=": found == threshold, "<": test.value < test.threshold, ">": test.value > test.threshold, "≠": True}
        sign = next(sign for sign, true in signs.items() if true)
        say(f"  {mark}  {test.name} {found} {sign} {threshold}{'' if test.passed else f': {test.advice}'}")


def table_of(rows: "pd.DataFrame") -> str:
    """A table as text."""
    return rows.to_string(float_format=lambda x: f"{x:.4g}", na_rep="–")
