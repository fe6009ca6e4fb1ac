"""The command line: observe → fit → check → report, in one go or one at a time through files."""

import math
import shlex
import sys
import time
import warnings
from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import jax
import numpy as np
import pandas as pd
import typer
import xarray as xr
from typer.core import TyperGroup

from sdeinfer import _options as options
from sdeinfer._files import InputError, first_line, staged_file, staged_folder
from sdeinfer._flags import key_of, kind_of, model_of, sampled
from sdeinfer.check import Check, check, design, summarise
from sdeinfer.covariance import equicorrelated
from sdeinfer.infer import LARGEST_LOGIT, LIMIT_POSTERIOR, Checkpoint, Law, compare, fit, require_identifiable
from sdeinfer.layers import Architecture
from sdeinfer.models import full_path  # pyright: ignore[reportMissingImports]
from sdeinfer.observe import LowPrecisionWarning, observe_file, read, read_posterior, write, write_parts
from sdeinfer.report import figures, write_figures, write_report, write_summary
from sdeinfer.solve import simulate

UsageError: Any = typer.BadParameter.__base__


class OneLineErrors(TyperGroup):
    """Commands that end with one line on standard error and exit code 2 where their input cannot be used."""

    def main(self, *args: Any, standalone_mode: bool = True, **extra: Any) -> Any:  # noqa: FBT001, FBT002
        """Run a command."""
        del standalone_mode
        try:
            code = super().main(*args, standalone_mode=False, **extra)
        except UsageError as error:
            no_command = type(error).__name__ == "NoArgsIsHelpError"
            message = error.format_message()
            typer.echo(message if no_command else f"sdeinfer: {message}", err=True)
            code = 2
        except (InputError, MemoryError, jax.errors.JaxRuntimeError) as error:
            if isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" not in str(error):
                raise
            reason = str(error) if isinstance(error, InputError) else f"not enough memory ({first_line(error)})"
            typer.echo(f"sdeinfer: {reason}", err=True)
            code = 2
        sys.exit(code if isinstance(code, int) else 0)


