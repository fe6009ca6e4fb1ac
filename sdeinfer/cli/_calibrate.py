"""The commands that fit: `calibrate` and `fit`; and `reduce` and `merge`, a fit in parts."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import sdeinfer as si
from sdeinfer._files import staged_file, staged_folder
from sdeinfer.cli import _options as options
from sdeinfer.cli._app import Command, say
from sdeinfer.cli._chunks import observed_in, part_of
from sdeinfer.cli._flags import fixed_by, kind_of, model_of, sampled
from sdeinfer.cli._steps import checkpoint_of, fit_with_flags, print_results, settings_of, write_results
from sdeinfer.infer import LARGEST_LOGIT

if TYPE_CHECKING:
    import xarray as xr

SAMPLED = (
    *("width", "depth", "tokens", "networks", "norm", "correlation", "observe_every", "outputs"),
    *("gamma", "tau0", "c_plus", "c_minus"),
)
"""Flags that describe networks to sample."""

# The default networks identify γ to 1 %, τ0 and c₊ − c₋ to 10 %, and stay in the limit's range; tests/test_defaults.py
# computes both. There are many shallow networks rather than a few deep ones, because norms spread with depth and the
# largest leave the limit's range first; larger tokens would inform τ0 more but leave the range too. c₊ + c₋ = 0 keeps
# the He constant of the shaped ReLU at its limit, 1; at this width a sum of −2 would enlarge the drift by 12 %.


class Calibrate(Command):
    """The command `calibrate`, which refuses contradictory flags before it loads JAX."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        for name in SAMPLED if ctx.params["data"] is not None else ():
            source = ctx.get_parameter_source(name)
            if source is not None and source.name == "COMMANDLINE":
                flag = "--" + name.replace("_", "-")
                raise si.InputError(
                    f"{flag}: describes networks to sample, which --data replaces; omit one of the two flags"
                )
        return super().invoke(ctx)


def calibrate_command(
    *,
    data: Annotated[Path | None, typer.Option(help="NetCDF file of observed covariances")] = None,
    architecture: Annotated[
        options.Kind | None, typer.Option(help="default: from the data, or transformer for sampled networks")
    ] = None,
    width: options.Width = 256,
    depth: options.Depth = 16,
    tokens: options.Tokens = 4,
    networks: options.Networks = 128,
    heads: options.Heads = None,
    output_projection: options.Projection = None,
    expansion: options.Expansion = None,
    causal: options.Causal = None,
    prompts: options.Prompts = None,
    gamma: options.Gamma = 0.6,
    tau0: options.Tau0 = 1.0,
    c_plus: options.CPlus = 2.0,
    c_minus: options.CMinus = -2.0,
    norm: options.Norm = 1.6,
    correlation: options.Correlation = 0.0,
    observe_every: options.ObserveEvery = "1",
    outputs: options.Outputs = 64,
    law: options.Law = "finite-width",
    largest_logit: options.LargestLogit = LARGEST_LOGIT,
    chains: options.Chains = 4,
    draws: options.Draws = 1000,
    warmup: options.Warmup = 1000,
    fix: options.Fix = None,
    resume: options.Resume = False,
    seed: options.Seed = 0,
    out: Annotated[Path, typer.Option(help="folder for the results")] = Path("calibration"),
) -> None:
    """Observe, fit, check and report; without --data, on sampled networks with known parameters."""
    started = time.perf_counter()
    checkpoint = checkpoint_of(out, resume)
    with staged_folder(out) as folder:
        if data is None:
            count = tokens * (prompts or 1)
            kind = kind_of(
                {}, architecture or "transformer", heads, output_projection, expansion, causal, prompts, count
            )
            si.infer.require_identifiable(kind, tokens)
            layer = kind.layer(gamma=gamma, tau0=tau0, c_plus=c_plus, c_minus=c_minus)
            sizes = {"width": width, "depth": depth, "networks": networks}
            V0 = si.equicorrelated(tokens=count, correlation=correlation, norm=norm)
            observed = sampled(layer, V0, sizes, observe_every, outputs, seed)
        else:
            observed = si.read(data)
            count = observed.sizes["token_a"]
            kind = kind_of(observed.attrs, architecture, heads, output_projection, expansion, causal, prompts, count)
        si.write(observed, folder / "data.nc")
        settings = settings_of(law, largest_logit, chains, draws, warmup, seed) | {"prior": fixed_by(fix)}
        post = fit_with_flags(observed, kind, settings, seed, checkpoint)
        post.attrs["elapsed_s"] = round(time.perf_counter() - started, 1)
        si.write(post, folder / "posterior.nc")
        verdicts = write_results(post, folder)
    checkpoint.remove()
    print_results(post, verdicts)
    say(f"written to {out}: report.html, summary.json, figures/, data.nc, posterior.nc")


