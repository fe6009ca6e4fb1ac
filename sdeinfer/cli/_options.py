"""Flags that several commands share: types, limits and help."""

from typing import Annotated, Literal

import typer

from sdeinfer.infer import Law as FitLaw

Kind = Literal["transformer", "attention", "feedforward", "mlp"]

Width = Annotated[int, typer.Option(help="width n of the networks", min=1)]
Depth = Annotated[int, typer.Option(help="number of layers d", min=1)]
Tokens = Annotated[int, typer.Option(help="number of tokens m, of each prompt", min=1)]
Networks = Annotated[int, typer.Option(help="number of independent networks", min=1)]
Gamma = Annotated[float, typer.Option(help="residual strength γ of the sampled networks, in (0, 1]")]
Tau0 = Annotated[float, typer.Option(help="softmax temperature constant τ0 of the sampled networks")]
CPlus = Annotated[float, typer.Option(help="shaped-ReLU slope c₊ of the sampled networks")]
CMinus = Annotated[float, typer.Option(help="shaped-ReLU slope c₋ of the sampled networks")]
Norm = Annotated[float, typer.Option(help="norm ‖x‖/√n of the initial tokens")]
Correlation = Annotated[float, typer.Option(help="correlation between the initial tokens")]
Heads = Annotated[int | None, typer.Option(help="number of attention heads; default: from the data, or 1", min=1)]
Projection = Annotated[bool | None, typer.Option(help="a Gaussian matrix after the heads; default: from the data")]
Expansion = Annotated[float | None, typer.Option(help="hidden width of the feed-forward branch / n; default 1")]
Causal = Annotated[bool | None, typer.Option(help="a causal mask; default: from the data")]
Prompts = Annotated[
    int | None,
    typer.Option(help="number of prompts of equal length through each network; default: from the data, or 1", min=1),
]
Law = Annotated[
    FitLaw,
    typer.Option(help="law of a layer: at the networks' width, in the limit, or at their width with the limit as well"),
]
LargestLogit = Annotated[float, typer.Option(help="leave out transitions whose softmax logits spread more than this")]
ObserveEvery = Annotated[
    str, typer.Option(help="observe every K-th layer; or `last`: the last layer only; or `outputs`: its outputs only")
]
Outputs = Annotated[int, typer.Option(help="number of outputs per network, if only outputs are observed", min=1)]
Chains = Annotated[int, typer.Option(help="number of chains", min=1)]
Draws = Annotated[int, typer.Option(help="draws of each chain after warmup", min=1)]
Warmup = Annotated[int, typer.Option(help="adaptation iterations of each chain", min=1)]
Fix = Annotated[
    list[str] | None, typer.Option(help="fix a sampled coordinate, as in tau0=1 or c_mean=0; may be repeated")
]
Seed = Annotated[int, typer.Option(help="seed of all random numbers", min=0, max=2**63 - 1)]
Workers = Annotated[
    int | None, typer.Option(help="read Zarr data in chunks, by this number of processes (needs sdeinfer[dask])", min=1)
]
Scheduler = Annotated[
    str | None, typer.Option(help="read Zarr data in chunks, by the workers of the Dask scheduler at this address")
]
LeaveOutDamaged = Annotated[
    bool,
    typer.Option("--leave-out-damaged", help="of data in chunks, leave out networks that are damaged, and count them"),
]
