"""Observe residual branches: of a residual stream, or of networks.

Tests: `tests/observation/test_branches.py`.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import xarray as xr

from sdeinfer._files import InputError
from sdeinfer.covariance import Pattern
from sdeinfer.covariance._pattern import EVERY_TOKEN
from sdeinfer.observation._arrays import as_array
from sdeinfer.observation._branch_observer import BranchObserver, joined_branches
from sdeinfer.observation._networks import observe_branches_of
from sdeinfer.observation._observe import layers_of_states
from sdeinfer.observation._observer import Observer
from sdeinfer.passes._models import is_network


def observe_branches(
    hidden_states: Any,
    inputs: Any = None,
    width: int | None = None,
    *,
    tokens: Any = None,
    pattern: Pattern | None = None,
    networks: int | None = None,
    stream: str | None = None,
    recipe: Any = None,
    seed: int = 0,
    progress: bool = True,
) -> xr.Dataset:
    """Reduce what residual branches read and add to covariances, of networks or of a residual stream.

    `observe_branches(model, inputs)` runs a network of PyTorch, Flax or Equinox twice: a first pass shows its residual
    stream and its branches, a second one their values. The Dataset says which blocks they are, see `si.blocks.of`, so
    that `si.fit(si.models.branches, data)` needs no architecture.

    `observe_branches(hidden_states, kinds)` takes the stream before the first and after every branch; increments are
    its differences. If branches arrive one at a time, pass them to a `BranchObserver`. The networks must be
    independent, each with weights of its own.

    Arguments:
        hidden_states: a network, a function that makes one of a seed, a `key` or `rngs`, or (function, parameters). Or
            the stream, as `observe` takes it: shape (networks, branches + 1, tokens, width) or (networks, branches + 1,
            prompts, tokens, width), or one array after another. Between two of them must be one branch, added without a
            norm or a factor.
        inputs: the network's input, see `si.audit`; None for tokens, images or vectors that fit. Of hidden states, the
            kinds of the branches, repeated in turn: ("attention", "mlp") for the blocks of a Transformer.
        width: n, to be checked; None for any.
        tokens: the tokens of each prompt to observe, see `observe`.
        pattern: which tokens each token attends to, see `observe`.
        networks: number of networks to draw; None for 1.
        stream: see `observe`.
        recipe: a recipe of `si.audit`, or its name, for standard deviations that are declared, not measured.
        seed: seed of the networks.
        progress: see `observe`.

    Returns:
        The Dataset of `branches_dataset`. Of networks, the attribute `blocks` holds their blocks, or `no_blocks` the
        reason why there are none; of hidden states `reads` is "stream".

    Raises:
        InputError: as `BranchObserver.add`, for kinds that do not divide the branches, and for networks without a
            residual stream of branches that each read one tensor.
    """
    if is_network(hidden_states):
        draws = {"networks": 1 if networks is None else networks, "stream": stream, "seed": seed, "progress": progress}
        choice = {"tokens": tokens, "pattern": pattern, "width": width}
        return observe_branches_of(hidden_states, inputs, recipe=recipe, **draws, **choice)
    if networks is not None:
        raise InputError("networks: are drawn by a function, and hidden states were given")
    return _of_stream(hidden_states, inputs, width, tokens=tokens, pattern=pattern or EVERY_TOKEN)


def _of_stream(
    hidden_states: Any, kinds: Sequence[str], width: int | None, *, tokens: Any, pattern: Pattern
) -> xr.Dataset:
    """The branches between states of a stream."""
    if not kinds or isinstance(kinds, str):
        raise InputError(f"kinds: a list of at least one kind is needed, got {kinds!r}")
    # The stream itself is observed for its checks, and for the warning of rounding, which grows in the differences.
    stream = Observer(width, tokens=tokens, pattern=pattern)
    observers: list[BranchObserver] = []
    before = None
    for branch, state in enumerate(layers_of_states(hidden_states), start=-1):
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
