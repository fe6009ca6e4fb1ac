"""Reduce hidden states, or networks that produce them, to the Dataset of their covariances."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import equinox as eqx
import jax.random as jr
import xarray as xr
from jaxtyping import PRNGKeyArray
from numpy.typing import ArrayLike

from sdeinfer._arguments import shown
from sdeinfer._files import InputError
from sdeinfer.covariance import Pattern
from sdeinfer.covariance._pattern import EVERY_TOKEN
from sdeinfer.observation._arrays import Shaped, as_array, in_order, library
from sdeinfer.observation._capture import Recorder, Tap, one_by_one, torch_names, torch_network, torch_pass
from sdeinfer.observation._doubts import require_layers
from sdeinfer.observation._observer import Observer, joined


def observe_equinox[Model](
    make: Callable[[PRNGKeyArray], Model],
    inputs: Any,
    *,
    layers: Callable[[Model], Iterable[Callable]],
    embed: Callable[[Model], Callable] | None = None,
    networks: int,
    key: PRNGKeyArray,
    **settings: Any,
) -> xr.Dataset:
    """Draw Equinox networks and observe them, two layers in memory at a time, with the settings of `observe.torch`."""
    draw, how = (lambda number: make(jr.fold_in(key, number))), (eqx.filter_jit, eqx.Module)
    return _layer_by_layer(draw, how, inputs, layers, embed, networks=networks, **settings)


def observe_flax[Model](
    make: Callable[[Any], Model],
    inputs: Any,
    *,
    layers: Callable[[Model], Iterable[Callable]],
    embed: Callable[[Model], Callable] | None = None,
    networks: int,
    key: PRNGKeyArray,
    **settings: Any,
) -> xr.Dataset:
    """Draw Flax networks from `nnx.Rngs`, as `lambda rngs: Model(rngs=rngs)`, and observe them as `observe.equinox`."""
    nnx = library("flax.nnx")
    draw, how = (lambda number: make(nnx.Rngs(jr.fold_in(key, number)))), (nnx.jit, nnx.Module)
    return _layer_by_layer(draw, how, inputs, layers, embed, networks=networks, **settings)


def observe_torch(
    make: Callable[[int], Any],
    inputs: Any,
    *,
    layers: Callable[[Any], Iterable[Any]],
    networks: int,
    width: int | None = None,
    tokens: Any = None,
    pattern: Pattern = EVERY_TOKEN,
    progress: bool = True,
    seed: int,
) -> xr.Dataset:
    """Draw PyTorch networks and observe them by forward hooks, with one network and two layers in memory at a time."""
    torch = library("torch")

    def network(number: int, add: Callable[[Any], None]) -> None:
        model = torch_network(torch, make, seed, number)
        modules, names = _parts(layers, model), torch_names(model)
        if not modules or len({id(module) for module in modules}) < len(modules):
            raise InputError(f"layers: at least one module, and each only once, is needed, got {len(modules)}")
        places = [(modules[0], "input"), *((module, "output") for module in modules)]
        taps = [
            Tap(f"network {number}, layer {layer} ({names.get(id(module), '?')})", part, module)
            for layer, (module, part) in enumerate(places)
        ]
        torch_pass(model, inputs, Recorder("layers", taps, lambda _, state: add(state)))

    return _observed(network, networks=networks, progress=progress, width=width, tokens=tokens, pattern=pattern)


class Observe:
    """Reduce hidden states to their neural covariances V = XXᵀ/n (Definition 3.1): `observe(hidden_states)`.

    `observe.equinox`, `observe.flax` and `observe.torch` run models and observe them. If layers arrive one at a time,
    pass them to an `Observer`. Hidden states of any type are read one layer at a time, as float32 or float64;
    `LowPrecisionWarning` reports when the rounding of float16 or bfloat16 matters.

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
            the final normalisation: leave it out.
        width: n, the number of features of the hidden states, to be checked; None for any.
        tokens: the tokens of each prompt to observe, as indices, a mask or a slice; None for all.
        prompts: the prompts to observe, likewise.
        pattern: which tokens each token attends to, as `si.CAUSAL` or, if the tokens of several prompts follow one
            another, `si.Pattern(prompts=(3, 5))`; a dimension of prompts is added to it.
        layers: layer numbers of `hidden_states`; None for 0, 1, 2, ….

    Returns:
        The Dataset of `covariance_dataset`, with the attention pattern in its attributes, and the coordinate `shortcut`
        over networks and layers: ⟨X_ℓ, X_ℓ₋₁⟩/⟨X_ℓ₋₁, X_ℓ₋₁⟩, on average λ^k for a shaped layer of k residual branches;
        `check` compares it with γ.

    Raises:
        InputError: for other shapes, layers that differ in shape, networks in the place of layers, fewer features than
            tokens, masked entries, and numbers that are not real and finite, with layer and network.
    """

    equinox = staticmethod(observe_equinox)
    flax = staticmethod(observe_flax)
    torch = staticmethod(observe_torch)

    def __call__(
        self,
        hidden_states: Any,
        width: int | None = None,
        *,
        tokens: Any = None,
        prompts: Any = None,
        pattern: Pattern = EVERY_TOKEN,
        layers: ArrayLike | None = None,
    ) -> xr.Dataset:
        """Reduce hidden states: see the class."""
        observer = Observer(width, tokens=tokens, prompts=prompts, pattern=pattern)
        if isinstance(hidden_states, xr.DataArray) and layers is None and "layer" in hidden_states.coords:
            layers = hidden_states["layer"].values
        for state in states_of(hidden_states):
            observer.add(state)
        if not isinstance(hidden_states, Iterator | xr.DataArray) and observer.corners:
            require_layers(observer.corners, observer.reader.shape)
        return observer.dataset(layers=layers)


observe = Observe()


def states_of(hidden_states: Any) -> Iterator[Any]:
    """The hidden states of one layer after another, see `Observe`."""
    # Nested lists are one array, not a list of layers.
    if isinstance(hidden_states, Iterator) or (
        isinstance(hidden_states, list | tuple) and not any(isinstance(each, list | tuple) for each in hidden_states)
    ):
        yield from hidden_states
        return
    if isinstance(hidden_states, xr.DataArray):
        hidden_states = in_order(hidden_states, ("network", "layer", "prompt", "token", "width"), "hidden_states")
    X: Any = hidden_states if isinstance(hidden_states, Shaped) else as_array(hidden_states, "hidden_states")
    if len(X.shape) not in (4, 5) or 0 in X.shape:
        raise InputError(
            "hidden_states: shape (networks, layers, tokens, width), or (networks, layers, prompts, tokens, width), "
            f"is needed, got {tuple(X.shape)}{': of one network give hidden_states[None]' if len(X.shape) == 3 else ''}"
        )
    for layer in range(X.shape[1]):
        yield X[:, layer]


def _observed(
    network: Callable[[int, Callable[[Any], None]], None], *, networks: int, progress: bool = True, **settings: Any
) -> xr.Dataset:
    """Observe networks one after another, each by an `Observer` with these settings."""

    def observed(number: int) -> Observer:
        observer = Observer(**settings, first_network=number)

        def add(state: Any) -> None:
            observer.add(state if len(state.shape) == 3 and state.shape[0] == 1 else state[None])

        network(number, add)
        observer.before = None  # as many observers as networks are joined
        return observer

    return joined(one_by_one(observed, networks, progress=progress))


def _layer_by_layer[Model](
    draw: Callable[[int], Model],
    how: tuple[Callable[[Callable], Callable], type],
    inputs: Any,
    layers: Callable[[Model], Iterable[Callable]],
    embed: Callable[[Model], Callable] | None,
    **settings: Any,
) -> xr.Dataset:
    """Observe networks whose layers are applied one after another, by a library's jit if they are its modules."""
    jit, module = how
    run = jit(lambda layer, X: layer(X))

    def network(number: int, add: Callable[[Any], None]) -> None:
        model = draw(number)
        X = inputs if embed is None else embed(model)(inputs)
        add(X)
        for layer in _parts(layers, model):
            # A callable that is not a module would be compiled again for every network.
            X = run(layer, X) if isinstance(layer, module) else layer(X)
            add(X)

    return _observed(network, **settings)


def _parts[Model](layers: Callable[[Model], Iterable[Callable]], model: Model) -> list[Callable]:
    """The layers of a network, which may be a dict of them."""
    found = layers(model) if callable(layers) else None
    parts = list(found.values()) if isinstance(found, Mapping) else list(found) if isinstance(found, Iterable) else []
    if isinstance(found, Iterable) and all(callable(part) for part in parts):
        return parts
    got = shown(layers) if not callable(layers) else f"a function that returns {shown(found)}"
    raise InputError(f"layers: a function that returns the list of a model's layers is needed, got {got}")
