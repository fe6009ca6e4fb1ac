"""Hidden states reduced to covariances while networks run, with two layers in memory at a time; the tokens observed.

Tests: `tests/observation/test_observe.py`.
"""

import dataclasses
import math
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr
from jaxtyping import Float, Int
from numpy.typing import ArrayLike

from sdeinfer._arguments import at_least_one, checked, given, shown
from sdeinfer._files import InputError, first_line
from sdeinfer.covariance import Pattern
from sdeinfer.covariance._pattern import EVERY_TOKEN, PATTERN_ATTRIBUTES
from sdeinfer.observation._arrays import as_array, in_order, labels_of_networks
from sdeinfer.observation._dataset import INCOMPLETE, SHORTCUT, TOKENS, covariance_dataset
from sdeinfer.observation._doubts import LowPrecisionWarning, rounding_share, spacing_of


class TokenReader:
    """Reads arrays of one shape, and takes the observed tokens of all prompts."""

    def __init__(self, *leading: str, width: int | None, **choice: Any):
        at_least_one(**given(width=width))
        self.width = width
        self.shape: tuple[int, ...] = ()
        self.attributes: dict[str, Any] = {}
        self._leading, self._choice = leading, choice
        self._observed = np.zeros(0, int)

    def read(self, values: Any, where: str) -> np.ndarray:
        """The observed tokens, in the type of the array; shape (leading, m, n)."""
        X = as_array(values, where)
        if not self.shape:
            self._start(X.shape, where)
        tokens = math.prod(self.shape[len(self._leading) : -1])
        joined = (*self.shape[: len(self._leading)], tokens, self.shape[-1])
        # OPT joins the dimensions of prompts and tokens before its MLP.
        if X.shape not in (self.shape, joined):
            raise InputError(f"{where}: has shape {X.shape}, where the first has {self.shape}")
        X = X.reshape(joined)
        return X if np.array_equal(self._observed, np.arange(tokens)) else X[..., self._observed, :]

    def _start(self, shape: tuple[int, ...], where: str) -> None:
        """Find the observed tokens, and their pattern, from the shape of the first array."""
        axes = ", ".join((*self._leading, "tokens, width"))
        of_prompts = len(shape) == len(self._leading) + 3
        if not (of_prompts or len(shape) == len(self._leading) + 2) or 0 in shape:
            raise InputError(
                f"{where}: shape ({axes}) or ({axes.replace('tokens', 'prompts, tokens')}) is needed, got {shape}"
            )
        if self._choice.get("prompts") is not None and not of_prompts:
            raise InputError("prompts: the hidden states have no dimension of prompts")
        if self.width not in (None, shape[-1]):
            raise InputError(f"width: {where} has {shape[-1]} features, got width {self.width}")
        self._choose(shape[-3] if of_prompts else 1, shape[-2], **self._choice)
        if shape[-1] < len(self._observed):
            raise InputError(
                f"{where}: {shape[-1]} features for {len(self._observed)} tokens make the covariance singular, and no "
                f"law of a layer has a density there: observe at most {shape[-1]} tokens, or wider networks"
            )
        self.width, self.shape = shape[-1], shape

    def _choose(self, count: int, length: int, *, tokens: Any = None, prompts: Any = None, pattern: Pattern) -> None:
        """Choose among the tokens of all prompts, in their order, with the pattern as attributes of a Dataset."""
        chosen = _indices(prompts, count, "prompts")
        self._observed = (chosen[:, None] * length + _indices(tokens, length, "tokens")).reshape(-1)
        if count > 1:
            if pattern.rows:
                raise InputError(
                    "pattern: several prompts support si.CAUSAL only; reshape to one axis of tokens for another mask"
                )
            pattern = dataclasses.replace(pattern, prompts=(length,) * count)
        pattern.mask(count * length)
        self.attributes = _attributes_of(pattern, self._observed.tolist(), count * length)


