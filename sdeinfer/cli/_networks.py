"""The commands that make data: `observe` and `simulate`."""

import functools
import math
import warnings
from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import sdeinfer as si
from sdeinfer._files import ZARR, staged_file
from sdeinfer.cli import _options as options
from sdeinfer.cli._app import phase, say
from sdeinfer.cli._chunks import workers_of
from sdeinfer.cli._flags import key_of, kind_of, observed_every, pattern_of, sampled

if TYPE_CHECKING:
    import jax
    import xarray as xr


PART_BYTES = 2**25
"""Bytes of float64 of the networks that are sampled together, where they are written to Zarr."""

BATCH = 64
"""Their number is a multiple of the chain's batch on a CPU."""


def observe_command(
    *,
    hidden_states: Annotated[
        Path | None,
        typer.Option(
            help=".npy, .npz, .safetensors, .nc or .zarr of shape (networks, layers, tokens, width), or with one array "
            "per layer; default: sample networks"
        ),
    ] = None,
    prompt: Annotated[int | None, typer.Option(help="index of the prompt, if networks have several", min=0)] = None,
    architecture: Annotated[options.Kind | None, typer.Option(help="default: transformer for sampled networks")] = None,
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
    workers: Annotated[
        int | None,
        typer.Option(help="sample networks into Zarr by this number of processes (needs sdeinfer[dask])", min=1),
    ] = None,
    scheduler: Annotated[
        str | None, typer.Option(help="sample networks into Zarr by the workers of the Dask scheduler at this address")
    ] = None,
    seed: options.Seed = 0,
    out: Annotated[Path, typer.Option(help="NetCDF file to write, or Zarr with the suffix .zarr")] = Path("data.nc"),
) -> None:
    """Reduce hidden states to covariances, or sample networks with known parameters; into Zarr some at a time."""
    from sdeinfer.observation import observe_file, write_in_chunks, write_parts

    if (workers is not None or scheduler is not None) and (
        hidden_states is not None or out.suffix != ZARR or observe_every == "outputs"
    ):
        raise si.InputError("--workers, --scheduler: sample the layers of networks into Zarr (--out ….zarr) only")
    with staged_file(out) as file:
        if hidden_states is None:
            count = tokens * (prompts or 1)
            kind = kind_of(
                {}, architecture or "transformer", heads, output_projection, expansion, causal, prompts, count
            )
            layer = kind.layer(gamma=gamma, tau0=tau0, c_plus=c_plus, c_minus=c_minus)
            sizes = {"width": width, "depth": depth, "networks": networks}
            V0 = si.equicorrelated(tokens=count, correlation=correlation, norm=norm)
            in_parts = out.suffix == ZARR and observe_every != "outputs"
            layers = depth // observed_every(observe_every, depth)
            each = _networks_at_once(count, layers) if in_parts else networks
            part = functools.partial(_part, layer, V0, sizes, observe_every, outputs, seed, each)
            with workers_of(workers, scheduler) as by_workers:
                if by_workers:
                    write_in_chunks(part, networks, each, file)
                    say(f"written to {out}: {networks} networks, {layers + 1} layers, {count} tokens")
                    return
            parts = (part(first) for first in range(0, networks, each))
        else:
            flags = (heads, output_projection, expansion, causal, prompts)
            phase("reducing hidden states")
            observed = observe_file(hidden_states, prompts=prompt)
            parts = (_with_attributes(part, architecture, flags) for part in observed)
        with warnings.catch_warnings(record=True, action="always", category=si.LowPrecisionWarning) as caught:
            written = write_parts(parts, file)
    for each in caught[:1]:  # the networks are read in parts, each of which warns
        say(f"sdeinfer: {each.message}", err=True)
    say(f"written to {out}: {_size(written)}")


def simulate_command(
    *,
    architecture: Annotated[options.Kind, typer.Option()] = "transformer",
    tokens: options.Tokens = 4,
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
    time: Annotated[float, typer.Option(help="final depth-time T = d/n")] = 0.5,
    times: Annotated[int, typer.Option(help="number of equally spaced times to save, beside 0", min=1)] = 16,
    step: Annotated[float | None, typer.Option(help="longest step in depth-time; 0.05 if not given")] = None,
    tolerance: Annotated[
        float | None,
        typer.Option(help="largest error of correlations, log norms and log effective rank; sets the step"),
    ] = None,
    paths: Annotated[int, typer.Option(help="number of paths", min=1)] = 1024,
    seed: options.Seed = 0,
    out: Annotated[Path, typer.Option(help="NetCDF file to write")] = Path("paths.nc"),
) -> None:
    """Simulate the covariance SDE; write `covariance` over path, time, token_a and token_b."""
    import numpy as np
    import xarray as xr

    count = tokens * (prompts or 1)
    kind = kind_of({}, architecture or "transformer", heads, output_projection, expansion, causal, prompts, count)
    layer = kind.layer(gamma=gamma, tau0=tau0, c_plus=c_plus, c_minus=c_minus)
    V0 = si.equicorrelated(tokens=count, correlation=correlation, norm=norm)
    if not 0 < time < math.inf:
        raise si.InputError(f"time: must be positive and finite, got {time:g}")
    ts = np.linspace(0.0, time, times + 1)
    with staged_file(out) as file:
        phase("simulating")
        V = np.asarray(si.simulate(layer, V0, ts, paths=paths, step=step, tolerance=tolerance, key=key_of(seed, 0)))
        result = xr.Dataset(
            {"covariance": (("path", "time", "token_a", "token_b"), V)},
            coords={"time": ts},
            attrs={"architecture": architecture, "exploded": float((~np.isfinite(V[:, -1])).any(axis=(1, 2)).mean())},
        )
        si.write(result, file)
    say(f"written to {out}: {paths} paths, {result.attrs['exploded']:.2%} of them exploded")


def _part(
    layer: "si.layers.AbstractLayer",
    V0: "jax.Array",
    sizes: dict[str, Any],
    observe_every: str,
    outputs: int,
    seed: int,
    each: int,
    first: int,
) -> "xr.Dataset":
    """Networks of an ensemble from the number `first` on, at most `each`."""
    count = min(each, sizes["networks"] - first)
    own = sizes | {"networks": count}
    part = sampled(layer, V0, own, observe_every, outputs, seed, first=first, progress=each == sizes["networks"])
    if first == 0 and count < sizes["networks"]:
        part["covariance"].encoding["chunks"] = part["covariance"].shape
    return part


def _networks_at_once(tokens: int, layers: int) -> int:
    """Number of networks that are sampled and written together, a multiple of those in a batch of the chain."""
    return max(1, PART_BYTES // (8 * tokens**2 * (layers + 1)) // BATCH) * BATCH


def _with_attributes(
    part: "xr.Dataset", architecture: str | None, flags: tuple[Any, Any, Any, Any, Any]
) -> "xr.Dataset":
    """The observed covariances with the attributes of the architecture, or of its pattern alone if none is named."""
    from sdeinfer.likelihood import with_pattern

    count = part.sizes["token_a"]
    if architecture is not None:
        return part.assign_attrs(kind_of(dict(part.attrs), architecture, *flags, count).attributes())
    *_, causal, prompts = flags
    return with_pattern(part, pattern_of(dict(part.attrs), causal, prompts, count))


def _size(sizes: Mapping[Hashable, int]) -> str:
    return f"{sizes['network']} networks, {sizes['layer']} layers, {sizes['token_a']} tokens"
