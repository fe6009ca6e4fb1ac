"""The commands that fit: `calibrate` and `fit`."""

import time
from pathlib import Path
from typing import Annotated, Any

import typer

import sdeinfer as si
from sdeinfer._files import staged_file, staged_folder
from sdeinfer.cli import _options as options
from sdeinfer.cli._app import Command, say
from sdeinfer.cli._chunks import observed_in
from sdeinfer.cli._flags import fixed_by, kind_of, sampled
from sdeinfer.cli._steps import fit_with_flags, print_results, settings_of, write_results
from sdeinfer.infer import LARGEST_LOGIT

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
    seed: options.Seed = 0,
    out: Annotated[Path, typer.Option(help="folder for the results")] = Path("calibration"),
) -> None:
    """Observe, fit, check and report; without --data, on sampled networks with known parameters."""
    started = time.perf_counter()
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
        post = fit_with_flags(observed, kind, settings, seed)
        post.attrs["elapsed_s"] = round(time.perf_counter() - started, 1)
        si.write(post, folder / "posterior.nc")
        verdicts = write_results(post, folder)
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
    seed: options.Seed = 0,
    out: Annotated[Path, typer.Option(help="NetCDF file to write")] = Path("posterior.nc"),
) -> None:
    """Fit observed covariances; layers that were not observed are latent."""
    sizes = (heads, output_projection, expansion, causal, prompts)
    settings = settings_of(law, largest_logit, chains, draws, warmup, seed) | {"prior": fixed_by(fix)}
    settings |= {"leave_out_damaged": leave_out_damaged}
    with staged_file(out) as file, observed_in(data, workers, scheduler) as observed:
        started = time.perf_counter()
        kind = kind_of(observed.attrs, architecture, *sizes, observed.sizes["token_a"])
        post = fit_with_flags(observed, kind, settings, seed)
        post.attrs["elapsed_s"] = round(time.perf_counter() - started, 1)
        si.write(post, file)
    say(f"written to {out}: {chains} chains of {draws} draws")
