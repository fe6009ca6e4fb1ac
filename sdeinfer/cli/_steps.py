"""Steps that several commands share: settings, a fit, and its results in files and in the terminal."""

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import sdeinfer as si
from sdeinfer.cli._app import phase, say
from sdeinfer.cli._flags import key_of, model_of
from sdeinfer.infer import LIMIT_POSTERIOR, Law

if TYPE_CHECKING:
    import pandas as pd
    import xarray as xr

    from sdeinfer.diagnostics import Check


def settings_of(law: Law, largest_logit: float, chains: int, draws: int, warmup: int, seed: int) -> dict[str, Any]:
    """The arguments of `fit` from the flags."""
    sizes = {"chains": chains, "draws": draws, "warmup": warmup}
    return {"law": law, "largest_logit": largest_logit, **sizes, "progress": True, "key": key_of(seed, 1)}


def fit_with_flags(data: "xr.Dataset", kind: "si.Architecture", settings: dict[str, Any], seed: int) -> "xr.DataTree":
    """Fit data with the model that suits them, and record the command in the result."""
    post = si.fit(model_of(data), data, architecture=kind, **settings)
    post.attrs |= {"seed": seed, "command": shlex.join(["sdeinfer", *sys.argv[1:]])}
    return post


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
    if LIMIT_POSTERIOR in post.children:
        say(f"by the limit's law:\n{table_of(si.summarise(post, group=LIMIT_POSTERIOR))}")
    if post.attrs.get("left_out"):
        say(f"left out: {post.attrs['left_out']:.1%} of transitions, which start outside the range of the law")
    for verdict in verdicts.verdicts:
        advice = "" if verdict.passed else f": {verdict.advice}"
        mark = "passed" if verdict.passed else "FAILED"
        say(f"  {mark}  {verdict.name} {verdict.value:.4g} (threshold {verdict.threshold:g}){advice}")
    for note in verdicts.notes:
        say(f"  note    {note}")
    say(f"verdict: {verdicts.verdict}")


def table_of(rows: "pd.DataFrame") -> str:
    """A table as text."""
    return rows.to_string(float_format=lambda x: f"{x:.4g}", na_rep="–")