def fit_command(
    data: Annotated[Path, typer.Argument(help="NetCDF file of observed covariances, or Zarr")],
    *,
    architecture: Annotated[options.Kind | None, typer.Option(help="default: from the data")] = None,
    heads: options.Heads = None,
    output_projection: options.Projection = None,
    expansion: options.Expansion = None,
    causal: options.Causal = None,
    prompts: options.Prompts = None,
    law: options.Law = "finite-width",
    largest_logit: options.LargestLogit = LARGEST_LOGIT,
    chains: options.Chains = 4,
    draws: options.Draws = 1000,
    warmup: options.Warmup = 1000,
    fix: options.Fix = None,
    workers: options.Workers = None,
    scheduler: options.Scheduler = None,
    leave_out_damaged: options.LeaveOutDamaged = False,
    resume: options.Resume = False,
    seed: options.Seed = 0,
    out: Annotated[Path, typer.Option(help="NetCDF file to write")] = Path("posterior.nc"),
) -> None:
    """Fit observed covariances; layers that were not observed are latent."""
    sizes = (heads, output_projection, expansion, causal, prompts)
    settings = settings_of(law, largest_logit, chains, draws, warmup, seed) | {"prior": fixed_by(fix)}
    settings |= {"leave_out_damaged": leave_out_damaged}
    with staged_file(out) as file, observed_in(data, workers, scheduler) as observed:
        checkpoint = _fit(observed, file, architecture, sizes, settings, seed, checkpoint_of(out, resume))
    checkpoint.remove()
    say(f"written to {out}: {chains} chains of {draws} draws")


def reduce_command(
    data: Annotated[Path, typer.Argument(help="Zarr folder of observed covariances")],
    *,
    part: Annotated[str, typer.Option(help="which part of how many, as in 3/8")],
    folder: Annotated[Path, typer.Option(help="folder for the results of all parts")],
    wait: Annotated[float, typer.Option(help="seconds to wait for the other parts in each pass", min=0)] = 0.0,
    architecture: Annotated[options.Kind | None, typer.Option(help="default: from the data")] = None,
    heads: options.Heads = None,
    output_projection: options.Projection = None,
    expansion: options.Expansion = None,
    causal: options.Causal = None,
    prompts: options.Prompts = None,
    law: options.Law = "finite-width",
    largest_logit: options.LargestLogit = LARGEST_LOGIT,
    fix: options.Fix = None,
    leave_out_damaged: options.LeaveOutDamaged = False,
) -> None:
    """Reduce one part of data larger than memory, for `merge`; the parts of a job array need no scheduler.

    A fit passes over the data several times. Parts that run at the same time wait for one another with --wait, and need
    one run each. Otherwise a run ends where it lacks other parts; run all parts again until `merge` succeeds.
    """
    from sdeinfer._map_reduce import passes_by
    from sdeinfer._parts import Parts, Unfinished
    from sdeinfer.infer import prepare_in_parts
    from sdeinfer.observation import open_in_chunks

    observed, (number, parts) = open_in_chunks(data), part_of(part)
    sizes = (heads, output_projection, expansion, causal, prompts)
    kind = kind_of(observed.attrs, architecture, *sizes, observed.sizes["token_a"])
    settings = {"law": law, "largest_logit": largest_logit, "prior": fixed_by(fix)}
    try:
        with passes_by(Parts(folder, number, parts, wait=wait).results):
            prepare_in_parts(
                model_of(observed), observed, architecture=kind, **settings, leave_out_damaged=leave_out_damaged
            )
    except Unfinished as unfinished:
        say(f"part {part}: done as far as it goes: {unfinished}")
    else:
        say(f"part {part}: complete; run `sdeinfer merge`")


def merge_command(
    data: Annotated[Path, typer.Argument(help="Zarr folder of observed covariances")],
    *,
    folder: Annotated[Path, typer.Option(help="folder of the parts that `reduce` wrote")],
    architecture: Annotated[options.Kind | None, typer.Option(help="default: from the data")] = None,
    heads: options.Heads = None,
    output_projection: options.Projection = None,
    expansion: options.Expansion = None,
    causal: options.Causal = None,
    prompts: options.Prompts = None,
    law: options.Law = "finite-width",
    largest_logit: options.LargestLogit = LARGEST_LOGIT,
    chains: options.Chains = 4,
    draws: options.Draws = 1000,
    warmup: options.Warmup = 1000,
    fix: options.Fix = None,
    leave_out_damaged: options.LeaveOutDamaged = False,
    resume: options.Resume = False,
    seed: options.Seed = 0,
    out: Annotated[Path, typer.Option(help="NetCDF file to write")] = Path("posterior.nc"),
) -> None:
    """Fit the data that the parts of `reduce` have reduced, with the flags that they had."""
    from sdeinfer._map_reduce import passes_by
    from sdeinfer._parts import Parts, Unfinished
    from sdeinfer.observation import open_in_chunks

    sizes = (heads, output_projection, expansion, causal, prompts)
    settings = settings_of(law, largest_logit, chains, draws, warmup, seed) | {"prior": fixed_by(fix)}
    settings |= {"leave_out_damaged": leave_out_damaged}
    observed, checkpoint = open_in_chunks(data), checkpoint_of(out, resume)
    try:
        with staged_file(out) as file, passes_by(Parts(folder, None, None).results):
            _fit(observed, file, architecture, sizes, settings, seed, checkpoint)
    except Unfinished as unfinished:
        raise si.InputError(f"{folder}: {unfinished}; run `sdeinfer reduce` for every part again") from unfinished
    checkpoint.remove()
    say(f"written to {out}: {chains} chains of {draws} draws")


def _fit(
    observed: "xr.Dataset",
    file: Path,
    architecture: str | None,
    sizes: tuple[Any, Any, Any, Any, Any],
    settings: dict[str, Any],
    seed: int,
    checkpoint: "si.Checkpoint",
) -> "si.Checkpoint":
    """Fit data by the flags, and write the posterior."""
    started = time.perf_counter()
    kind = kind_of(observed.attrs, architecture, *sizes, observed.sizes["token_a"])
    post = fit_with_flags(observed, kind, settings, seed, checkpoint)
    post.attrs["elapsed_s"] = round(time.perf_counter() - started, 1)
    si.write(post, file)
    return checkpoint
