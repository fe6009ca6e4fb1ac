"""The commands of a fit: `calibrate`, `fit`, `check` and `report`."""

import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import sdeinfer as si
from sdeinfer._files import staged_file, staged_folder
from sdeinfer.cli._app import Command, named_phase, say
from sdeinfer.cli._groups import EnsembleOptions, Fit, Kind, Seed, Start, Truth, Workers, at_work, flags_of, with_groups

if TYPE_CHECKING:
    import xarray as xr

    from sdeinfer.diagnostics import Check, Verdict

Posterior = Annotated[Path, typer.Argument(help="NetCDF file that `fit` wrote")]

# The default networks identify γ to 1 %, τ0 and c₊ − c₋ to 10 % (by the Fisher information of the full path), and stay
# in the limit's range. There are many shallow networks rather than a few deep ones, because norms spread with depth
# and the largest leave the limit's range first; larger tokens would inform τ0 more but leave the range too.
# c₊ + c₋ = 0 keeps the He constant of the shaped ReLU at its limit, 1; at this width a sum of −2 would enlarge the
# drift by 12 %.


class Calibrate(Command):
    """The command `calibrate`, which refuses contradictory flags before it loads JAX."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        of_networks = [flag.name for group in (EnsembleOptions, Start, Truth) for flag in flags_of(group)]
        for name in of_networks if ctx.params["data"] is not None else ():
            source = ctx.get_parameter_source(name)
            if source is not None and source.name == "COMMANDLINE":
                flag = "--" + name.replace("_", "-")
                raise si.InputError(
                    f"{flag}: describes networks to sample, which --data replaces; omit one of the two flags"
                )
        return super().invoke(ctx)


@with_groups
def calibrate_command(
    *,
    data: Annotated[Path | None, typer.Option(help="NetCDF file of observed covariances")] = None,
    kind: Kind,
    ensemble: EnsembleOptions,
    start: Start,
    truth: Truth,
    fit: Fit,
    seed: Seed = 0,
    out: Annotated[Path, typer.Option(help="folder for the results")] = Path("calibration"),
) -> None:
    """Observe, fit, check and report in one: the place to start. Without --data, networks are sampled."""
    from sdeinfer.infer._assume import require_identifiable

    started = time.perf_counter()
    with staged_folder(out) as folder:
        if data is None:
            architecture, V0 = start.of(kind)
            require_identifiable(architecture, len(V0))
            observed = ensemble.drawn(truth.layer(architecture), V0, seed)
        else:
            observed = si.read(data)
            architecture = kind.of(observed.attrs, observed.sizes["token_a"])
        si.write(observed, folder / "data.nc")
        origin = "sampled, with the parameters in the column `truth`" if data is None else f"of {data}"
        say(f"{observed.sizes['network']} networks, {observed.sizes['token_a']} tokens, {origin}")
        post = fit.posterior(observed, architecture, seed, started)
        si.write(post, folder / "posterior.nc")
        verdicts = write_results(post, folder)
    print_results(post, verdicts)
    say(f"written to {out}: report.html, summary.json, figures/, data.nc, posterior.nc")


@with_groups
def fit_command(
    data: Annotated[Path, typer.Argument(help="NetCDF file of observed covariances, or Zarr")],
    *,
    kind: Kind,
    fit: Fit,
    workers: Workers,
    leave_out_damaged: Annotated[
        bool,
        typer.Option(
            "--leave-out-damaged", help="of data in chunks, leave out networks that are damaged, and count them"
        ),
    ] = False,
    seed: Seed = 0,
    out: Annotated[Path, typer.Option(help="NetCDF file to write")] = Path("posterior.nc"),
) -> None:
    """Fit observed covariances: γ, τ0 and c± with error bars. Layers that were not observed are latent."""
    from sdeinfer.observation._store import open_in_chunks

    with staged_file(out) as file, at_work(workers) as by_workers:
        observed = open_in_chunks(data) if by_workers else si.read(data)
        started = time.perf_counter()
        architecture = kind.of(observed.attrs, observed.sizes["token_a"])
        post = fit.posterior(observed, architecture, seed, started, leave_out_damaged=leave_out_damaged)
        si.write(post, file)
    say(f"written to {out}: {fit.chains} chains of {fit.draws} draws")


def check_command(posterior: Posterior) -> None:
    """Check a fit and print the verdicts."""
    post = _read(posterior)
    named_phase("checking the fit")
    print_results(post, si.check(post))


def report_command(
    posterior: Posterior,
    *,
    out: Annotated[Path, typer.Option(help="folder for the results")] = Path("report"),
) -> None:
    """Write the report of a fit: page, figures and summary."""
    post = _read(posterior)
    with staged_folder(out) as folder:
        write_results(post, folder)
    say(f"written to {out}: report.html, summary.json, figures/")


def _read(posterior: Path) -> "xr.DataTree":
    named_phase("reading the posterior")
    return si.observation.read_posterior(posterior)


def write_results(post: "xr.DataTree", folder: Path) -> "Check":
    """Check a fit, and write its figures, summary and report."""
    named_phase("checking the fit")
    verdicts = si.check(post)
    named_phase("drawing the figures")
    drawn = si.report.figures(post)
    si.report.write_figures(drawn, folder / "figures")
    named_phase("writing the report")
    si.report.write_summary(post, verdicts, folder / "summary.json")
    si.report.write_report(post, verdicts, drawn, folder / "report.html")
    return verdicts


def print_results(post: "xr.DataTree", verdicts: "Check") -> None:
    """Print the table of parameters and the verdicts."""
    from sdeinfer.diagnostics._summary import fixed_of

    say(si.summarise(post).to_string(float_format=lambda x: f"{x:.4g}", na_rep="–"))
    for name, value in fixed_of(post).items():
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
        value, threshold = f"{test.value:.4g}", f"{test.threshold:.4g}"
        signs = {"=": value == threshold, "<": test.value < test.threshold, ">": test.value > test.threshold, "≠": True}
        sign = next(sign for sign, true in signs.items() if true)
        say(f"  {mark}  {test.name} {value} {sign} {threshold}{'' if test.passed else f': {test.advice}'}")