app = typer.Typer(
    cls=OneLineErrors,
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


@app.callback()
def in_double_precision() -> None:
    """Bayesian inference for the neural covariance SDE of shaped Transformers."""
    jax.config.update("jax_enable_x64", True)  # noqa: FBT003


SAMPLED = (
    *("width", "depth", "tokens", "networks", "norm", "correlation", "observe_every", "outputs"),
    *("gamma", "tau0", "c_plus", "c_minus"),
)
"""Flags that describe networks to sample."""

# The default networks identify γ to 1 %, τ0 and c₊ − c₋ to 10 %, and stay where the limit holds; tests/test_defaults.py
# computes both. Many shallow networks rather than a few deep ones, because norms spread with depth and the largest
# leave the limit's range first; larger tokens would tell more of τ0 but leave it too. c₊ + c₋ = 0 keeps the He constant
# of the shaped ReLU at its limit, 1, where at this width −2 would enlarge its drift by 12 %.


@app.command("calibrate")
def calibrate_command(
    context: typer.Context,
    *,
    data: Annotated[Path | None, typer.Option(help="NetCDF file of observed covariances")] = None,
    architecture: Annotated[options.Kind | None, typer.Option(help="default: as the data say, or transformer")] = None,
    width: options.Width = 256,
    depth: options.Depth = 16,
    tokens: options.Tokens = 4,
    networks: options.Networks = 128,
    heads: options.Heads = None,
    output_projection: options.Projection = None,
    expansion: options.Expansion = None,
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
    resume: options.Resume = False,
    seed: options.Seed = 0,
    out: Annotated[Path, typer.Option(help="folder for the results")] = Path("calibration"),
) -> None:
    """Observe, fit, check and report in one go; without --data, on sampled networks with known parameters."""
    started = time.perf_counter()
    checkpoint = _checkpoint(out, resume)
    if data is not None:
        _refuse_flags_of_sampled_networks(context)
    with staged_folder(out) as folder:
        if data is None:
            kind = kind_of({}, architecture, heads, output_projection, expansion)
            require_identifiable(architecture or "transformer", tokens)
            layer = kind.layer(gamma=gamma, tau0=tau0, c_plus=c_plus, c_minus=c_minus)
            sizes = {"width": width, "depth": depth, "networks": networks}
            V0 = equicorrelated(tokens=tokens, correlation=correlation, norm=norm)
            observed = sampled(layer, V0, sizes, observe_every, outputs, seed)
        else:
            observed = read(data)
            kind = kind_of(observed.attrs, architecture, heads, output_projection, expansion)
        write(observed, folder / "data.nc")
        settings = _settings(law, largest_logit, chains, draws, warmup, seed)
        post = _fit(observed, kind, settings, seed, checkpoint)
        post.attrs["elapsed_s"] = round(time.perf_counter() - started, 1)
        write(post, folder / "posterior.nc")
        verdicts = _report(post, folder)
    checkpoint.remove()
    _print(post, verdicts)
    typer.echo(f"written to {out}: report.html, summary.json, figures/, data.nc, posterior.nc")


@app.command("observe")
def observe_command(
    *,
    hidden_states: Annotated[
        Path | None,
        typer.Option(
            help=".npy, .npz, .safetensors, .nc or .zarr of shape (networks, layers, tokens, width), or of one array "
            "a layer; default: sample networks"
        ),
    ] = None,
    prompt: Annotated[int | None, typer.Option(help="which prompt, where each network has several", min=0)] = None,
    architecture: Annotated[options.Kind | None, typer.Option(help="default: transformer, if sampled")] = None,
    width: options.Width = 256,
    depth: options.Depth = 16,
    tokens: options.Tokens = 4,
    networks: options.Networks = 128,
    heads: options.Heads = None,
    output_projection: options.Projection = None,
    expansion: options.Expansion = None,
    gamma: options.Gamma = 0.6,
    tau0: options.Tau0 = 1.0,
    c_plus: options.CPlus = 2.0,
    c_minus: options.CMinus = -2.0,
    norm: options.Norm = 1.6,
    correlation: options.Correlation = 0.0,
    observe_every: options.ObserveEvery = "1",
    outputs: options.Outputs = 64,
    seed: options.Seed = 0,
    out: Annotated[Path, typer.Option(help="NetCDF file to write, or Zarr with the suffix .zarr")] = Path("data.nc"),
) -> None:
    """Reduce hidden states to covariances, or sample networks with known parameters."""
    with staged_file(out) as file:
        if hidden_states is None:
            kind = kind_of({}, architecture, heads, output_projection, expansion)
            layer = kind.layer(gamma=gamma, tau0=tau0, c_plus=c_plus, c_minus=c_minus)
            sizes = {"width": width, "depth": depth, "networks": networks}
            V0 = equicorrelated(tokens=tokens, correlation=correlation, norm=norm)
            parts = [sampled(layer, V0, sizes, observe_every, outputs, seed)]
        else:
            attributes = {}
            if architecture is not None:
                attributes = kind_of({}, architecture, heads, output_projection, expansion).attributes()
            parts = (part.assign_attrs(attributes) for part in observe_file(hidden_states, prompt=prompt))
        with warnings.catch_warnings(record=True, action="always", category=LowPrecisionWarning) as caught:
            written = write_parts(parts, file)
    for warning in dict.fromkeys(str(each.message) for each in caught):
        typer.echo(f"sdeinfer: {warning}", err=True)
    typer.echo(f"written to {out}: {_size(written)}")


@app.command("simulate")
def simulate_command(
    *,
    architecture: Annotated[options.Kind, typer.Option()] = "transformer",
    tokens: options.Tokens = 4,
    heads: options.Heads = None,
    output_projection: options.Projection = None,
    expansion: options.Expansion = None,
    gamma: options.Gamma = 0.6,
    tau0: options.Tau0 = 1.0,
    c_plus: options.CPlus = 2.0,
    c_minus: options.CMinus = -2.0,
    norm: options.Norm = 1.6,
    correlation: options.Correlation = 0.0,
    time: Annotated[float, typer.Option(help="depth-time T = d/n at which to end")] = 0.5,
    times: Annotated[int, typer.Option(help="how many equally spaced times to keep, beside 0", min=1)] = 16,
    step: Annotated[float, typer.Option(help="longest step in depth-time")] = 0.01,
    paths: Annotated[int, typer.Option(help="number of paths", min=1)] = 1024,
    seed: options.Seed = 0,
    out: Annotated[Path, typer.Option(help="NetCDF file to write")] = Path("paths.nc"),
) -> None:
    """Simulate the covariance SDE; writes `covariance` over path, time, token_a and token_b."""
    kind = kind_of({}, architecture, heads, output_projection, expansion)
    layer = kind.layer(gamma=gamma, tau0=tau0, c_plus=c_plus, c_minus=c_minus)
    V0 = equicorrelated(tokens=tokens, correlation=correlation, norm=norm)
    if not 0 < time < math.inf:
        raise InputError(f"time: must be positive and finite, got {time:g}")
    ts = np.linspace(0.0, time, times + 1)
    with staged_file(out) as file:
        V = np.asarray(simulate(layer, V0, ts, paths=paths, step=step, key=key_of(seed, 0)))
        result = xr.Dataset(
            {"covariance": (("path", "time", "token_a", "token_b"), V)},
            coords={"time": ts},
            attrs={"architecture": architecture, "exploded": float((~np.isfinite(V[:, -1])).any(axis=(1, 2)).mean())},
        )
        write(result, file)
    typer.echo(f"written to {out}: {paths} paths, {result.attrs['exploded']:.2%} of them exploded")


@app.command("fit")
def fit_command(
    data: Annotated[Path, typer.Argument(help="NetCDF file of observed covariances")],
    *,
    architecture: Annotated[options.Kind | None, typer.Option(help="default: as the data say, or transformer")] = None,
    heads: options.Heads = None,
    output_projection: options.Projection = None,
    expansion: options.Expansion = None,
    law: options.Law = "finite-width",
    largest_logit: options.LargestLogit = LARGEST_LOGIT,
    chains: options.Chains = 4,
    draws: options.Draws = 1000,
    warmup: options.Warmup = 1000,
    resume: options.Resume = False,
    seed: options.Seed = 0,
    out: Annotated[Path, typer.Option(help="NetCDF file to write")] = Path("posterior.nc"),
) -> None:
    """Fit observed covariances; layers that were not observed are latent."""
    started = time.perf_counter()
    checkpoint = _checkpoint(out, resume)
    with staged_file(out) as file:
        observed = read(data)
        kind = kind_of(observed.attrs, architecture, heads, output_projection, expansion)
        settings = _settings(law, largest_logit, chains, draws, warmup, seed)
        post = _fit(observed, kind, settings, seed, checkpoint)
        post.attrs["elapsed_s"] = round(time.perf_counter() - started, 1)
        write(post, file)
    checkpoint.remove()
    typer.echo(f"written to {out}: {chains} chains of {draws} draws")


@app.command("compare")
def compare_command(
    data: Annotated[Path, typer.Argument(help="NetCDF file of observed covariances")],
    *,
    architecture: Annotated[
        list[str] | None, typer.Option(help="one to compare, given at least twice; default: all that the data allow")
    ] = None,
    law: Annotated[Literal["finite-width", "limit"], typer.Option(help="law of a layer")] = "finite-width",
    largest_logit: options.LargestLogit = LARGEST_LOGIT,
    chains: options.Chains = 4,
    draws: options.Draws = 500,
    warmup: options.Warmup = 500,
    seed: options.Seed = 0,
    out: Annotated[Path, typer.Option(help="CSV file to write")] = Path("comparison.csv"),
) -> None:
    """Rank architectures by leave-one-network-out predictive densities, best first; writes ArviZ's table."""
    with staged_file(out) as file:
        table = compare(
            full_path,
            read(data),
            architectures=architecture or None,
            **_settings(law, largest_logit, chains, draws, warmup, seed),
        )
        table.to_csv(file, index_label="architecture")
    columns = ["elpd_diff", "dse", "weight", "elpd", "p", "diag_diff", "diag_elpd"]
    typer.echo(_table(table.reindex(columns=columns)))
    typer.echo(f"written to {out}")


@app.command("design")
def design_command(
    *,
    architecture: Annotated[options.Kind, typer.Option()] = "transformer",
    parameter: Annotated[str, typer.Option(help="what to tell: gamma, tau0 or c_gap")] = "tau0",
    relative_sd: Annotated[float, typer.Option(help="how well: its relative sd; of γ, the sd of logit γ")] = 0.05,
    width: options.Width = 256,
    depth: options.Depth = 16,
    tokens: options.Tokens = 4,
    heads: options.Heads = None,
    output_projection: options.Projection = None,
    expansion: options.Expansion = None,
    gamma: options.Gamma = 0.6,
    tau0: options.Tau0 = 1.0,
    c_plus: options.CPlus = 2.0,
    c_minus: options.CMinus = -2.0,
    seed: options.Seed = 0,
) -> None:
    """Find tokens and a number of networks that tell a parameter; the parameters given are a guess at the truth."""
    kind = kind_of({}, architecture, heads, output_projection, expansion)
    layer = kind.layer(gamma=gamma, tau0=tau0, c_plus=c_plus, c_minus=c_minus)
    sizes = {"tokens": tokens, "width": width, "depth": depth}
    found = design(layer, **sizes, parameter=parameter, relative_sd=relative_sd, key=key_of(seed, 0))
    typer.echo(f"{found.networks} networks of width {width} and depth {depth}, all layers observed, from tokens with")
    typer.echo(f"norms ‖x‖/√n   {_row(found.norms)}\ncorrelations")
    for row in found.correlations:
        typer.echo(f"               {_row(row)}")
    typer.echo(f"expected standard deviations, relative but for logit γ:\n{_table(found.expected.to_frame('sd'))}")


@app.command("check")
def check_command(posterior: Annotated[Path, typer.Argument(help="NetCDF file that `fit` wrote")]) -> None:
    """Judge a fit."""
    post = read_posterior(posterior)
    _print(post, check(post))


@app.command("report")
def report_command(
    posterior: Annotated[Path, typer.Argument(help="NetCDF file that `fit` wrote")],
    *,
    out: Annotated[Path, typer.Option(help="folder for the results")] = Path("calibration"),
) -> None:
    """Write the report of a fit: page, figures and summary."""
    post = read_posterior(posterior)
    with staged_folder(out) as folder:
        _report(post, folder)
    typer.echo(f"written to {out}: report.html, summary.json, figures/")


def _refuse_flags_of_sampled_networks(context: typer.Context) -> None:
    for name in SAMPLED:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            flag = "--" + name.replace("_", "-")
            raise InputError(f"{flag}: describes networks to sample, which --data replaces; leave one of the two out")


def _settings(law: Law, largest_logit: float, chains: int, draws: int, warmup: int, seed: int) -> dict[str, Any]:
    """What flags say of a fit."""
    sizes = {"chains": chains, "draws": draws, "warmup": warmup}
    return {"law": law, "largest_logit": largest_logit, **sizes, "progress": True, "key": key_of(seed, 1)}


def _fit(
    data: xr.Dataset, kind: Architecture, settings: dict[str, Any], seed: int, checkpoint: Checkpoint
) -> xr.DataTree:
    post = fit(model_of(data), data, architecture=kind, **settings, checkpoint=checkpoint)
    post.attrs |= {"seed": seed, "command": shlex.join(["sdeinfer", *sys.argv[1:]])}
    return post


def _checkpoint(out: Path, resume: bool) -> Checkpoint:  # noqa: FBT001
    """Where the results go, which a killed fit does not leave."""
    out = out.resolve()
    file = (out if out.is_dir() else out.parent) / f"{out.name}.checkpoint"
    if resume and not file.exists():
        typer.echo(f"no checkpoint at {file}: starting anew", err=True)
    return Checkpoint(file, resume)


def _report(post: xr.DataTree, folder: Path) -> Check:
    verdicts = check(post)
    drawn = figures(post)
    write_figures(drawn, folder / "figures")
    write_summary(post, verdicts, folder / "summary.json")
    write_report(post, verdicts, drawn, folder / "report.html")
    return verdicts


def _print(post: xr.DataTree, verdicts: Check) -> None:
    typer.echo(_table(summarise(post)))
    if LIMIT_POSTERIOR in post.children:
        typer.echo(f"by the limit's law:\n{_table(summarise(post, group=LIMIT_POSTERIOR))}")
    if post.attrs.get("left_out"):
        typer.echo(f"left out, as they start outside the range of the law: {post.attrs['left_out']:.1%} of transitions")
    for verdict in verdicts.verdicts:
        advice = "" if verdict.passed else f": {verdict.advice}"
        mark = "passed" if verdict.passed else "FAILED"
        typer.echo(f"  {mark}  {verdict.name} {verdict.value:.4g} (threshold {verdict.threshold:g}){advice}")
    typer.echo(f"verdict: {verdicts.verdict}")


def _table(rows: pd.DataFrame) -> str:
    return rows.to_string(float_format=lambda x: f"{x:.4g}", na_rep="–")


def _row(values: np.ndarray) -> str:
    return "  ".join(f"{value:6.3f}" for value in values)


def _size(sizes: Mapping[Hashable, int]) -> str:
    return f"{sizes['network']} networks, {sizes['layer']} layers, {sizes['token_a']} tokens"
