"""Reduce residual streams, or models that produce them, to the Dataset of their branches."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import xarray as xr

from sdeinfer._files import InputError
from sdeinfer.covariance import EVERY_TOKEN, Pattern
from sdeinfer.observation._arrays import as_array, in_order
from sdeinfer.observation._branch_hooks import observe_equinox_branches, observe_flax_branches, observe_torch_branches
from sdeinfer.observation._branch_observer import BranchObserver, joined_branches
from sdeinfer.observation._observe import states_of
from sdeinfer.observation._observer import Observer


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
        if isinstance(hidden_states, xr.DataArray):
            hidden_states = in_order(hidden_states, ("network", "layer", "prompt", "token", "width"), "hidden_states")
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
