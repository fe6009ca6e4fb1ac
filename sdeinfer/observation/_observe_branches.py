"""Reduce residual streams, or networks that produce them, to the Dataset of their branches.

A branch is (kind, module), or (kind, reader, writer): U is the first array that the reader gets, D what the writer
returns, or the first entry of a tuple. Tests: `tests/observation/test_capture.py`.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import equinox as eqx
import jax.random as jr
import numpy as np
import xarray as xr
from jaxtyping import PRNGKeyArray

from sdeinfer._arguments import shown
from sdeinfer._files import InputError
from sdeinfer.covariance import Pattern
from sdeinfer.covariance._pattern import EVERY_TOKEN
from sdeinfer.observation._arrays import as_array, library
from sdeinfer.observation._branch_observer import BranchObserver, joined_branches
from sdeinfer.observation._capture import (
    Recorder,
    Tap,
    equinox_pass,
    flax_pass,
    module_paths,
    one_by_one,
    torch_names,
    torch_network,
    torch_pass,
)
from sdeinfer.observation._observe import states_of
from sdeinfer.observation._observer import Observer


def observe_torch_branches(
    make: Any,
    inputs: Any,
    branches: Callable[[Any], Iterable[tuple]],
    *,
    networks: int = 1,
    width: int | None = None,
    tokens: Any = None,
    pattern: Pattern = EVERY_TOKEN,
    progress: bool = True,
    seed: int = 0,
) -> xr.Dataset:
    """Observe the residual branches of PyTorch networks by forward hooks, with one network in memory at a time.

    Every network runs once, in evaluation mode and without gradients.
    """
    torch = library("torch")
    given = isinstance(make, torch.nn.Module)

    def network(number: int, observer: BranchObserver) -> None:
        model = make if given else torch_network(torch, make, seed, number)
        named = ((name or "the model", module) for name, module in model.named_modules())
        sequence_first = next((name for name, module in named if getattr(module, "batch_first", True) is False), None)
        torch_pass(model, inputs, _recorder(observer, branches(model), torch_names(model), sequence_first))

    settings = {"width": width, "tokens": tokens, "pattern": pattern, "networks": networks, "progress": progress}
    return _observed(network, given=given, **settings)


def observe_flax_branches(
    make: Any,
    inputs: Any,
    branches: Callable[[Any], Iterable[tuple]],
    *,
    key: PRNGKeyArray | None = None,
    **settings: Any,
) -> xr.Dataset:
    """Observe the residual branches of Flax (NNX) networks, with the arguments of `observe_branches.torch`.

    A function draws a network from `nnx.Rngs` of a part of the key; a module inside `jax.vmap` is seen with the mapped
    axes first.
    """
    nnx = library("flax.nnx")
    given = isinstance(make, nnx.Module)

    def network(number: int, observer: BranchObserver) -> None:
        model = nnx.clone(make if given else make(nnx.Rngs(_key(key, number))))
        model.eval()
        names = {id(module): ".".join(map(str, path)) for path, module in nnx.iter_graph(model)}
        flax_pass(model, inputs, _recorder(observer, branches(model), names))

    return _observed(network, given=given, **settings)


def observe_equinox_branches(
    make: Any,
    inputs: Any,
    branches: Callable[[Any], Iterable[tuple]],
    *,
    key: PRNGKeyArray | None = None,
    **settings: Any,
) -> xr.Dataset:
    """Observe the residual branches of Equinox networks, with the arguments of `observe_branches.torch`.

    A function draws a network from a part of the key; the modules of branches must be parts of the model, and one
    inside `jax.vmap` is seen with the mapped axes first.
    """
    given = isinstance(make, eqx.Module)

    def network(number: int, observer: BranchObserver) -> None:
        model = eqx.nn.inference_mode(make if given else make(_key(key, number)))
        equinox_pass(model, inputs, _recorder(observer, branches(model), module_paths(model)))

    return _observed(network, given=given, **settings)


class ObserveBranches:
    """Reduce the residual stream before the first and after every branch: `observe_branches(hidden_states, kinds)`.

    Increments are differences of the stream. `observe_branches.equinox`, `observe_branches.flax` and
    `observe_branches.torch` run models and observe what their branches read and add; if branches arrive one at a time,
    pass them to a `BranchObserver`. The networks must be independent, each with weights of its own.

    Arguments:
        hidden_states: the stream, as `observe` takes it: shape (networks, branches + 1, tokens, width) or (networks,
            branches + 1, prompts, tokens, width), or one array after another. Between two of them must be one branch,
            added without a norm or a factor.
        kinds: the kinds of the branches, repeated in turn: ("attention", "mlp") for the blocks of a Transformer.
        width: n, to be checked; None for any.
        tokens: the tokens of each prompt to observe, see `observe`.
        pattern: which tokens each token attends to, see `observe`.

    Returns:
        The Dataset of `branches_dataset`, with `reads` "stream".

    Raises:
        InputError: as `BranchObserver.add`, and for kinds that do not divide the branches.
    """

    equinox = staticmethod(observe_equinox_branches)
    flax = staticmethod(observe_flax_branches)
    torch = staticmethod(observe_torch_branches)

    def __call__(
        self,
        hidden_states: Any,
        kinds: Sequence[str],
        width: int | None = None,
        *,
        tokens: Any = None,
        pattern: Pattern = EVERY_TOKEN,
    ) -> xr.Dataset:
        """Reduce hidden states: see the class."""
        if not kinds or isinstance(kinds, str):
            raise InputError(f"kinds: a list of at least one kind is needed, got {kinds!r}")
        # The stream itself is observed for its checks, and for the warning of rounding, which grows in the differences.
        stream = Observer(width, tokens=tokens, pattern=pattern)
        observers: list[BranchObserver] = []
        before = None
        for branch, state in enumerate(states_of(hidden_states), start=-1):
            stream.add(state)
            after = as_array(state, "hidden_states").astype(np.float64)
            if before is None:
                settings = {"tokens": tokens, "pattern": pattern, "reads": "stream"}
                observers = [BranchObserver(width, **settings, network=number) for number in range(len(after))]
            else:
                for observer, U, X in zip(observers, before, after, strict=True):
                    observer.add(U, X - U, kind=kinds[branch % len(kinds)])
            before = after
        stream.dataset()
        branches = len(stream.covariances) - 1
        if branches % len(kinds):
            raise InputError(f"kinds: {len(kinds)} kinds do not divide the {branches} branches of the hidden states")
        return joined_branches(observers)


observe_branches = ObserveBranches()


def _observed(
    network: Callable[[int, BranchObserver], None],
    *,
    given: bool,
    networks: int = 1,
    progress: bool = True,
    **settings: Any,
) -> xr.Dataset:
    """Observe networks one after another, each by a `BranchObserver` with these settings."""
    if given and networks > 1:
        raise InputError(f"networks: a module is one network, got {networks}: pass a function that draws them")

    def observed(number: int) -> xr.Dataset:
        observer = BranchObserver(**settings, network=number)
        network(number, observer)
        return observer.dataset()

    return joined_branches(one_by_one(observed, networks, progress=progress))


def _key(key: PRNGKeyArray | None, number: int) -> PRNGKeyArray:
    if key is None:
        raise InputError("key: a function that draws networks needs one, as jax.random.key(0)")
    return jr.fold_in(key, number)


def _recorder(
    observer: BranchObserver, branches: Iterable[Any], names: Mapping[int, str], sequence_first: str | None = None
) -> Recorder:
    """Taps at the reader and at the writer of each branch, in turn."""
    labels, taps, read = [], [], []
    for kind, reader, writer in map(_ends, branches):
        labels.append((kind, names.get(id(reader), f"{kind}.{len(labels)}")))
        where = f"network {observer.network}, branch {len(labels) - 1} ({labels[-1][1]})"
        taps += [Tap(where, "input", reader), Tap(where, "increment", writer)]
    if not taps:
        raise InputError("branches: no branch was given")

    def take(number: int, values: np.ndarray) -> None:
        if taps[number].part == "input":
            if sequence_first is not None and values.ndim == 3:
                raise InputError(
                    f"branches: {sequence_first} takes (tokens, batch, width): make it with batch_first=True"
                )
            read[:] = [np.array(values)]  # a copy: modules change U in place
            return
        if values.shape != read[0].shape:
            shapes = f"reads shape {read[0].shape} and adds {values.shape}"
            raise InputError(f"branches: {taps[number].where}: {shapes}: one shape is needed")
        kind, name = labels[number // 2]
        observer.add(read[0], values, kind=kind, name=name)

    return Recorder("branches", taps, take)


def _ends(branch: Any) -> tuple[str, Any, Any]:
    """The kind, the reader and the writer of a branch."""
    if not isinstance(branch, tuple | list) or len(branch) not in (2, 3) or not isinstance(branch[0], str):
        raise InputError(f"branches: (kind, module) or (kind, reader, writer) is needed, got {shown(branch)}")
    return branch[0], branch[1], branch[-1]
