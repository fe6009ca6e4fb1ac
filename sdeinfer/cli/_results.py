"""The commands that check a fit and write its report: `check` and `report`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import sdeinfer as si
from sdeinfer._files import staged_folder
from sdeinfer.cli._app import phase, say
from sdeinfer.cli._steps import print_results, write_results

if TYPE_CHECKING:
    import xarray as xr


def check_command(posterior: Annotated[Path, typer.Argument(help="NetCDF file that `fit` wrote")]) -> None:
    """Check a fit and print the verdicts."""
    post = _read(posterior)
    phase("checking the fit")
    print_results(post, si.check(post))


def report_command(
    posterior: Annotated[Path, typer.Argument(help="NetCDF file that `fit` wrote")],
    *,
    out: Annotated[Path, typer.Option(help="folder for the results")] = Path("calibration"),
) -> None:
    """Write the report of a fit: page, figures and summary."""
    post = _read(posterior)
    with staged_folder(out) as folder:
        write_results(post, folder)
    say(f"written to {out}: report.html, summary.json, figures/")


def _read(posterior: Path) -> "xr.DataTree":
    from sdeinfer.observation import read_posterior

    phase("reading the posterior")
    return read_posterior(posterior)