class Observer:
    """An accumulator of neural covariances V = XXᵀ/n (Definition 3.1): `add` every layer, then take the `dataset`.

    It keeps covariances, which are sums in double precision, and the last hidden states.

    Arguments:
        width: n, the number of features of the hidden states, to be checked; None for any.
        tokens: the tokens of each prompt to observe, as indices, a mask or a slice; None for all. see `observe` for
            the subsets that can be fitted.
        prompts: the prompts to observe, in the same form.
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
        self.reader = TokenReader("networks", width=width, tokens=tokens, prompts=prompts, pattern=pattern)
        self.first_network = first_network
        self.covariances: list[np.ndarray] = []
        self.shortcuts: list[np.ndarray] = []
        self.before: np.ndarray | None = None
        self.corners: list[np.ndarray] = []
        self.coarsest = np.dtype(np.float32)
        self.labels: dict[Any, Any] = {}

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
        values = as_array(state, name)
        if len(self.corners) < 4:
            self.corners.append(values[(slice(4),) * (values.ndim - 1)].astype(np.float64))
        X = self.reader.read(values, name)
        if spacing_of(X.dtype) > spacing_of(self.coarsest):
            self.coarsest = X.dtype
        X = X.astype(np.result_type(X.dtype, np.float32), copy=False)
        V = covariances_of(X)
        self._check_finite(V, X, name)
        self.shortcuts.append(self._shortcut(X))
        self.covariances.append(V)
        self.before = None  # before the next is copied; networks may add in place to what they returned
        self.before = X.copy()

    def dataset(self, *, layers: ArrayLike | None = None) -> xr.Dataset:
        """The covariances of all layers so far.

        Arguments:
            layers: layer numbers of the added layers; None for 0, 1, 2, ….

        Returns:
            The Dataset of `covariance_dataset`, see `validate`, with the attention pattern in its attributes.
        """
        return joined_observers([self], layers=layers)

    def _shortcut(self, X: np.ndarray) -> np.ndarray:
        """`SHORTCUT` of each network."""
        if self.before is None:
            return np.full(len(X), np.nan)
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            overlaps = np.vecdot(X, self.before).sum(axis=-1, dtype=np.float64)
            return overlaps / (X.shape[-1] * np.trace(self.covariances[-1], axis1=-2, axis2=-1))

    def _check_finite(self, V: np.ndarray, X: np.ndarray, name: str) -> None:
        # A NaN or an infinity in X appears on the diagonal of V, which is much smaller.
        finite = np.isfinite(np.diagonal(V, axis1=-2, axis2=-1)).all(axis=-1)
        if not finite.all():
            network = int(np.argmin(finite))
            bad = np.count_nonzero(~np.isfinite(X[network]))
            fault = f"{bad} entries are NaN or infinite" if bad else f"XXᵀ overflows {X.dtype}"
            raise InputError(f"{name}, network {self.first_network + network}: {fault}")


def covariances_of(X: np.ndarray) -> Float[np.ndarray, "networks m m"]:
    """XXᵀ/n in double precision, some networks at a time.

    Sums in single precision lose the smallest eigenvalue of V where the condition number is 5·10⁴ at n = 64; the
    rounding of X itself, of independent entries, is as large from 10¹¹ on.
    """
    together = max(1, 2**22 // max(1, X[0].size))
    parts = (X[start : start + together].astype(np.float64) for start in range(0, len(X), together))
    with np.errstate(over="ignore", invalid="ignore"):
        return np.concatenate([part @ part.mT for part in parts]) / X.shape[-1]


def joined_observers(observers: Sequence[Observer], *, layers: ArrayLike | None = None) -> xr.Dataset:
    """The Dataset of networks that were observed in parts, in their order, each by an `Observer`."""
    parts = [observer.covariances for observer in observers]
    if not parts or not parts[0]:
        raise InputError("hidden_states: no layer was given")
    sizes = [f"{len(part)} layers of covariances of shape {part[0].shape[1:] if part else ()}" for part in parts]
    for observer, size in zip(observers, sizes, strict=True):
        if size != sizes[0]:
            raise InputError(
                f"hidden_states: network {observer.first_network}: has {size}, "
                f"where network {observers[0].first_network} has {sizes[0]}"
            )
    width = np.concatenate([np.full(len(observer.covariances[0]), observer.reader.width) for observer in observers])
    V = np.empty((len(width), len(parts[0]), *parts[0][0].shape[1:]), np.result_type(*(V for p in parts for V in p)))
    start = 0
    for part in parts:
        for layer, covariances in enumerate(part):
            V[start : start + len(covariances), layer] = covariances
        start += len(part[0])
    data = covariance_dataset(V, width=width, layers=layers).assign_attrs(observers[0].reader.attributes)
    shortcuts = np.concatenate([np.stack(observer.shortcuts, axis=1) for observer in observers])
    data = data.assign_coords({SHORTCUT: (("network", "layer"), shortcuts)})
    _warn_of_rounding(observers)
    numbers = {"network": observers[0].first_network + data["network"].values}
    return data.assign_coords(numbers | observers[0].labels)


def _warn_of_rounding(observers: Sequence[Observer]) -> None:
    coarsest = max((observer.coarsest for observer in observers), key=spacing_of)
    spacing = spacing_of(coarsest)
    share = max(
        rounding_share(observer.covariances, width=observer.reader.width or 1, spacing=spacing)
        for observer in observers
    )
    if share > 0.1:
        warnings.warn(
            f"hidden_states: {coarsest} rounds by {share:.0%} of the change from layer to layer (root mean squares), "
            "which a fit takes for noise of the layers: run and save the networks in float32",
            LowPrecisionWarning,
            skip_file_prefixes=(str(Path(__file__).parent),),  # at the line of the caller
        )


@checked
def take(data: xr.Dataset, *, prompts: list[int] | None = None, tokens: int | None = None) -> xr.Dataset:
    """Take some prompts of observed networks, and the first tokens of each.

    Prompts of one network have a law of their own, whatever other prompts pass through it; so have, with a causal mask,
    the first tokens of a prompt. Fewer tokens cost less: m tokens have m(m + 1)/2 covariances.

    Arguments:
        data: observed covariances.
        prompts: numbers of the prompts, in the order of the tokens; None for all.
        tokens: number of the tokens of each prompt to take; None for all.

    Returns:
        The Dataset of these tokens. If tokens are left out to which others attend, the attribute `incomplete` is set,
        and a fit of attention is refused.

    Raises:
        InputError: for prompts that the data do not have, and for less than one token.
    """
    pattern, count = Pattern.in_attributes(data.attrs), data.sizes["token_a"]
    lengths = pattern.prompts or (count,)
    chosen = range(len(lengths)) if prompts is None else sorted(set(prompts))
    if not chosen or chosen[0] < 0 or chosen[-1] >= len(lengths):
        raise InputError(f"prompts: some of 0 to {len(lengths) - 1} are needed, got {list(chosen)}")
    at_least_one(**given(tokens=tokens))
    starts = np.cumsum((0, *lengths))
    indices = [int(token) for prompt in chosen for token in np.arange(starts[prompt], starts[prompt + 1])[:tokens]]
    attributes = {name: value for name, value in data.attrs.items() if name not in PATTERN_ATTRIBUTES}
    part = data.isel(token_a=indices, token_b=indices)
    part.attrs = attributes | _attributes_of(pattern, indices, count) | {TOKENS: len(indices)}
    return part


def _attributes_of(pattern: Pattern, indices: list[int], tokens: int) -> dict[str, Any]:
    """The pattern of some of so many tokens as attributes; `incomplete` if they attend to others."""
    try:
        return pattern.restricted(indices, tokens).attributes()
    except InputError:
        return {INCOMPLETE: 1.0}


def _indices(chosen: Any, count: int, name: str) -> Int[np.ndarray, " chosen"]:
    """The chosen ones of so many; None chooses all."""
    index = slice(None) if chosen is None else chosen
    if not isinstance(index, slice):
        index = np.asarray(index)
        index = index if index.size else index.astype(int)  # an empty list has no type of its own
        if index.dtype.kind not in "iub":
            raise InputError(f"{name}: indices, a mask or a slice are needed, got {shown(chosen)}")
    try:
        indices = np.atleast_1d(np.arange(count)[index])
    except IndexError as error:
        raise InputError(f"{name}: cannot choose among {count} {name} by {chosen!r} ({first_line(error)})") from error
    if indices.ndim != 1 or len(indices) == 0 or len(np.unique(indices)) < len(indices):
        raise InputError(f"{name}: at least one of the {name}, and each only once, is needed, got {indices.tolist()}")
    return indices
