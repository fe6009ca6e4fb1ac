"""Reduce hidden states to covariances, with one layer in memory at a time."""

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr
from numpy.typing import ArrayLike

from sdeinfer._arguments import at_least_one, checked, given
from sdeinfer._files import InputError
from sdeinfer.covariance import EVERY_TOKEN, Pattern
from sdeinfer.observation._arrays import as_array, in_order, labels_of_networks
from sdeinfer.observation._choice import choose
from sdeinfer.observation._dataset import covariance_dataset
from sdeinfer.observation._precision import LARGEST_SHARE, LowPrecisionWarning, rounding_share, spacing_of
from sdeinfer.observation._shared_weights import SHARED_WEIGHTS, SharedWeights, SharedWeightsWarning


class Observer:
    """An accumulator of neural covariances V = XXᵀ/n (Definition 3.1): `add` every layer, then take the `dataset`.

    It keeps covariances, not hidden states, and computes them at least in float32.

    Arguments:
        width: n, the number of features of the hidden states, to be checked; None for any.
        tokens: the tokens of each prompt to observe, as indices, a mask or a slice; None for all. `observe` says when a
            subset of the tokens can be fitted.
        prompts: the prompts to observe, likewise.
        pattern: which tokens each token attends to, before a choice; the prompts of a dimension of prompts are added.
        first_network: number of the first network, if networks are observed in parts.

    Raises:
        InputError: for a width below 1.
    """

    @checked
    def __init__(
        self,
        width: int | None = None,
        *,
        tokens: Any = None,
        prompts: Any = None,
        pattern: Pattern = EVERY_TOKEN,
        first_network: int = 0,
    ):
        at_least_one(**given(width=width))
        self.width = width
        self.first_network = first_network
        self.covariances: list[np.ndarray] = []
        self.coarsest = np.dtype(np.float32)
        self.attributes: dict[str, Any] = {}
        self.labels: dict[Any, Any] = {}
        self._choice = {"tokens": tokens, "prompts": prompts}
        self._pattern = pattern
        self._shape: tuple[int, ...] = ()
        self._observed = np.zeros(0, int)
        self.shared_weights = SharedWeights()

    def add(self, state: Any) -> None:
        """Reduce the hidden states after the next layer; the initial ones come first.

        Arguments:
            state: array of shape (networks, tokens, width), or (networks, prompts, tokens, width).

        Raises:
            InputError: for a shape that differs from the previous layers', fewer features than tokens, and numbers that
                are not real and finite.
        """
        name = f"hidden_states: layer {len(self.covariances)}"
        if isinstance(state, xr.DataArray):
            state = in_order(state, ("network", "prompt", "token", "width"), name)
            self.labels = self.labels or labels_of_networks(state)
        X = as_array(state, name)
        if not self._shape:
            self._start(X.shape, name)
        if X.shape != self._shape:
            raise InputError(f"{name}: has shape {X.shape}, where layer 0 has {self._shape}")
        X = X.reshape(X.shape[0], -1, X.shape[-1])
        if not np.array_equal(self._observed, np.arange(X.shape[1])):
            X = X[:, self._observed]
        tokens, features = X.shape[-2:]
        if self.width not in (None, features):
            raise InputError(f"width: the hidden states have {features} features at {name}, got width {self.width}")
        if features < tokens:
            raise InputError(
                f"{name}: {features} features for {tokens} tokens make the covariance singular, and no law of a layer "
                f"has a density there: observe at most {features} tokens, or wider networks"
            )
        if spacing_of(X.dtype) > spacing_of(self.coarsest):
            self.coarsest = X.dtype
        X = X.astype(np.result_type(X.dtype, np.float32), copy=False)
        self.width = features
        with np.errstate(over="ignore", invalid="ignore"):
            V = X @ np.swapaxes(X, -1, -2) / self.width
        self._check_finite(V, X, name)
        self.covariances.append(V)
        self.shared_weights.add(X)

    def dataset(self, *, layers: ArrayLike | None = None) -> xr.Dataset:
        """The covariances of all layers so far.

        Arguments:
            layers: layer numbers of the added layers; None for 0, 1, 2, ….

        Returns:
            The Dataset of `covariance_dataset`, with the attention pattern in its attributes.

        Raises:
            InputError: see `validate`.
        """
        return joined([self], layers=layers)

    def _start(self, shape: tuple[int, ...], name: str) -> None:
        """Find the observed tokens, among those of all prompts, and their pattern from the shape of layer 0."""
        if len(shape) not in (3, 4) or 0 in shape:
            raise InputError(
                f"{name}: shape (networks, tokens, width) or (networks, prompts, tokens, width) is needed, got {shape}"
            )
        count, tokens = (1 if len(shape) == 3 else shape[1]), shape[-2]
        if self._choice["prompts"] is not None and len(shape) == 3:
            raise InputError("prompts: the hidden states have no dimension of prompts")
        self._observed, self.attributes = choose(count, tokens, **self._choice, pattern=self._pattern)
        self._shape = shape

    def _check_finite(self, V: np.ndarray, X: np.ndarray, name: str) -> None:
        # A NaN or an infinity in X appears on the diagonal of V, which is much smaller.
        squares = np.diagonal(V, axis1=-2, axis2=-1)
        faulty = np.argwhere(~np.isfinite(squares))
        if not len(faulty):
            small = (squares.max(axis=1) < np.finfo(V.dtype).tiny) & X.any(axis=(1, 2))
            if small.any():
                network = self.first_network + int(np.argmax(small))
                raise InputError(f"{name}, network {network}: XXᵀ is below the range of {X.dtype}")
            return
        network, token = map(int, faulty[0])
        where = f"{name}, network {self.first_network + network}"
        where += f", prompt {self._observed[token] // self._shape[-2]}" if len(self._shape) == 4 else ""
        bad = np.count_nonzero(~np.isfinite(X[network]))
        raise InputError(f"{where}: " + (f"{bad} entries are NaN or infinite" if bad else f"XXᵀ overflows {X.dtype}"))


