"""The commands that fit: `calibrate` and `fit`."""

import time
from pathlib import Path
from typing import Annotated, Any

import typer

import sdeinfer as si
from sdeinfer._files import staged_file, staged_folder
from sdeinfer.cli._app import Command, say
from sdeinfer.cli._groups import Ensemble, Fit, Kind, Seed, Start, Truth, flags_of, with_groups
from sdeinfer.cli._results import print_results, write_results
from sdeinfer.cli._workers import Workers, at_work

# The default networks identify γ to 1 %, τ0 and c₊ − c₋ to 10 %, and stay in the limit's range; tests/test_defaults.py
# computes both. There are many shallow networks rather than a few deep ones, because norms spread with depth and the
# largest leave the limit's range first; larger tokens would inform τ0 more but leave the range too. c₊ + c₋ = 0 keeps
# the He constant of the shaped ReLU at its limit, 1; at this width a sum of −2 would enlarge the drift by 12 %.


class Calibrate(Command):
    """The command `calibrate`, which refuses contradictory flags before it loads JAX."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        of_networks = [flag.name for group in (Ensemble, Start, Truth) for flag in flags_of(group)]
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
    ensemble: Ensemble,
    start: Start,
    truth: Truth,
    fit: Fit,
    seed: Seed = 0,
    out: Annotated[Path, typer.Option(help="folder for the results")] = Path("calibration"),
) -> None:
    """Observe, fit, check and report in one: the place to start. Without --data, networks are sampled."""
    started = time.perf_counter()
    with staged_folder(out) as folder:
        if data is None:
            architecture, V0 = start.of(kind)
            si.infer.require_identifiable(architecture, len(V0))
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
    with staged_file(out) as file, at_work(workers) as by_workers:
        observed = si.observation.open_in_chunks(data) if by_workers else si.read(data)
        started = time.perf_counter()
        architecture = kind.of(observed.attrs, observed.sizes["token_a"])
        post = fit.posterior(observed, architecture, seed, started, leave_out_damaged=leave_out_damaged)
        si.write(post, file)
    say(f"written to {out}: {fit.chains} chains of {fit.draws} draws")
