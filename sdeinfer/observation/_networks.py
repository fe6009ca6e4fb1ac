"""Networks of PyTorch and JAX, observed by the record of a pass: one network, and one layer's arrays, in memory.

Tests: `tests/observation/test_networks.py`.
"""

import contextlib
import inspect
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import xarray as xr

from sdeinfer._arguments import at_least_one
from sdeinfer._files import InputError
from sdeinfer._progress import ProgressBar
from sdeinfer.blocks._attributes import text_of
from sdeinfer.blocks._of import stack_from, variance_of
from sdeinfer.blocks._reader import StackReader
from sdeinfer.covariance import CAUSAL, Pattern
from sdeinfer.observation._arrays import as_array
from sdeinfer.observation._branch_observer import BranchObserver, joined_branches
from sdeinfer.observation._observer import Observer, joined
from sdeinfer.passes._account import Account
from sdeinfer.passes._attention import attended, logits_of
from sdeinfer.passes._models import made
from sdeinfer.passes._passes import Passes
from sdeinfer.passes._record import Node
from sdeinfer.passes._taps import Taps, branches_of, in_rows, products_in_turn, states_of, stream_of

BLOCKS, NO_BLOCKS, MEASURED = "blocks", "no_blocks", "measured"
"""Attributes of a Dataset of branches: its blocks as text, or why there are none; and whether weights were measured."""


def observe_networks(
    model: Any,
    inputs: Any = None,
    *,
    networks: int = 1,
    stream: str | None = None,
    pattern: Pattern | None = None,
    progress: bool = True,
    seed: int = 0,
    **settings: Any,
) -> xr.Dataset:
    """The covariances of the residual streams of networks, before the first layer and after each; see `observe`."""
    passes = Passes(inputs, networks)

    def observed(number: int) -> Observer:
        observer, taps = Observer(first_network=number), Taps()

        def plan(account: Account) -> Taps:
            nonlocal taps
            taps = Taps()
            states, placed = _states(account, stream)
            mask = _Mask(account, pattern)

            def add(values: dict[str, Any]) -> None:
                nonlocal observer
                if values["number"] == 0:
                    observer = Observer(**settings, pattern=mask.read(values), first_network=number)
                observer.add(placed(values["X"])[None])

            for layer, node in enumerate(states):
                nodes = {"X": node} | (mask.nodes if layer == 0 else {})
                taps.see(f"layer {layer}", nodes, lambda values, layer=layer: add(values | {"number": layer}))
            return taps

        passes.show(_drawn(model, seed, number, networks), plan)
        taps.require_seen()
        observer.before = None  # as many observers as networks are joined
        return observer

    return joined(_one_by_one(observed, networks, progress=progress))


def observe_branches_of(
    model: Any,
    inputs: Any = None,
    *,
    networks: int = 1,
    stream: str | None = None,
    pattern: Pattern | None = None,
    recipe: Any = None,
    progress: bool = True,
    seed: int = 0,
    **settings: Any,
) -> xr.Dataset:
    """What the residual branches of networks read and add, and the blocks that they are; see `observe_branches`."""
    described: dict[str, Any] = {}
    passes = Passes(inputs, networks)

    def observed(number: int) -> xr.Dataset:
        network = _drawn(model, seed, number, networks)
        observer, reader, taps = BranchObserver(network=number), None, Taps()

        def plan(account: Account) -> Taps:
            nonlocal reader, taps
            taps = Taps()
            chain = stream_of(account, stream)
            placed, mask, started = in_rows(account, chain), _Mask(account, pattern), False

            def add(branch: Any, values: dict[str, Any]) -> None:
                nonlocal observer, started
                if not started:
                    observer = BranchObserver(**settings, pattern=mask.read(values), network=number)
                    started = True
                U, D = values["reads"], values["adds"]
                if np.prod(U.shape) != np.prod(D.shape):
                    raise InputError(f"model: {branch.where}: reads shape {tuple(U.shape)}, adds {tuple(D.shape)}")
                U, D = (placed(each) if inputs is not None else _first(placed(each)) for each in (U, D))
                observer.add(U, D * branch.factor, kind=branch.link.kind, name=branch.name)

            attends = False
            for branch in branches_of(account, chain):
                branch.require_one_reading()
                nodes = {"reads": branch.reads, "adds": branch.adds} | ({} if attends else mask.nodes)
                taps.see(branch.where, nodes, lambda values, branch=branch: add(branch, values))
                attends |= branch.link.kind == "attention"
            if number == 0:
                with _noted(described):
                    reader = StackReader(account, chain)
                    reader.tap()
            return taps if reader is None else Taps().with_others(taps).with_others(reader.taps)

        account = passes.show(network, plan)
        taps.require_seen()
        if reader is not None:
            with _noted(described):
                described[BLOCKS] = text_of(stack_from(reader, variance_of(account, network, recipe)))
                described.update({} if recipe is not None else {MEASURED: 1.0})
        return observer.dataset()

    data = joined_branches(_one_by_one(observed, networks, progress=progress))
    return data.assign_attrs(described)


