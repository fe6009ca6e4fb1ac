"""Flags that several commands share, in groups: a group is one argument of a command, and a type with methods.

Tests: `tests/cli/test_fits.py`.
"""

import inspect
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, is_dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

import sdeinfer as si
from sdeinfer._files import first_line
from sdeinfer.cli._app import named_phase
from sdeinfer.infer._settings import LARGEST_LOGIT, Law

if TYPE_CHECKING:
    import jax
    import xarray as xr

Width = Annotated[int, typer.Option(help="width n of the networks", min=1)]
Depth = Annotated[int, typer.Option(help="number of layers d", min=1)]
Seed = Annotated[int, typer.Option(help="seed of all random numbers", min=0, max=2**63 - 1)]


def with_groups(command: Callable[..., None]) -> Callable[..., None]:
    """A command with the flags of its groups, dataclasses, in place of the groups, which Typer does not know."""
    flags: list[inspect.Parameter] = []
    groups: dict[str, Any] = {}
    for name, parameter in inspect.signature(command).parameters.items():
        if is_dataclass(parameter.annotation):
            groups[name] = parameter.annotation
        flags += flags_of(groups[name]) if name in groups else [parameter]

    def run(**given: Any) -> None:
        for name, group in groups.items():
            given[name] = group(**{flag.name: given.pop(flag.name) for flag in flags_of(group)})
        command(**given)

    run.__doc__ = command.__doc__
    run.__signature__ = inspect.Signature(flags)  # pyright: ignore[reportFunctionMemberAccess]
    return run


def flags_of(group: Any) -> list[inspect.Parameter]:
    """The flags of a group."""
    return list(inspect.signature(group).parameters.values())


