"""Reduce hidden states, or models that produce them, to the Dataset of their covariances."""

from collections.abc import Iterator
from itertools import islice
from typing import Any

import xarray as xr
from numpy.typing import ArrayLike

from sdeinfer._files import InputError
from sdeinfer.covariance import EVERY_TOKEN, Pattern
from sdeinfer.observation._arrays import as_array, in_order
from sdeinfer.observation._axes import SEEN, require_layers
from sdeinfer.observation._capture import observe_equinox, observe_flax, observe_torch
from sdeinfer.observation._observer import Observer


class Observe:
    """Reduce hidden states to their neural covariances V = XXᵀ/n (Definition 3.1): `observe(hidden_states)`.

    `observe.equinox`, `observe.flax` and `observe.torch` run models and observe them. If layers arrive one at a time,
    pass them to an `Observer`. Hidden states of any type are read one layer at a time, as float32 or float64;
    `LowPrecisionWarning` reports when the rounding of float16 or bfloat16 matters, `SharedWeightsWarning` when the
    networks of one array share weights.

    The networks must be independent, each with weights of its own. **Prompts** of one network share its weights:
    prompts treated as networks would count the same weights several times. The tokens of all prompts have one
    covariance, whose blocks between prompts are observed as well; the attributes `prompts` and `causal` say which
    tokens each token attends to, and a fit takes that from there.

    m tokens have p = m(m + 1)/2 covariances, and a fit with prompts or a mask costs O(p³) for each layer of each
    network: some 8 tokens are seconds, 12 are minutes, and `LARGEST_TOKENS` is the bound. **A subset of the prompts**
    has a law of its own, so has a **subset of the tokens** if they contain all tokens that they attend to: any tokens
    of an "mlp" or "feedforward" network, and with a causal mask the first tokens of each prompt. Other subsets are not
    Markov processes, and a fit of attention to them is refused. See `take` for covariances that were observed already.

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
        prompts: the prompts to observe, likewise; given, a list of arrays with four axes is not suspected of networks
            in the place of layers.
        pattern: which tokens each token attends to, as `si.CAUSAL` or, if the tokens of several prompts follow one
            another, `si.Pattern(prompts=(3, 5))`; a dimension of prompts is added to it.
        layers: layer numbers of `hidden_states`; None for 0, 1, 2, ….

    Returns:
        The Dataset of `covariance_dataset`, with the attention pattern in its attributes.

    Raises:
        InputError: for other shapes, layers that differ in shape, networks or prompts in the place of layers, fewer
            features than tokens, masked entries, and numbers that are not real and finite, with layer and network.
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
        if isinstance(hidden_states, xr.DataArray):
            hidden_states = in_order(hidden_states, ("network", "layer", "prompt", "token", "width"), "hidden_states")
            layers = hidden_states["layer"].values if layers is None and "layer" in hidden_states.coords else layers
        for state in states_of(hidden_states):
            observer.add(state)
        if not isinstance(hidden_states, Iterator | xr.DataArray):
            first = [as_array(state, "hidden_states") for state in islice(states_of(hidden_states), SEEN)]
            require_layers(first, declared=prompts is not None or not isinstance(hidden_states, list | tuple))
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
    sliceable = isinstance(getattr(hidden_states, "shape", None), tuple)
    X: Any = hidden_states if sliceable else as_array(hidden_states, "hidden_states")
    if len(X.shape) not in (4, 5) or 0 in X.shape:
        raise InputError(
            "hidden_states: shape (networks, layers, tokens, width), or (networks, layers, prompts, tokens, width), "
            f"is needed, got {tuple(X.shape)}"
        )
    for layer in range(X.shape[1]):
        yield X[:, layer]
