"""The commands that compare architectures and design data: `compare` and `design`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

import sdeinfer as si
from sdeinfer._files import staged_file
from sdeinfer.cli import _options as options
from sdeinfer.cli._app import phase, say
from sdeinfer.cli._flags import key_of, kind_of
from sdeinfer.cli._steps import settings_of, table_of
from sdeinfer.infer import LARGEST_LOGIT

if TYPE_CHECKING:
    import numpy as np


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
    """Rank architectures by leave-one-network-out predictive densities, best first; write ArviZ's table."""
    from sdeinfer.models import full_path  # pyright: ignore[reportMissingImports]

    with staged_file(out) as file:
        table = si.compare(
            full_path,
            si.read(data),
            architectures=architecture or None,
            **settings_of(law, largest_logit, chains, draws, warmup, seed),
        )
        table.to_csv(file, index_label="architecture")
    columns = ["elpd_diff", "dse", "weight", "elpd", "p", "diag_diff", "diag_elpd"]
    say(table_of(table.reindex(columns=columns)))
    say(f"written to {out}")


def design_command(
    *,
    architecture: Annotated[options.Kind, typer.Option()] = "transformer",
    parameter: Annotated[str, typer.Option(help="parameter to identify: gamma, tau0 or c_gap")] = "tau0",
    relative_sd: Annotated[float, typer.Option(help="target: its relative sd; for γ, the sd of logit γ")] = 0.05,
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
    """Find tokens and a number of networks that identify a parameter; the parameter flags are a guess at the truth."""
    kind = kind_of({}, architecture, heads, output_projection, expansion, None, None, tokens)
    layer = kind.layer(gamma=gamma, tau0=tau0, c_plus=c_plus, c_minus=c_minus)
    sizes = {"tokens": tokens, "width": width, "depth": depth}
    phase("searching for tokens")
    found = si.design(layer, **sizes, parameter=parameter, relative_sd=relative_sd, key=key_of(seed, 0))
    say(f"{found.networks} networks of width {width} and depth {depth}, all layers observed, from tokens with")
    say(f"norms ‖x‖/√n   {_row(found.norms)}\ncorrelations")
    for row in found.correlations:
        say(f"               {_row(row)}")
    say(f"expected standard deviations, relative except for logit γ:\n{table_of(found.expected.to_frame('sd'))}")


def _row(values: "np.ndarray") -> str:
    return "  ".join(f"{value:6.3f}" for value in values)
