"""Run models of Equinox, Flax and PyTorch, and observe what their residual branches read and add.

A branch is (kind, module), or (kind, reader, writer): U is the first array that the reader gets, D what the writer
returns, or the first entry of a tuple.
"""

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import equinox as eqx
import jax
import jax.random as jr
import xarray as xr
from jaxtyping import PRNGKeyArray

from sdeinfer._arguments import shown
from sdeinfer._files import InputError
from sdeinfer.covariance import EVERY_TOKEN, Pattern
from sdeinfer.observation._branch_observer import BranchObserver, joined_networks
from sdeinfer.observation._branch_recorder import Recorder, Tapped, first_array, tapped_call
from sdeinfer.observation._library import library
from sdeinfer.observation._networks import called, one_by_one, torch_called, torch_network

TAPS = "recorded_taps"
"""Attribute of a Flax module: where to show what it gets and returns."""


def observe_torch_branches(
    make: Any,
    inputs: Any,
    branches: Callable[[Any], Iterable[tuple]],
    *,
    networks: int = 1,
    width: int | None = None,
    tokens: Any = None,
    pattern: Pattern = EVERY_TOKEN,
    progress: bool = False,
    seed: int = 0,
) -> xr.Dataset:
    """Observe the residual branches of PyTorch networks by forward hooks, with one network in memory at a time.

    Every network runs once, in evaluation mode and without gradients.

    Arguments:
        make: a module, which is one network; or a function that draws a network, from the seed it receives or from
            PyTorch's generators, which are seeded with it.
        inputs: the network's input: one positional argument, or a mapping of keyword arguments. What branches read and
            add must have shape (tokens, width) or (prompts, tokens, width), as with `batch_first=True`.
        branches: returns (kind, module) or (kind, reader, writer) of each branch, in the order of their calls. The
            writer is the last module before the sum: lambda model: [branch for block in model.transformer.h for branch
            in (("attention", block.attn), ("mlp", block.mlp))].
        networks: number of networks.
        width: n, to be checked; None for any.
        tokens: the tokens of each prompt to observe, see `observe`.
        pattern: which tokens each token attends to, see `observe`.
        progress: show a progress bar.
        seed: seed of the weights. The state of PyTorch's own generators is restored.

    Returns:
        The Dataset of `branches_dataset`, with `reads` "branch"; `name` is the reader's name in the model.

    Raises:
        InputError: as `BranchObserver.add`, for branches that are not called once and in order, several networks of one
            module, and if PyTorch is not installed.
    """
    torch = library("torch")
    given = isinstance(make, torch.nn.Module)

    def network(number: int, observer: BranchObserver) -> None:
        model = make if given else torch_network(torch, make, seed, number)
        names = {id(module): name for name, module in model.named_modules()}
        recorder = Recorder(observer, branches(model), names)
        with torch.no_grad(), evaluated(torch, model), _hooked(recorder, _sequence_first(model)):
            torch_called(torch, model, inputs)
        recorder.finish()

    return _observed(network, networks, given=given, progress=progress, width=width, tokens=tokens, pattern=pattern)


def observe_flax_branches(
    make: Any,
    inputs: Any,
    branches: Callable[[Any], Iterable[tuple]],
    *,
    networks: int = 1,
    width: int | None = None,
    tokens: Any = None,
    pattern: Pattern = EVERY_TOKEN,
    progress: bool = False,
    key: PRNGKeyArray | None = None,
) -> xr.Dataset:
    """Observe the residual branches of Flax (NNX) networks, as `observe_torch_branches` does those of PyTorch.

    Arguments:
        make: a module, which is one network; or a function that draws a network from `nnx.Rngs`.
        inputs: the network's input: one positional argument, or a mapping of keyword arguments.
        branches: returns (kind, module) or (kind, reader, writer) of each branch, in the order of their calls. A
            module inside `jax.vmap` is seen with the mapped axes first.
        networks: number of networks.
        width: n, to be checked; None for any.
        tokens: the tokens of each prompt to observe, see `observe`.
        pattern: which tokens each token attends to, see `observe`.
        progress: show a progress bar.
        key: PRNG key for the weights; None for a module.

    Returns:
        The Dataset of `observe_torch_branches`.

    Raises:
        InputError: as `observe_torch_branches`, for a function without a key, and if Flax is not installed.
    """
    nnx = library("flax.nnx")
    given = isinstance(make, nnx.Module)

    def network(number: int, observer: BranchObserver) -> None:
        # The taps are in a copy.
        model = nnx.clone(make if given else make(nnx.Rngs(_key(key, number))))
        model.eval()
        names = {id(module): ".".join(map(str, path)) for path, module in nnx.iter_graph(model)}
        recorder = Recorder(observer, branches(model), names)
        for branch, part, module in recorder.ends():
            if not isinstance(module, nnx.Module):
                raise InputError(f"branches: {recorder.label(branch)}: a module of Flax is needed, got {shown(module)}")
            if not hasattr(module, TAPS):
                setattr(module, TAPS, ())
                object.__setattr__(module, "__class__", _tapped_class(type(module)))
            setattr(module, TAPS, (*getattr(module, TAPS), (branch, part, recorder)))
        jax.block_until_ready(jax.tree.leaves(called(model, inputs)))
        recorder.finish()

    return _observed(network, networks, given=given, progress=progress, width=width, tokens=tokens, pattern=pattern)