def joined(observers: Sequence[Observer], *, layers: ArrayLike | None = None) -> xr.Dataset:
    """Join the covariances of networks that were observed in parts, with one `Observer` per part.

    Arguments:
        observers: one per part, in the order of the networks.
        layers: layer numbers of the added layers; None for 0, 1, 2, ….

    Returns:
        The Dataset of `Observer.dataset`.

    Raises:
        InputError: for parts that differ in layers, tokens or prompts, and as `validate`.
    """
    shapes = [tuple(V.shape[1:] for V in observer.covariances) for observer in observers]
    for observer, shape in zip(observers, shapes, strict=True):
        if shape != shapes[0]:
            raise InputError(
                f"hidden_states: network {observer.first_network}: has {_sizes(shape)}, "
                f"where network {observers[0].first_network} has {_sizes(shapes[0])}"
            )
    if not shapes or not shapes[0]:
        raise InputError("hidden_states: no layer was given")
    width = np.concatenate([np.full(len(each.covariances[0]), each.width) for each in observers])
    V = _stacked([each.covariances for each in observers])
    data = covariance_dataset(V, width=width, layers=layers).assign_attrs(observers[0].attributes)
    _warn_of_rounding(observers)
    if any(each.shared_weights.found for each in observers):
        data = data.assign_attrs({SHARED_WEIGHTS: 1.0})
        _warn(
            "hidden_states: the networks of one array share weights, as prompts of one network do, and a fit would "
            "count them as independent networks: give the prompts a dimension of their own, (networks, layers, "
            "prompts, tokens, width), as by `observe(state[None] for state in hidden_states)`",
            SharedWeightsWarning,
        )
    numbers = {"network": observers[0].first_network + data["network"].values}
    return data.assign_coords(numbers | (observers[0].labels if len(observers) == 1 else {}))


def _stacked(parts: Sequence[Sequence[np.ndarray]]) -> np.ndarray:
    """Stack covariances (networks, m, m) over parts and layers to shape (networks, layers, m, m)."""
    first = parts[0][0]
    networks = sum(len(part[0]) for part in parts)
    dtype = np.result_type(*(V.dtype for part in parts for V in part))
    stacked = np.empty((networks, len(parts[0]), *first.shape[1:]), dtype)
    start = 0
    for part in parts:
        for layer, V in enumerate(part):
            stacked[start : start + len(V), layer] = V
        start += len(part[0])
    return stacked


def _warn_of_rounding(observers: Sequence[Observer]) -> None:
    coarsest = max((each.coarsest for each in observers), key=spacing_of)
    spacing = spacing_of(coarsest)
    if spacing == 0:
        return
    share = max(rounding_share(each.covariances, width=each.width or 1, spacing=spacing) for each in observers)
    if share > LARGEST_SHARE:
        _warn(
            f"hidden_states: {coarsest} rounds by {share:.0%} of the change from layer to layer (root mean squares), "
            "which a fit takes for noise of the layers: run and save the networks in float32",
            LowPrecisionWarning,
        )


def _warn(message: str, category: type[UserWarning]) -> None:
    """Warn at the line of the caller that called the package."""
    warnings.warn(message, category, skip_file_prefixes=(str(Path(__file__).parent),))


def _sizes(shapes: Sequence[tuple[int, ...]]) -> str:
    return f"{len(shapes)} layers of covariances of shape {shapes[0] if shapes else ()}"
