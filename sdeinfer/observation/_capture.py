"""Draw models of Equinox, Flax and PyTorch, run them on inputs, and observe them one layer at a time."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import equinox as eqx
import jax.random as jr
import xarray as xr
from jaxtyping import PRNGKeyArray

from sdeinfer._arguments import shown
from sdeinfer._files import InputError
from sdeinfer.covariance import EVERY_TOKEN, Pattern
from sdeinfer.observation._library import library
from sdeinfer.observation._networks import one_by_one, torch_called, torch_network
from sdeinfer.observation._observer import Observer, joined


def observe_equinox[Model](
    make: Callable[[PRNGKeyArray], Model],
    inputs: Any,
    *,
    layers: Callable[[Model], Iterable[Callable]],
    embed: Callable[[Model], Callable] | None = None,
    networks: int,
    width: int | None = None,
    tokens: Any = None,
    pattern: Pattern = EVERY_TOKEN,
    progress: bool = False,
    key: PRNGKeyArray,
) -> xr.Dataset:
    """Draw Equinox networks and observe them, with one network and one layer in memory at a time.

    Arguments:
        make: draws a network from a key.
        inputs: the initial hidden states, shape (tokens, width), or (prompts, tokens, width) if the layers accept it;
            with `embed`, its input.
        layers: returns a network's layers in order, as `lambda model: model.blocks`; wrap a layer that acts on single
            tokens in `eqx.filter_vmap(layer)`.
        embed: returns the part of a network that maps `inputs` to the initial hidden states; None if `inputs` already
            are the hidden states.
        networks: number of networks.
        width: n; None for the last dimension of the hidden states.
        tokens: the tokens of each prompt to observe, see `observe`.
        pattern: which tokens each token attends to, see `observe`.
        progress: show a progress bar.
        key: PRNG key for the weights.

    Returns:
        The Dataset of `observe`: layer 0 holds the initial hidden states, layer l those after l layers.

    Raises:
        InputError: as `observe`, and for fewer than one network.
    """
    run = _compiled(eqx.filter_jit, eqx.Module)

    def network(number: int, observer: Observer) -> None:
        model = make(jr.fold_in(key, number))
        _layer_by_layer(model, inputs, _parts(layers, model), embed, run, observer)

    return _observed(network, networks, progress=progress, width=width, tokens=tokens, pattern=pattern)


def observe_flax[Model](
    make: Callable[[Any], Model],
    inputs: Any,
    *,
    layers: Callable[[Model], Iterable[Callable]],
    embed: Callable[[Model], Callable] | None = None,
    networks: int,
    width: int | None = None,
    tokens: Any = None,
    pattern: Pattern = EVERY_TOKEN,
    progress: bool = False,
    key: PRNGKeyArray,
) -> xr.Dataset:
    """Draw Flax (NNX) networks and observe them, with one network and one layer in memory at a time.

    Arguments:
        make: draws a network from `nnx.Rngs`, as `lambda rngs: Model(rngs=rngs)`.
        inputs: the initial hidden states, shape (tokens, width) or (prompts, tokens, width); with `embed`, its input.
        layers: returns a network's layers in order, as `lambda model: model.blocks`.
        embed: returns the part of a network that maps `inputs` to the initial hidden states; None if `inputs` already
            are the hidden states.
        networks: number of networks.
        width: n; None for the last dimension of the hidden states.
        tokens: the tokens of each prompt to observe, see `observe`.
        pattern: which tokens each token attends to, see `observe`.
        progress: show a progress bar.
        key: PRNG key for the weights.

    Returns:
        The Dataset of `observe.equinox`.

    Raises:
        InputError: as `observe.equinox`, and if Flax is not installed.
    """
    nnx = library("flax.nnx")
    run = _compiled(nnx.jit, nnx.Module)

    def network(number: int, observer: Observer) -> None:
        model = make(nnx.Rngs(jr.fold_in(key, number)))
        _layer_by_layer(model, inputs, _parts(layers, model), embed, run, observer)

    return _observed(network, networks, progress=progress, width=width, tokens=tokens, pattern=pattern)


def observe_torch(
    make: Callable[[int], Any],
    inputs: Any,
    *,
    layers: Callable[[Any], Iterable[Any]],
    networks: int,
    width: int | None = None,
    tokens: Any = None,
    pattern: Pattern = EVERY_TOKEN,
    progress: bool = False,
    seed: int,
) -> xr.Dataset:
    """Draw PyTorch networks and observe them by forward hooks, with one network and one layer in memory at a time.

    Arguments:
        make: draws a network, from the seed it receives or from PyTorch's generators, which are seeded with it:
            `lambda seed: Model()`.
        inputs: the network's input: one positional argument, or a mapping of keyword arguments. Hidden states of shape
            (tokens, width) are one prompt; an additional first dimension holds prompts.
        layers: returns the modules whose outputs are observed, in order, as `lambda model: model.transformer.h`. Each
            must be called once; if its output is a tuple, the first entry is observed.
        networks: number of networks.
        width: n; None for the last dimension of the hidden states.
        tokens: the tokens of each prompt to observe, see `observe`.
        pattern: which tokens each token attends to, see `observe`.
        progress: show a progress bar.
        seed: seed of the weights. The state of PyTorch's own generators is restored.

    Returns:
        The Dataset of `observe`: layer 0 is the input of the first module, layer l the output of the l-th.

    Raises:
        InputError: as `observe`, for fewer than one network, for modules that are not called once and in order, and if
            PyTorch is not installed.
    """
    torch = library("torch")

    def network(number: int, observer: Observer) -> None:
        model = torch_network(torch, make, seed, number).eval()
        _through_hooks(torch, model, _parts(layers, model), inputs, observer)

    return _observed(network, networks, progress=progress, width=width, tokens=tokens, pattern=pattern)


def _observed(
    network: Callable[[int, Observer], None], networks: int, *, progress: bool, **settings: Any
) -> xr.Dataset:
    """Observe networks one after another, each by an `Observer` with these settings."""

    def observed(number: int) -> Observer:
        observer = Observer(**settings, first_network=number)
        network(number, observer)
        return observer

    return joined(one_by_one(observed, networks, progress=progress))


def _compiled(jit: Callable[[Callable], Callable], module: type) -> Callable[[Callable, Any], Any]:
    """A function that applies a layer, compiled once for all networks."""
    run = jit(lambda layer, X: layer(X))
    # A callable that is not a module would be compiled again for every network.
    return lambda layer, X: run(layer, X) if isinstance(layer, module) else layer(X)


def _parts[Model](layers: Callable[[Model], Iterable[Callable]], model: Model) -> list[Callable]:
    """The layers of a network, which may be a dict of them.

    Raises:
        InputError: for anything but a function that returns functions.
    """
    found = layers(model) if callable(layers) else None
    parts = list(found.values()) if isinstance(found, Mapping) else list(found) if isinstance(found, Iterable) else []
    if isinstance(found, Iterable) and all(callable(part) for part in parts):
        return parts
    got = shown(layers) if not callable(layers) else f"a function that returns {shown(found)}"
    raise InputError(f"layers: a function that returns the list of a model's layers is needed, got {got}")


def _layer_by_layer[Model](
    model: Model,
    inputs: Any,
    layers: Iterable[Callable],
    embed: Callable[[Model], Callable] | None,
    run: Callable[[Callable, Any], Any],
    observer: Observer,
) -> None:
    X = inputs if embed is None else embed(model)(inputs)
    observer.add(_one_network(X))
    for layer in layers:
        X = run(layer, X)
        observer.add(_one_network(X))


def _through_hooks(torch: Any, model: Any, modules: Sequence[Any], inputs: Any, observer: Observer) -> None:
    if not modules or len({id(module) for module in modules}) < len(modules):
        raise InputError(f"layers: at least one module, and each only once, is needed, got {len(modules)}")

    def before(module: Any, arguments: tuple, keywords: dict) -> None:
        del module
        observer.add(_one_network((*arguments, *keywords.values())[0]))

    def after(number: int) -> Callable[..., None]:
        def hook(module: Any, arguments: tuple, output: Any) -> None:
            del module, arguments
            if len(observer.covariances) != number:
                raise InputError(f"layers: module {number - 1} is not called once and in order")
            state = output[0] if isinstance(output, tuple) else output
            observer.add(_one_network(state))

        return hook

    with ExitStack() as hooks, torch.no_grad():
        hooks.callback(modules[0].register_forward_pre_hook(before, with_kwargs=True).remove)
        for number, module in enumerate(modules, start=1):
            hooks.callback(module.register_forward_hook(after(number)).remove)
        torch_called(torch, model, inputs)
    if len(observer.covariances) != len(modules) + 1:
        raise InputError(f"layers: module {len(observer.covariances) - 1} is not called")


def _one_network(state: Any) -> Any:
    """Hidden states (tokens, width) or (prompts, tokens, width) of one network, with a leading network dimension."""
    if len(state.shape) == 3 and state.shape[0] == 1:
        return state
    return state[None]