def observe_equinox_branches(
    make: Any,
    inputs: Any,
    branches: Callable[[Any], Iterable[tuple]],
    *,
    networks: int = 1,
    width: int | None = None,
    tokens: Any = None,
    pattern: Pattern = EVERY_TOKEN,
    progress: bool = False,
    key: PRNGKeyArray | None = None,
) -> xr.Dataset:
    """Observe the residual branches of Equinox networks, as `observe_torch_branches` does those of PyTorch.

    Arguments:
        make: a module, which is one network; or a function that draws a network from a key.
        inputs: the network's input: one positional argument, or a mapping of keyword arguments.
        branches: returns (kind, module) or (kind, reader, writer) of each branch, in the order of their calls; the
            modules must be parts of the model. One inside `jax.vmap` is seen with the mapped axes first.
        networks: number of networks.
        width: n, to be checked; None for any.
        tokens: the tokens of each prompt to observe, see `observe`.
        pattern: which tokens each token attends to, see `observe`.
        progress: show a progress bar.
        key: PRNG key for the weights; None for a module.

    Returns:
        The Dataset of `observe_torch_branches`.

    Raises:
        InputError: as `observe_torch_branches`, and for a function without a key.
    """
    given = isinstance(make, eqx.Module)

    def network(number: int, observer: BranchObserver) -> None:
        model = eqx.nn.inference_mode(make if given else make(_key(key, number)))
        recorder = Recorder(observer, branches(model), _paths(model))
        for branch, part, _ in recorder.ends():
            # Looked up in the model with the taps so far: a writer may be inside a reader.
            where = functools.partial(_end, branches, branch, part)
            tapped = functools.partial(Tapped, (branch, part, recorder))
            try:
                model = eqx.tree_at(where, model, replace_fn=tapped)
            except (TypeError, ValueError) as error:
                raise InputError(f"branches: {recorder.label(branch)}: is not a module of the model") from error
        jax.block_until_ready(jax.tree.leaves(called(model, inputs)))
        recorder.finish()

    return _observed(network, networks, given=given, progress=progress, width=width, tokens=tokens, pattern=pattern)


def _observed(
    network: Callable[[int, BranchObserver], None], networks: int, *, given: bool, progress: bool, **settings: Any
) -> xr.Dataset:
    """Observe networks one after another, each by a `BranchObserver` with these settings."""
    if given and networks > 1:
        raise InputError(f"networks: a module is one network, got {networks}: pass a function that draws them")

    def observed(number: int) -> xr.Dataset:
        observer = BranchObserver(**settings, network=number)
        network(number, observer)
        return observer.dataset()

    return joined_networks(one_by_one(observed, networks, progress=progress))


def _key(key: PRNGKeyArray | None, number: int) -> PRNGKeyArray:
    if key is None:
        raise InputError("key: a function that draws networks needs one, as jax.random.key(0)")
    return jr.fold_in(key, number)


@contextmanager
def evaluated(torch: Any, model: Any) -> Iterator[None]:
    """Evaluation mode, without the kernels that replace the modules of a Transformer's block."""
    modes = [(module, module.training) for module in model.modules()]
    mha = getattr(torch.backends, "mha", None)
    fast = mha.get_fastpath_enabled() if mha else None
    model.eval()
    try:
        if mha:
            mha.set_fastpath_enabled(False)  # noqa: FBT003
        yield
    finally:
        if mha:
            mha.set_fastpath_enabled(fast)
        for module, mode in modes:
            module.training = mode


@contextmanager
def _hooked(recorder: Recorder, sequence_first: str | None) -> Iterator[None]:
    """Hooks of PyTorch that show what branches read and add to a recorder."""

    def before(number: int, module: Any, arguments: tuple, keywords: dict) -> None:
        place = first_array(arguments, keywords)
        del module
        if place is None:
            return  # `finish` says that nothing was seen
        U = keywords[place] if isinstance(place, str) else arguments[place]
        if sequence_first is not None and len(U.shape) == 3:
            raise InputError(f"branches: {sequence_first} takes (tokens, batch, width): make it with batch_first=True")
        recorder.see(number, "input", U)

    def after(number: int, module: Any, arguments: tuple, output: Any) -> None:
        del module, arguments
        recorder.see(number, "increment", output[0] if isinstance(output, tuple) else output)

    with ExitStack() as hooks:
        for number, part, module in recorder.ends():
            if part == "input":
                hook = module.register_forward_pre_hook(functools.partial(before, number), with_kwargs=True)
            else:
                hook = module.register_forward_hook(functools.partial(after, number))
            hooks.callback(hook.remove)
        yield


def _sequence_first(model: Any) -> str | None:
    """The name of a module whose first dimension is that of the tokens, even in a batch; None if there is none."""
    named = ((name or "the model", module) for name, module in model.named_modules())
    return next((name for name, module in named if getattr(module, "batch_first", True) is False), None)


@functools.cache
def _tapped_class(kind: type) -> type:
    """A class of Flax modules whose calls are seen; a module keeps its identity, and so every reference to it."""

    def call(self: Any, *arguments: Any, **keywords: Any) -> Any:
        return tapped_call(functools.partial(kind.__call__, self), getattr(self, TAPS), arguments, keywords)

    return type(kind)(kind.__name__, (kind,), {"__call__": call}, pytree=getattr(kind, "_pytree__is_pytree", True))


def _end(branches: Callable[[Any], Iterable[tuple]], branch: int, part: str, model: Any) -> Any:
    """The module where a part of a branch is seen."""
    _, reader, *writer = list(branches(model))[branch]
    return writer[0] if writer and part == "increment" else reader


def _paths(model: eqx.Module) -> dict[int, str]:
    """The place of each module in the model, by its id."""
    paths = {}

    def note(path: tuple, node: Any) -> bool:
        if isinstance(node, eqx.Module):
            paths[id(node)] = jax.tree_util.keystr(path, simple=True, separator=".")
        return False

    jax.tree_util.tree_flatten_with_path(model, is_leaf=note, is_leaf_takes_path=True)
    return paths
