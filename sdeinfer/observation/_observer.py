"""Reduce hidden states to covariances, with one layer in memory at a time."""

import dataclasses
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import xarray as xr
from numpy.typing import ArrayLike

from sdeinfer._arguments import checked
from sdeinfer._files import InputError, first_line
from sdeinfer.covariance import EVERY_TOKEN, Pattern
from sdeinfer.observation._arrays import as_array, in_order
from sdeinfer.observation._dataset import INCOMPLETE, covariance_dataset
from sdeinfer.observation._precision import LARGEST_SHARE, LowPrecisionWarning, rounding_share


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
        if width is not None and width < 1:
            raise InputError(f"width: at least 1 is needed, got {width}")
        self.width = width
        self.first_network = first_network
        self.covariances: list[np.ndarray] = []
        self.coarsest: np.dtype | None = None
        self._tokens = tokens
        self._prompts = prompts
        self._pattern = pattern
        self._shape: tuple[int, ...] = ()

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
        X = as_array(state, name)
        self._check_shape(X.shape, name)
        X = X.reshape(X.shape[0], -1, X.shape[-1])
        X = X if self._tokens is None and self._prompts is None else X[:, self._observed_tokens()]
        tokens, features = X.shape[-2:]
        if self.width not in (None, features):
            raise InputError(f"width: the hidden states have {features} features at {name}, got width {self.width}")
        if features < tokens:
            raise InputError(
                f"{name}: {features} features for {tokens} tokens make the covariance singular, and no law of a layer "
                f"has a density there: observe at most {features} tokens, or wider networks"
            )
        if _spacing(X.dtype) > _spacing(self.coarsest):
            self.coarsest = X.dtype
        X = X.astype(np.result_type(X.dtype, np.float32), copy=False)
        self.width = features
        with np.errstate(over="ignore", invalid="ignore"):
            V = X @ np.swapaxes(X, -1, -2) / self.width
        self._check_finite(V, X, name)
        self.covariances.append(V)

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

    def of_network(self, number: int) -> "Observer":
        """An empty observer with the same settings, of the network with the given number."""
        settings = {"tokens": self._tokens, "prompts": self._prompts, "pattern": self._pattern}
        return Observer(self.width, **settings, first_network=number)

    def attributes(self) -> dict[str, Any]:
        """The attention pattern of the observed tokens as attributes of a Dataset."""
        prompts, tokens = self._sizes()
        if prompts > 1 and self._pattern.rows:
            raise InputError("pattern: prompts are masked by si.CAUSAL or not at all; flatten them for a mask")
        lengths = (tokens,) * prompts if prompts > 1 else self._pattern.prompts
        pattern = dataclasses.replace(self._pattern, prompts=lengths)
        pattern.mask(prompts * tokens)
        try:
            return pattern.restricted(self._observed_tokens().tolist(), prompts * tokens).attributes()
        except InputError:
            return {INCOMPLETE: 1.0}

    def _sizes(self) -> tuple[int, int]:
        """The numbers of prompts and of tokens of each."""
        return (1 if len(self._shape) == 3 else self._shape[1]), self._shape[-2]

    def _observed_tokens(self) -> np.ndarray:
        """Indices into the tokens of all prompts."""
        count, tokens = self._sizes()
        if self._prompts is not None and len(self._shape) == 3:
            raise InputError("prompts: the hidden states have no dimension of prompts")
        prompts = np.arange(count) if self._prompts is None else _indices(self._prompts, count, "prompts")
        within = np.arange(tokens) if self._tokens is None else _indices(self._tokens, tokens, "tokens")
        return (prompts[:, None] * tokens + within).reshape(-1)

    def _check_shape(self, shape: tuple[int, ...], name: str) -> None:
        if self._shape and shape != self._shape:
            raise InputError(f"{name}: has shape {shape}, where layer 0 has {self._shape}")
        if len(shape) not in (3, 4) or 0 in shape:
            raise InputError(
                f"{name}: shape (networks, tokens, width) or (networks, prompts, tokens, width) is needed, got {shape}"
            )
        self._shape = shape

    def _check_finite(self, V: np.ndarray, X: np.ndarray, name: str) -> None:
        # A NaN or an infinity in X appears on the diagonal of V, which is much smaller.
        finite = np.isfinite(np.diagonal(V, axis1=-2, axis2=-1)).all(axis=-1)
        if finite.all():
            return
        network, token = (int(i) for i in np.argwhere(~np.isfinite(np.diagonal(V, axis1=-2, axis2=-1)))[0])
        where = f"{name}, network {self.first_network + network}"
        tokens = self._sizes()[1]
        where += f", prompt {self._observed_tokens()[token] // tokens}" if len(self._shape) == 4 else ""
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
    numbers = np.arange(len(shapes[0])) if layers is None else np.asarray(layers)
    if numbers.shape != (len(shapes[0]),):
        raise InputError(f"layers: one number for each of {len(shapes[0])} layers is needed, got {numbers.tolist()}")
    width = np.concatenate([np.full(len(each.covariances[0]), each.width) for each in observers])
    V = _stacked([each.covariances for each in observers])
    data = covariance_dataset(V, width=width, layers=numbers).assign_attrs(observers[0].attributes())
    _warn_of_rounding(observers)
    return data.assign_coords(network=observers[0].first_network + data["network"].values)


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
    coarsest = max((each.coarsest for each in observers if each.coarsest is not None), key=_spacing, default=None)
    if coarsest is None:
        return
    spacing = _spacing(coarsest)
    share = max(rounding_share(each.covariances, width=each.width or 1, spacing=spacing) for each in observers)
    if share > LARGEST_SHARE:
        warnings.warn(
            f"hidden_states: {coarsest} rounds by {share:.0%} of the change from layer to layer (root mean squares), "
            "which a fit takes for noise of the layers: run and save the networks in float32",
            LowPrecisionWarning,
            skip_file_prefixes=(str(Path(__file__).parent),),
        )


def _spacing(dtype: np.dtype | None) -> float:
    """The spacing above 1 of a type's numbers if it is coarser than that of float32, otherwise 0."""
    if dtype is None or dtype.kind in "iu":
        return 0.0
    spacing = float(ml_dtypes.finfo(dtype).eps)
    return spacing if spacing > np.finfo(np.float32).eps else 0.0


def _indices(chosen: Any, count: int, name: str) -> np.ndarray:
    try:
        indices = np.atleast_1d(np.arange(count)[chosen])
    except (IndexError, TypeError, ValueError) as error:
        raise InputError(f"{name}: cannot choose among {count} {name} by {chosen!r} ({first_line(error)})") from error
    if indices.ndim != 1 or len(indices) == 0 or len(np.unique(indices)) < len(indices):
        raise InputError(f"{name}: at least one of the {name}, and each only once, is needed, got {indices.tolist()}")
    return indices


def _sizes(shapes: Sequence[tuple[int, ...]]) -> str:
    return f"{len(shapes)} layers of covariances of shape {shapes[0] if shapes else ()}"
