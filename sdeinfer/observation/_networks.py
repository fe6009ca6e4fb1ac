"""Networks of PyTorch and JAX, observed by the record of a pass: one network, and one layer's arrays, in memory.

Tests: `tests/observation/test_networks.py`.
"""

import contextlib
import functools
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import xarray as xr

from sdeinfer._arguments import at_least_one
from sdeinfer._files import InputError
from sdeinfer._progress import ProgressBar
from sdeinfer.blocks._attributes import BLOCKS, text_of
from sdeinfer.blocks.reading._of import stack_from, variance_of
from sdeinfer.blocks.reading._reader import StackReader
from sdeinfer.blocks.reading._values import pattern_of_mask
from sdeinfer.covariance import Pattern
from sdeinfer.observation._arrays import as_array
from sdeinfer.observation._branch_observer import BranchObserver, joined_branches
from sdeinfer.observation._observer import Observer, joined_observers
from sdeinfer.passes._account import Account
from sdeinfer.passes._attention import attended, softmaxes_in
from sdeinfer.passes._models import is_function, made
from sdeinfer.passes._passes import Passes
from sdeinfer.passes._record import Node
from sdeinfer.passes._taps import Branch, Taps, branches_of, in_rows, products_in_turn, states_of

NO_BLOCKS, MEASURED = "no_blocks", "measured"
"""Attributes of a Dataset of branches: why it has no blocks, and whether weights were measured."""


type States = tuple[list[Node], Callable[[Any], Any]]
"""The nodes of hidden states, and a function that places their values as (tokens, width) or with prompts before."""


def observe_networks(
    model: Any,
    inputs: Any,
    *,
    networks: int,
    stream: str | None,
    pattern: Pattern | None,
    progress: bool,
    seed: int,
    **choice: Any,
) -> xr.Dataset:
    """The covariances of the residual streams of networks, before the first layer and after each; see `observe`."""
    passes = Passes(inputs, networks)
    states = functools.cache(functools.partial(_states, stream=stream))  # of networks of one kind once

    def observed(number: int) -> Observer:
        def look(account: Account) -> SeenStream:
            return SeenStream(account, states(account), pattern, choice | {"first_network": number})

        return passes.show(_drawn(model, seed, number, networks), look).finished()

    return joined_observers(_one_by_one(observed, networks, progress=progress))


class SeenStream:
    """The hidden states of a network: its residual stream, or what the matrices of one without a stream return."""

    def __init__(self, account: Account, states: States, pattern: Pattern | None, settings: dict[str, Any]):
        self.taps, self.settings, self.mask = Taps(), settings, _Mask(account, pattern)
        self.observer: Observer | None = None
        nodes_of_layers, self.placed = states
        for layer, node in enumerate(nodes_of_layers):
            nodes = {"X": node} | (self.mask.nodes if layer == 0 else {})
            self.taps.see(f"layer {layer}", nodes, self._add)

    def finished(self) -> Observer:
        """The observer, without the last hidden states."""
        self.taps.require_seen()
        assert self.observer is not None
        self.observer.before = None  # as many observers as networks are joined
        return self.observer

    def _add(self, values: dict[str, Any]) -> None:
        if self.observer is None:
            self.observer = Observer(**self.settings, pattern=self.mask.read(values))
        self.observer.add(self.placed(values["X"])[None])


def observe_branches_of(
    model: Any,
    inputs: Any,
    *,
    networks: int,
    stream: str | None,
    pattern: Pattern | None,
    recipe: Any,
    progress: bool,
    seed: int,
    **choice: Any,
) -> xr.Dataset:
    """The residual branches of networks, and the blocks that they are; see `observe_branches`."""
    passes, described = Passes(inputs, networks), {}
    # Networks of one kind share their branches.
    branches = functools.cache(functools.partial(branches_of, stream=stream))

    def observed(number: int) -> xr.Dataset:
        def look(account: Account) -> SeenBranches:
            one_item = inputs is None
            settings = choice | {"network": number}
            return SeenBranches(account, branches(account), pattern, settings, one_item=one_item, described=number == 0)

        network = _drawn(model, seed, number, networks)
        seen = passes.show(network, look)
        if number == 0:
            described.update(seen.blocks(network, recipe))
        return seen.finished()

    return joined_branches(_one_by_one(observed, networks, progress=progress)).assign_attrs(described)