@contextlib.contextmanager
def _noted(described: dict[str, Any]) -> Any:
    """Keep the reason why a network is no stack of blocks, which its increments do not need."""
    try:
        yield
    except InputError as error:
        described[NO_BLOCKS] = str(error)


def _drawn(model: Any, seed: int, number: int, networks: int) -> Any:
    """A network by a seed of its own; the state of PyTorch's generators is restored."""
    draws = (
        inspect.isroutine(model) or isinstance(model, type) or (callable(model) and type(model).__name__ == "partial")
    )
    if not draws and networks > 1:
        raise InputError(f"networks: a module is one network, got {networks}: pass a function that draws them")
    torch = sys.modules.get("torch")
    own = int(np.random.SeedSequence(seed).generate_state(number + 1)[number])
    with contextlib.nullcontext() if torch is None else torch.random.fork_rng(devices=[]):
        return made(model, own)


def _one_by_one[Part](observed: Callable[[int], Part], networks: int, *, progress: bool) -> list[Part]:
    at_least_one(networks=networks)
    found = []
    with ProgressBar(total=networks, desc="networks", show=progress) as bar:
        for number in range(networks):
            found.append(observed(number))
            bar.update()
    return found


def _states(account: Account, stream: str | None) -> tuple[list[Node], Callable[[Any], Any]]:
    """The nodes of the hidden states, and how they are placed; of a network without a stream those between matrices."""
    if account.streams or stream is not None:
        chain = stream_of(account, stream)
        return states_of(branches_of(account, chain)), in_rows(account, chain)
    states = products_in_turn(account)
    if not states:
        raise InputError("model: no residual stream and no matrix is seen in its pass")
    return states, lambda values: values


def _first(values: Any) -> Any:
    return values[0] if len(values.shape) == 3 else values


class _Mask:
    """Which tokens attend to which, read from the probabilities of the first attention unless it is given."""

    def __init__(self, account: Account, given: Pattern | None):
        softmaxes = (x for x in account.graph.record.nodes if x.kind == "softmax" and logits_of(account.graph, x))
        first = None if given is not None else next(softmaxes, None)
        self.given, self.nodes = given, {} if first is None else {"probabilities": first}

    def read(self, values: dict[str, Any]) -> Pattern:
        """The pattern, once probabilities were seen."""
        if self.given is not None:
            return self.given
        if "probabilities" not in values:
            return Pattern()
        mask = attended(as_array(values["probabilities"], "probabilities"))
        if mask is None:
            raise InputError("pattern: heads or prompts have masks of their own: give pattern=, or one prompt")
        return CAUSAL if np.array_equal(mask, np.tri(len(mask), dtype=bool)) else Pattern.of_mask(mask)