@dataclass(frozen=True, kw_only=True)
class Kind:
    """The architecture; what is None is as in the data."""

    architecture: Annotated[
        Literal["transformer", "attention", "feedforward", "mlp"] | None,
        typer.Option(help="default: transformer, or that of the data"),
    ] = None
    heads: Annotated[
        int | None,
        typer.Option(help="number of attention heads; default: 1, or that of the data", min=1),
    ] = None
    output_projection: Annotated[
        bool | None,
        typer.Option(help="a Gaussian matrix after the heads; default: none, or that of the data"),
    ] = None
    expansion: Annotated[float | None, typer.Option(help="hidden width of the feed-forward branch / n; default 1")] = (
        None
    )
    causal: Annotated[bool | None, typer.Option(help="a causal mask; default: none, or that of the data")] = None
    prompts: Annotated[
        int | None,
        typer.Option(
            help="number of prompts of equal length in each network; default: 1, or that of the data",
            min=1,
        ),
    ] = None

    def of(self, attrs: Mapping[Any, Any], tokens: int) -> "si.layers.AbstractLayer":
        """The architecture of data with these attributes, and so many tokens of all prompts together."""
        from sdeinfer.layers._templates import ARCHITECTURES, architecture_in

        kind = None if self.architecture is None else si.layers.template(self.architecture)
        if self.architecture in (None, attrs.get("architecture")):
            kind = architecture_in(dict(attrs)) or kind
        if kind is None:
            raise si.InputError(f"--architecture: the data do not name one; give {', '.join(ARCHITECTURES)}")
        if "pattern" in kind.sizes:
            kind = si.layers.template(kind, pattern=self.pattern(attrs, tokens))
        elif self.causal:
            raise si.InputError(f"--causal: {kind.name} has none")
        sizes = {name: getattr(self, name) for name in ("heads", "output_projection", "expansion")}
        given = {name: size for name, size in sizes.items() if size is not None}
        for name in given.keys() - kind.sizes.keys():
            raise si.InputError(f"--{name.replace('_', '-')}: {kind.name} has none")
        return si.layers.template(kind, **given)

    def pattern(self, attrs: Mapping[Any, Any], tokens: int) -> "si.Pattern":
        """The attention pattern of data with these attributes."""
        pattern = si.Pattern.in_attributes(attrs)
        if self.causal is None and self.prompts is None:
            return pattern
        if self.prompts is not None and tokens % self.prompts:
            raise si.InputError(f"--prompts: {tokens} tokens are not {self.prompts} prompts of equal length")
        lengths = pattern.prompts if self.prompts is None else (tokens // self.prompts,) * self.prompts
        return si.Pattern(causal=pattern.causal if self.causal is None else self.causal, prompts=lengths)


@dataclass(frozen=True, kw_only=True)
class Start:
    """The initial tokens."""

    tokens: Annotated[int, typer.Option(help="number of tokens m, of each prompt", min=1)] = 4
    norm: Annotated[float, typer.Option(help="norm ‖x‖/√n of the initial tokens")] = 1.6
    correlation: Annotated[float, typer.Option(help="correlation between the initial tokens")] = 0.0

    def of(self, flags: Kind) -> "tuple[si.layers.AbstractLayer, jax.Array]":
        """The architecture where there are no data, and V0 of the tokens of all prompts."""
        tokens = self.tokens * (flags.prompts or 1)
        V0 = si.equicorrelated(tokens=tokens, correlation=self.correlation, norm=self.norm)
        return flags.of({"architecture": "transformer"}, tokens), V0


@dataclass(frozen=True, kw_only=True)
class Truth:
    """True parameters of a layer."""

    gamma: Annotated[float, typer.Option(help="residual strength γ of the layer, in (0, 1]")] = 0.6
    tau0: Annotated[float, typer.Option(help="softmax temperature constant τ0 of the layer")] = 1.0
    c_plus: Annotated[float, typer.Option(help="shaped-ReLU slope c₊ of the layer")] = 2.0
    c_minus: Annotated[float, typer.Option(help="shaped-ReLU slope c₋ of the layer")] = -2.0

    def layer(self, kind: "si.layers.AbstractLayer") -> "si.layers.AbstractLayer":
        """The layer of an architecture with these parameters."""
        return kind.with_parameters({name: value for name, value in asdict(self).items() if name in kind.declared()})


@dataclass(frozen=True, kw_only=True)
class EnsembleOptions:
    """Networks to sample, and what is observed of them."""

    width: Width = 256
    depth: Depth = 16
    networks: Annotated[int, typer.Option(help="number of independent networks", min=1)] = 128
    observe_every: Annotated[
        str,
        typer.Option(help="observe every K-th layer; or `last`: the last layer only; or `outputs`: its outputs only"),
    ] = "1"
    outputs: Annotated[int, typer.Option(help="number of outputs per network, if only outputs are observed", min=1)] = (
        64
    )

    @property
    def every(self) -> int:
        """The number of layers from one observed layer to the next."""
        if self.observe_every in ("last", "outputs"):
            return self.depth
        if self.observe_every.isdecimal():
            return int(self.observe_every)
        raise si.InputError(
            f"--observe-every: a whole number, `last` or `outputs` is needed, got {self.observe_every!r}"
        )

    def drawn(
        self, layer: "si.layers.AbstractLayer", V0: "jax.Array", seed: int, *, first: int = 0, most: int | None = None
    ) -> "xr.Dataset":
        """The networks from the number `first` on, at most so many."""
        networks = min(most or self.networks, self.networks - first)
        data = si.sample_networks(
            layer,
            V0.astype("float32"),  # halves the run time; its rounding is a millionth of a layer's noise
            width=self.width,
            depth=self.depth,
            networks=networks,
            observe_every=self.every,
            first_network=first,
            progress=networks == self.networks,
            key=key_of(seed, 0),
        )
        if self.observe_every == "outputs":
            data = si.sample_outputs(data, outputs=self.outputs, key=key_of(seed, 2))
        return data


@dataclass(frozen=True, kw_only=True)
class Fit:
    """Arguments of `fit`."""

    law: Annotated[Law, typer.Option(help="law of a layer: at the networks' width, or in the limit")] = "finite-width"
    largest_logit: Annotated[
        float, typer.Option(help="leave out transitions whose softmax logits spread more than this")
    ] = LARGEST_LOGIT
    chains: Annotated[int, typer.Option(help="number of chains", min=1)] = 4
    draws: Annotated[int, typer.Option(help="draws of each chain after warmup", min=1)] = 1000
    warmup: Annotated[int, typer.Option(help="adaptation iterations of each chain", min=1)] = 1000
    fix: Annotated[
        list[str] | None, typer.Option(help="fix a sampled coordinate, as in tau0=1 or c_mean=0; may be repeated")
    ] = None

    def posterior(
        self, data: "xr.Dataset", kind: "si.layers.AbstractLayer", seed: int, started: float, **options: Any
    ) -> "xr.DataTree":
        """The fit of the model that suits the data; the command and the seconds since `started` are on record."""
        from sdeinfer.observation._dataset import outputs_of

        settings = asdict(self) | options
        if outputs_of(data):
            model = si.models.outputs
        else:
            every_layer = (data["layer"].diff("layer") == 1).all()
            model = si.models.full_path if every_layer else si.models.thinned_path
        prior = fixed_by(settings.pop("fix"))
        post = si.fit(model, data, architecture=kind, prior=prior, **settings, progress=True, key=key_of(seed, 1))
        command, elapsed = shlex.join(["sdeinfer", *sys.argv[1:]]), round(time.perf_counter() - started, 1)
        post.attrs |= {"seed": seed, "command": command, "elapsed_s": elapsed}
        return post


@dataclass(frozen=True, kw_only=True)
class Workers:
    """Flags for workers: new ones of this machine, each with an equal share of the memory, or those of a scheduler."""

    workers: Annotated[
        int | None,
        typer.Option(help="pass over Zarr in chunks, by this number of processes (needs sdeinfer[dask])", min=1),
    ] = None
    scheduler: Annotated[
        str | None, typer.Option(help="pass over Zarr in chunks, by the workers of the Dask scheduler at this address")
    ] = None

    def __bool__(self) -> bool:
        return self.workers is not None or self.scheduler is not None


@contextmanager
def at_work(flags: Workers) -> Iterator[int]:
    """Run passes over data on the workers; yields how many parts they take at a time, 0 without workers."""
    from sdeinfer.observation._arrays import library

    if not flags:
        yield 0
        return
    if flags.workers is not None and flags.scheduler is not None:
        raise si.InputError("--workers: starts processes here, --scheduler uses those of a cluster; omit one")
    distributed = library("distributed", "dask")
    named_phase("starting workers" if flags.scheduler is None else "connecting to the scheduler")
    try:
        if flags.scheduler is None:
            client = distributed.Client(n_workers=flags.workers, threads_per_worker=1, dashboard_address="127.0.0.1:0")
        else:
            client = distributed.Client(flags.scheduler, timeout=20)
    except (OSError, ValueError) as error:
        raise si.InputError(f"--scheduler: {flags.scheduler} does not answer ({first_line(error)})") from error
    with client:
        yield max(1, sum(client.nthreads().values()))


def key_of(seed: int, part: int) -> "jax.Array":
    """The PRNG key of one part of a command."""
    import jax

    return jax.random.fold_in(jax.random.key(seed), part)


def fixed_by(flags: list[str] | None) -> dict[str, float]:
    """The coordinates that `--fix NAME=NUMBER` fixes, and their values."""
    return _named(flags, float, "--fix: NAME=NUMBER is needed, as in tau0=1")


def bounds_by(flags: list[str] | None) -> dict[str, tuple[float, float]]:
    """The ranges that `--bound NAME=LOW:HIGH` sets."""

    def ends(text: str) -> tuple[float, float]:
        low, high = map(float, text.split(":"))
        return low, high

    return _named(flags, ends, "--bound: NAME=LOW:HIGH is needed, as in gamma=0.1:0.9")


def _named[T](flags: list[str] | None, value_of: Callable[[str], T], usage: str) -> dict[str, T]:
    values = {}
    for flag in flags or []:
        name, _, text = flag.partition("=")
        try:
            values[name] = value_of(text)
        except ValueError:
            raise si.InputError(f"{usage}; got {flag!r}") from None
    return values
