"""Reduce hidden states, or models that produce them, to the Dataset of their covariances."""

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

    `observe.equinox`, `observe.flax` and `observe.torch` run models and observe them. If layers arrive one at a time,
    pass them to an `Observer`. Hidden states of any type are read one layer at a time, as float32 or float64;
    `LowPrecisionWarning` reports when the rounding of float16 or bfloat16 matters.

    The networks must be independent, each with weights of its own. **Prompts** of one network share its weights. They
    get a dimension `prompt`, and the Dataset can be fitted only after one prompt is selected by `data.isel(prompt=0)`:
    prompts treated as networks would count the same weights several times. If no token attends to another ("mlp",
    "feedforward"), the law holds for the tokens of all prompts together: reshape prompts × tokens to tokens.

    A **subset of the tokens** of an "mlp" or "feedforward" network has the law of a network of these tokens alone, and
    can be fitted. With attention, the change of a token depends on the tokens that it attends to: a subset is not a
    Markov process, and a fit to it is biased.

    Arguments:
        hidden_states: hidden states after every layer, the initial ones first, as floating-point numbers or integers of
            NumPy, JAX, PyTorch, or any library with `__array__` or DLPack. Either one array of shape (networks, layers,
            tokens, width) or (networks, layers, prompts, tokens, width); or a list, tuple or iterator of layers, each
            of shape (networks, tokens, width) or (networks, prompts, tokens, width). The `hidden_states` of Hugging
            Face models are such a tuple, with the batch as the networks; if the batch holds prompts of one network, use
            `observe(state[None] for state in output.hidden_states)`. In most of these models the last entry has passed
            the final normalisation: leave it out.
        width: n; None for the last dimension of the hidden states.
        tokens: the tokens to observe, as indices, a mask or a slice; None for all.
        layers: layer numbers of `hidden_states`; None for 0, 1, 2, ….

    Returns:
        The Dataset of `covariance_dataset`; prompts add the dimension `prompt` after `network`.

    Raises:
        InputError: for other shapes, layers that differ in shape, fewer features than tokens, and numbers that are not
            real and finite, with their layer and network.
    """

    equinox = staticmethod(observe_equinox)
    flax = staticmethod(observe_flax)
    torch = staticmethod(observe_torch)

    def __call__(
        self, hidden_states: Any, width: int | None = None, *, tokens: Any = None, layers: ArrayLike | None = None
    ) -> xr.Dataset:
        """Reduce hidden states: see the class."""
        observer = Observer(width, tokens=tokens)
        for state in _states(hidden_states):
            observer.add(state)
        return observer.dataset(layers=layers)


observe = Observe()


def _states(hidden_states: Any) -> Iterator[Any]:
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
