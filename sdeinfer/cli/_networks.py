"""The commands that make data: `observe` and `simulate`."""

import functools
import itertools
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import sdeinfer as si
from sdeinfer._files import ZARR, staged_file
from sdeinfer.cli._app import named_phase, say
from sdeinfer.cli._groups import EnsembleOptions, Kind, Seed, Start, Truth, Workers, at_work, key_of, with_groups

if TYPE_CHECKING:
    import jax
    import xarray as xr


PART_BYTES = 2**25
"""Bytes of float64 of the networks that are sampled together, where they are written to Zarr."""


@with_groups
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
    kind: Kind,
    ensemble: EnsembleOptions,
    start: Start,
    truth: Truth,
    workers: Workers,
    seed: Seed = 0,
    out: Annotated[Path, typer.Option(help="NetCDF file to write, or Zarr with the suffix .zarr")] = Path("data.nc"),
) -> None:
    """Reduce hidden states to covariances, or sample networks. Those for Zarr are made some at a time."""
    from sdeinfer.observation._arrays import library
    from sdeinfer.observation._store import write_parts
    from sdeinfer.observation._stored import observe_file

    in_parts = hidden_states is None and out.suffix == ZARR and ensemble.observe_every != "outputs"
    if workers and not in_parts:
        raise si.InputError("--workers, --scheduler: sample the layers of networks into Zarr (--out ….zarr) only")
    if out.suffix == ZARR:
        library("zarr")
    with staged_file(out) as file:
        if hidden_states is None:
            architecture, V0 = start.of(kind)
            batch = _networks_at_once(len(V0), ensemble.depth // ensemble.every) if in_parts else ensemble.networks
            part = functools.partial(_part, ensemble, truth.layer(architecture), V0, seed, batch)
            starts = range(0, ensemble.networks, batch)
            with at_work(workers) as threads:
                written = write_parts(_by_workers(part, starts, threads) if threads else map(part, starts), file)
        else:
            named_phase("reducing hidden states")
            observed = observe_file(hidden_states, prompts=prompt)
            parts = (_with_attributes(part, kind) for part in observed)
            with warnings.catch_warnings(record=True, action="always", category=UserWarning) as caught:
                written = write_parts(parts, file)
            # The networks are read in parts, each of which warns: the first warning of each kind.
            for warning in {message.category: message for message in reversed(caught)}.values():
                say(f"sdeinfer: {warning.message}", err=True)
    say(f"written to {out}: {written['network']} networks, {written['layer']} layers, {written['token_a']} tokens")


@with_groups
def simulate_command(
    *,
    kind: Kind,
    start: Start,
    truth: Truth,
    time: Annotated[float, typer.Option(help="final depth-time T = d/n")] = 0.5,
    times: Annotated[int, typer.Option(help="number of equally spaced times to save, beside 0", min=1)] = 16,
    step: Annotated[float, typer.Option(help="longest step in depth-time")] = 0.05,
    paths: Annotated[int, typer.Option(help="number of paths", min=1)] = 1024,
    seed: Seed = 0,
    out: Annotated[Path, typer.Option(help="NetCDF file to write")] = Path("paths.nc"),
) -> None:
    """Simulate the covariance SDE at given parameters. The file has `covariance` over path and time."""
    import numpy as np
    import xarray as xr

    architecture, V0 = start.of(kind)
    layer = truth.layer(architecture)
    if not 0 < time < math.inf:
        raise si.InputError(f"time: must be positive and finite, got {time:g}")
    ts = np.linspace(0.0, time, times + 1)
    with staged_file(out) as file:
        named_phase("simulating")
        V = np.asarray(si.simulate(layer, V0, ts, paths=paths, step=step, key=key_of(seed, 0)))
        result = xr.Dataset(
            {"covariance": (("path", "time", "token_a", "token_b"), V)},
            coords={"time": ts},
            attrs={
                "architecture": architecture.name,
                "exploded": float((~np.isfinite(V[:, -1])).any(axis=(1, 2)).mean()),
            },
        )
        si.write(result, file)
    say(f"written to {out}: {paths} paths, {result.attrs['exploded']:.2%} of them exploded")


def _part(
    ensemble: EnsembleOptions, layer: "si.layers.AbstractLayer", V0: "jax.Array", seed: int, batch: int, first: int
) -> "xr.Dataset":
    """Networks of an ensemble from the number `first` on, at most `batch`; the first part has the folder's chunks."""
    part = ensemble.drawn(layer, V0, seed, first=first, most=batch)
    if first == 0 and batch < ensemble.networks:
        part["covariance"].encoding["chunks"] = part["covariance"].shape
    return part


def _by_workers(part: "Callable[[int], xr.Dataset]", starts: Sequence[int], threads: int) -> "Iterator[xr.Dataset]":
    """Parts of an ensemble that workers make, as many at a time as they have threads."""
    from sdeinfer._map_chunks import map_chunks

    for some in itertools.batched(starts, threads):
        yield from map_chunks(part, some, name="observe")


def _networks_at_once(tokens: int, layers: int) -> int:
    """Number of networks that are sampled and written together, a multiple of the 64 of a batch of the chain."""
    return max(1, PART_BYTES // (8 * tokens**2 * (layers + 1)) // 64) * 64


def _with_attributes(part: "xr.Dataset", kind: Kind) -> "xr.Dataset":
    """The observed covariances with the attributes of the architecture, or of its pattern alone if none is named."""
    from sdeinfer.layers._templates import attributes_of_layer
    from sdeinfer.likelihood import with_pattern

    tokens = part.sizes["token_a"]
    if kind.architecture is not None:
        return part.assign_attrs(attributes_of_layer(kind.of(part.attrs, tokens)))
    return with_pattern(part, kind.pattern(part.attrs, tokens))
