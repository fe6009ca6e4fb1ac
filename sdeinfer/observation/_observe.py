"""Reduce hidden states or networks to the covariances of the residual stream, or of what branches read and add."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import xarray as xr
from numpy.typing import ArrayLike

from sdeinfer._arguments import shown
from sdeinfer._files import InputError
from sdeinfer.covariance import Pattern
from sdeinfer.covariance._pattern import EVERY_TOKEN
from sdeinfer.observation._arrays import as_array, in_order
from sdeinfer.observation._branch_observer import BranchObserver, joined_branches
from sdeinfer.observation._doubts import require_layers
from sdeinfer.observation._networks import observe_branches_of, observe_networks
from sdeinfer.observation._observer import Observer
from sdeinfer.passes._models import is_network


def observe(
    hidden_states: Any,
    inputs: Any = None,
    width: int | None = None,
    *,
    tokens: Any = None,
    prompts: Any = None,
    pattern: Pattern | None = None,
    layers: ArrayLike | None = None,
    networks: int | None = None,
    stream: str | None = None,
    seed: int = 0,
    progress: bool = True,
) -> xr.Dataset:
    """Reduce hidden states, or networks, to their neural covariances V = XXᵀ/n (Definition 3.1).

    `observe(make, inputs, networks=64)` draws networks of PyTorch, Flax or Equinox and observes the residual stream
    before the first and after each layer, or of a network without one what its matrices return, with one network and
    one layer in memory. If layers arrive one at a time, pass them to an `Observer`. Hidden states of any type are read
    one layer at a time, as float32 or float64; `LowPrecisionWarning` reports when the rounding of float16 or bfloat16
    matters.

    The networks must be independent, each with weights of its own. **Prompts** of one network share its weights; if
    they are passed as networks, the same weights count several times (`check` finds that if prompts share tokens). The
    tokens of all prompts have one covariance; the attributes `prompts` and `causal` record which tokens each token
    attends to, and a fit uses them. A fit with prompts or a mask costs O(p³) for each layer of each network,
    p = m(m + 1)/2: 8 tokens take seconds, 12 take minutes, and `LARGEST_TOKENS` is the bound.

    A subset of the prompts has a law of its own; so has a subset of the tokens if they contain all tokens that they
    attend to. Others are not Markov processes, and a fit of attention to them is refused. See `take` for covariances
    that were observed already.

    Arguments:
        hidden_states: hidden states after every layer, the initial ones first, as floating-point numbers or integers of
            NumPy, JAX, PyTorch, or any library with `__array__` or DLPack. Either one array of shape (networks, layers,
            tokens, width) or (networks, layers, prompts, tokens, width); or a list, tuple or iterator of layers, each
            of shape (networks, tokens, width) or (networks, prompts, tokens, width). An xarray.DataArray with the
            dimensions network, layer, (prompt,) token and width may have them in any order; its coordinate `layer`
            holds the layer numbers, and coordinates over `network` are kept. The `hidden_states` of Hugging
            Face models are such a tuple, whose batch holds prompts of one network: use
            `observe(state[None] for state in output.hidden_states)`. In most of these models the last entry has passed
            the final normalisation: leave it out. Or a function that makes a network of a seed, a `key` or `rngs`; or a
            network, or (function, parameters).
        inputs: the input of networks, see `si.audit`; of hidden states, their width.
        width: n, the number of features of the hidden states, to be checked; None for any.
        tokens: the tokens of each prompt to observe, as indices, a mask or a slice; None for all.
        prompts: the prompts to observe, likewise.
        pattern: which tokens each token attends to, as `si.CAUSAL` or, if the tokens of several prompts follow one
            another, `si.Pattern(prompts=(3, 5))`; a dimension of prompts is added to it. None for what the attention
            of networks shows, or for all tokens.
        layers: layer numbers of `hidden_states`; None for 0, 1, 2, ….
        networks: number of networks to draw; None for 1.
        stream: a glob of parameter names that finds the stream of networks with several, as "decoder.*".
        seed: seed of the networks.
        progress: whether a bar on a terminal or in a notebook counts networks.

    Returns:
        The Dataset of `covariance_dataset`, with the attention pattern in its attributes, and the coordinate `shortcut`
        over networks and layers: ⟨X_ℓ, X_ℓ₋₁⟩/⟨X_ℓ₋₁, X_ℓ₋₁⟩, on average λ^k for a shaped layer of k residual branches;
        `check` compares it with γ.

    Raises:
        InputError: for other shapes, layers that differ in shape, networks in the place of layers, fewer features than
            tokens, masked entries, and numbers that are not real and finite, with layer and network.
    """
    if is_network(hidden_states):
        draws = {"networks": 1 if networks is None else networks, "stream": stream, "seed": seed, "progress": progress}
        choice = {"tokens": tokens, "prompts": prompts, "pattern": pattern, "width": width}
        return observe_networks(hidden_states, inputs, **draws, **choice)
    if networks is not None:
        raise InputError("networks: are drawn by a function, and hidden states were given")
    if inputs is not None and not isinstance(inputs, int | np.integer):
        raise InputError(f"inputs: are for networks, and hidden states were given; got {shown(inputs)}")
    width = width if inputs is None else int(inputs)
    observer = Observer(width, tokens=tokens, prompts=prompts, pattern=pattern or EVERY_TOKEN)
    if isinstance(hidden_states, xr.DataArray) and layers is None and "layer" in hidden_states.coords:
        layers = hidden_states["layer"].values
    for state in _layers_of(hidden_states):
        observer.add(state)
    if not isinstance(hidden_states, Iterator | xr.DataArray) and observer.corners:
        require_layers(observer.corners, observer.reader.shape)
    return observer.dataset(layers=layers)


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
    for branch, state in enumerate(_layers_of(hidden_states), start=-1):
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


def _layers_of(hidden_states: Any) -> Iterator[Any]:
    """The hidden states of one layer after another, see `observe`."""
    # Nested lists are one array, not a list of layers.
    if isinstance(hidden_states, Iterator) or (
        isinstance(hidden_states, list | tuple) and not any(isinstance(state, list | tuple) for state in hidden_states)
    ):
        yield from hidden_states
        return
    if isinstance(hidden_states, xr.DataArray):
        hidden_states = in_order(hidden_states, ("network", "layer", "prompt", "token", "width"), "hidden_states")
    X: Any = hidden_states if hasattr(hidden_states, "shape") else as_array(hidden_states, "hidden_states")
    if len(X.shape) not in (4, 5) or 0 in X.shape:
        raise InputError(
            "hidden_states: shape (networks, layers, tokens, width), or (networks, layers, prompts, tokens, width), "
            f"is needed, got {tuple(X.shape)}{': of one network give hidden_states[None]' if len(X.shape) == 3 else ''}"
        )
    for layer in range(X.shape[1]):
        yield X[:, layer]
