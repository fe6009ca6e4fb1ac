"""From hidden states, or from models that make them, to the Dataset of their covariances."""

from collections.abc import Iterator
from typing import Any

import xarray as xr
from numpy.typing import ArrayLike

from sdeinfer._files import InputError
from sdeinfer.observation._arrays import as_array
from sdeinfer.observation._capture import observe_equinox, observe_flax, observe_torch
from sdeinfer.observation._observer import Observer


class Observe:
    """Reduce hidden states to their neural covariances V = XXᵀ/n (Definition 3.1): `observe(hidden_states)`.

    `observe.equinox`, `observe.flax` and `observe.torch` run models and observe them. Where layers come one at a time,
    an `Observer` takes them. Hidden states are read layer by layer, and one layer at a time is held in float32 or
    float64, whatever their type; `LowPrecisionWarning` says when the rounding of float16 or bfloat16 matters.

    The networks must be independent, each with weights of its own. **Prompts** that went through one network share its
    weights. They get a dimension `prompt`, with which a Dataset is no data for a fit until one prompt is taken by
    `data.isel(prompt=0)`: as networks they would count the same weights several times. Where no token attends to
    another ("mlp", "feedforward"), the law holds for the tokens of all prompts together: reshape prompts × tokens to
    tokens.

    A **subset of the tokens** of an "mlp" or "feedforward" network has the law of a network of these tokens alone, and
    a fit to it is right. With attention, each token's change depends on the tokens that it attends to: a subset is not
    a Markov process by itself, and a fit to it, which knows nothing of the others, is biased.

    Arguments:
        hidden_states: representations after every layer, the initial ones first, as an array of NumPy, JAX, PyTorch or
            of anything else with `__array__` or DLPack, of floating-point or whole numbers. Either all in one, of shape
            (networks, layers, tokens, width) or (networks, layers, prompts, tokens, width), or a list, tuple or
            iterator of layers, each (networks, tokens, width) or (networks, prompts, tokens, width). What Hugging
            Face's models return as `hidden_states` is such a tuple, with the batch in the place of the networks. Where
            the batch is prompts of one network: `observe(state[None] for state in output.hidden_states)`. The last
            entry has gone through the final normalisation in most of these models: leave it out.
        width: n; the last dimension where None.
        tokens: which tokens to observe, as indices, a mask or a slice; all where None.
        layers: numbers of the layers that are given; 0, 1, 2, … where None.

    Returns:
        The Dataset of `covariance_dataset`; with prompts it has the dimension `prompt` as well, after `network`.

    Raises:
        InputError: for other shapes, layers that differ in shape, fewer features than tokens, or numbers that are not
            real, NaN or infinite; it says in which layer and network.
    """

    equinox = staticmethod(observe_equinox)
    flax = staticmethod(observe_flax)
    torch = staticmethod(observe_torch)

    def __call__(
        self, hidden_states: Any, width: int | None = None, *, tokens: Any = None, layers: ArrayLike | None = None
    ) -> xr.Dataset:
        """Reduce hidden states, as the class says."""
        observer = Observer(width, tokens=tokens)
        for state in _states(hidden_states):
            observer.add(state)
        return observer.dataset(layers=layers)


observe = Observe()


def _states(hidden_states: Any) -> Iterator[Any]:
    # Lists within a list are one array that was written out.
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