class SeenBranches:
    """The inputs and increments of a network's branches, and if asked for the blocks that they are."""

    def __init__(
        self,
        account: Account,
        branches: list[Branch],
        pattern: Pattern | None,
        settings: dict[str, Any],
        *,
        one_item: bool,
        described: bool,
    ):
        self.account, self.settings, self.one_item = account, settings, one_item
        self.placed, self.mask, self._taps = in_rows(account, branches), _Mask(account, pattern), Taps()
        self.observer: BranchObserver | None = None
        self.reader: StackReader | None = None
        self.fault = ""
        nodes_of_mask = self.mask.nodes
        for branch in branches:
            branch.require_one_reading()
            nodes = {"reads": branch.reads, "adds": branch.adds} | nodes_of_mask
            self._taps.see(branch.where, nodes, functools.partial(self._add, branch))
            if branch.kind == "attention":
                nodes_of_mask = {}  # it was seen by then
        if described:
            try:
                self.reader = StackReader(account, branches)
            except InputError as error:  # increments are observed all the same
                self.fault = str(error)

    @property
    def taps(self) -> Taps:
        """Those of the branches, and of the blocks, which may be hidden."""
        return self._taps if self.reader is None else Taps().with_others(self._taps).with_others(self.reader.taps)

    def blocks(self, network: Any, recipe: Any) -> dict[str, Any]:
        """The blocks as attributes, or the reason why there are none."""
        if self.reader is None:
            return {NO_BLOCKS: self.fault}
        try:
            text = text_of(stack_from(self.reader, variance_of(self.account, network, recipe)))
        except InputError as error:
            return {NO_BLOCKS: str(error)}
        return {BLOCKS: text} | ({MEASURED: 1.0} if recipe is None else {})

    def finished(self) -> xr.Dataset:
        """The Dataset of the network."""
        self._taps.require_seen()
        assert self.observer is not None
        return self.observer.dataset()

    def _add(self, branch: Branch, values: dict[str, Any]) -> None:
        if self.observer is None:
            self.observer = BranchObserver(**self.settings, pattern=self.mask.read(values))
        U, D = values["reads"], values["adds"]
        if np.prod(U.shape) != np.prod(D.shape):
            raise InputError(f"model: {branch.where}: reads shape {tuple(U.shape)}, adds {tuple(D.shape)}")
        U, D = self.placed(U), self.placed(D) * branch.factor
        if self.one_item and len(U.shape) == 3:
            U, D = U[0], D[0]
        self.observer.add(U, D, kind=branch.kind, name=branch.name)


def _drawn(model: Any, seed: int, number: int, networks: int) -> Any:
    """A network by a seed of its own; the state of PyTorch's generators is restored."""
    if networks > 1 and not is_function(model):
        raise InputError(f"networks: a module is one network, got {networks}: pass a function that draws them")
    torch = sys.modules.get("torch")
    network_seed = int(np.random.SeedSequence(seed).generate_state(number + 1)[number])
    with contextlib.nullcontext() if torch is None else torch.random.fork_rng(devices=[]):
        return made(model, network_seed)


def _one_by_one[Part](observed: Callable[[int], Part], networks: int, *, progress: bool) -> list[Part]:
    at_least_one(networks=networks)
    parts = []
    with ProgressBar(total=networks, desc="networks", show=progress) as bar:
        for number in range(networks):
            parts.append(observed(number))
            bar.update()
    return parts


def _states(account: Account, stream: str | None) -> States:
    """The hidden states of a residual stream; of a network without one those between matrices."""
    if account.streams or stream is not None:
        branches = branches_of(account, stream)
        return states_of(branches), in_rows(account, branches)
    states = products_in_turn(account)
    if not states:
        raise InputError("model: no residual stream and no matrix is seen in its pass")
    return states, lambda values: values


class _Mask:
    """Which tokens attend to which, read from the probabilities of the first attention unless it is given."""

    def __init__(self, account: Account, given: Pattern | None):
        softmaxes = softmaxes_in(account.graph, account.graph.record.nodes) if given is None else []
        self.given, self.nodes = given, {"probabilities": softmaxes[0]} if softmaxes else {}

    def read(self, values: dict[str, Any]) -> Pattern:
        """The pattern, once probabilities were seen."""
        if self.given is not None:
            return self.given
        if "probabilities" not in values:
            return Pattern()
        mask = attended(as_array(values["probabilities"], "probabilities"))
        if mask is None:
            raise InputError("pattern: heads or prompts have masks of their own: give pattern=, or one prompt")
        return pattern_of_mask(mask)
