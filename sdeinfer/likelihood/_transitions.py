"""Transitions between observed layers, and the data terms of their likelihood."""

import collections
import dataclasses
import hashlib
import math
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import equinox as eqx
import jax
import numpy as np
import xarray as xr
from jaxtyping import Bool, Float, Int

from sdeinfer._files import InputError
from sdeinfer._progress import done
from sdeinfer.covariance import (
    EVERY_TOKEN,
    PATTERN_ATTRIBUTES,
    Pattern,
    PatternSpectrum,
    Spectrum,
    coordinates,
    pairs,
    singular,
    vech,
)
from sdeinfer.layers import drift_terms, variance_terms
from sdeinfer.observation import outputs_of, validate

BLOCK, BLOCK_TERMS = 2048, 2**17
"""Largest number of transitions reduced at a time, and of their terms: a transition has p = m(m + 1)/2."""

REMEMBERED, MANY_TOKENS = 2**28, 16
"""Bytes of terms that are kept: those with an attention pattern, and those of many tokens."""

_TERMS: dict[bytes, "Terms"] = {}
_LOCK = threading.Lock()

ENTRIES = 2**17
"""Bound on the number of entries of the largest arrays (m³ per transition) computed at a time, to fit in a cache."""


class Terms(eqx.Module):
    """One-layer transitions V → V + dV in the spectral coordinates of V (see `covariance.Spectrum`, `PatternSpectrum`).

    Divided by √(h (1 + [i = j])), the p entries of dV in these coordinates are independent normals under the Euler
    chain of every architecture: z ~ N(θ₁ b₁ + θ₂ b₂, a + κ² e). See `FiniteWidth` for the corrections at finite width.

    Attributes:
        increments: z, shape (..., p).
        drift: b₁, b₂, … of `layers.drift_terms`, in the coordinates of z; shape (..., drifts, p).
        mixing: e, shape (..., p).
        variance: f of `layers.variance_terms`, shape (..., features, p).
        log_jacobian: log |∂z/∂dV|, to convert densities of z to densities of V; shape (...).
    """

    increments: Float[Any, "... p"]
    drift: Float[Any, "... drifts p"]
    mixing: Float[Any, "... p"]
    variance: Float[Any, "... features p"]
    log_jacobian: Float[Any, "..."]


@dataclasses.dataclass(frozen=True)
class Path:
    """The used transitions of observed paths, ordered by network.

    Attributes:
        covariance: V of every network at every observed layer, shape (networks, layers, m, m).
        width: n of each network, shape (networks,).
        network: index of each transition's network, ascending; shape (transitions,).
        layer: index of the observed layer at which each transition starts; shape (transitions,).
        gap: number of layers from each observed layer to the next, shape (layers − 1,).
        pattern: the attention pattern of the coordinates.
        first: number of the first network in the data, of which this may be a chunk; for errors.
    """

    covariance: np.ndarray
    width: np.ndarray
    network: np.ndarray
    layer: np.ndarray
    gap: np.ndarray
    pattern: Pattern = EVERY_TOKEN
    first: int = 0

    @property
    def tokens(self) -> int:
        """Number of tokens m."""
        return self.covariance.shape[-1]

    def __len__(self) -> int:
        return len(self.network)

    def starts(self, chosen: slice | np.ndarray) -> Float[np.ndarray, "transitions m m"]:
        """Covariances at which transitions start, symmetrised."""
        return _symmetric(self.covariance[self.network[chosen], self.layer[chosen]])

    def ends(self, chosen: slice | np.ndarray) -> Float[np.ndarray, "transitions m m"]:
        """Covariances at which transitions end, symmetrised."""
        return _symmetric(self.covariance[self.network[chosen], self.layer[chosen] + 1])

    def terms(self, chosen: slice | np.ndarray) -> Terms:
        """Terms of transitions, each taken as one step of the SDE, with one leading axis."""
        h = self.gap[self.layer[chosen]] / self.width[self.network[chosen]]
        cheap = self.pattern.everything and self.tokens < MANY_TOKENS
        function = partial(terms_of if cheap else remembered_terms, pattern=self.pattern)
        return _in_parts(function, self.starts(chosen), self.ends(chosen), h)

    def coordinates(self, chosen: slice | np.ndarray) -> Spectrum | PatternSpectrum:
        """Spectral coordinates at the starts of transitions, stacked along a leading axis."""
        return _in_parts(partial(coordinates, pattern=self.pattern), self.starts(chosen))

    def mixing(self, chosen: slice | np.ndarray) -> Float[np.ndarray, "transitions p"]:
        """The e of transitions, without their other terms."""
        if not self.pattern.everything:
            return np.asarray(self.terms(chosen).mixing)
        return _in_parts(lambda V: np.asarray(coordinates(V, self.pattern).mixing), self.starts(chosen))

    def next_order(
        self,
    ) -> tuple[Float[np.ndarray, "transitions more m m"], Float[np.ndarray, "transitions features p"]]:
        """Drift terms beyond the limit and variance features, at the starts of all transitions."""
        return _in_parts(_next_order, self.starts(slice(None)))

    def blocks(self) -> Iterator[np.ndarray]:
        """Iterate over blocks of indices of all transitions."""
        size = max(1, min(BLOCK, BLOCK_TERMS // (self.tokens * (self.tokens + 1) // 2)))
        yield from (np.arange(start, min(start + size, len(self))) for start in range(0, len(self), size))

    def over_blocks[T](self, function: Callable[[np.ndarray], T]) -> Iterator[T]:
        """Iterate over the results of a function of blocks of indices, in order; threads compute the next ones.

        The share of the blocks that are done shows on the line of the current phase.
        """
        blocks, cores = list(self.blocks()), os.cpu_count() or 1
        if len(blocks) == 1:
            yield function(blocks[0])
            return
        with ThreadPoolExecutor(cores) as pool:
            ahead = collections.deque(pool.submit(function, block) for block in blocks[:cores])
            for number in range(len(blocks)):
                done(number / len(blocks))
                found = ahead.popleft().result()
                if number + cores < len(blocks):
                    ahead.append(pool.submit(function, blocks[number + cores]))
                yield found

    def take(self, indices: np.ndarray) -> "Path":
        """The transitions with the given indices, in ascending order."""
        indices = np.sort(indices)
        return dataclasses.replace(self, network=self.network[indices], layer=self.layer[indices])

    def of_networks(self, networks: np.ndarray) -> "Path":
        """The transitions of the networks with the given ascending indices; the networks are renumbered."""
        mine = np.isin(self.network, networks)
        network = np.searchsorted(networks, self.network[mine])
        return Path(self.covariance[networks], self.width[networks], network, self.layer[mine], self.gap, self.pattern)

    def thinned(self, count: int) -> "Path":
        """At most `count` of the transitions; which ones does not depend on the order of networks and tokens."""
        if count >= len(self):
            return self
        return self.take(evenly_by(largest_variances(self.covariance)[self.network, self.layer + 1], count))

    def width_index(self, widths: np.ndarray, chosen: slice | np.ndarray = slice(None)) -> np.ndarray:  # noqa: B008 immutable
        """Index of each transition's width in an ascending array of widths."""
        return np.searchsorted(widths, self.width[self.network[chosen]])


USED = "used"
"""Optional boolean variable of a Dataset over network and layer: whether to use the transition that starts there."""


def with_pattern(data: xr.Dataset, pattern: Pattern) -> xr.Dataset:
    """The Dataset with the coordinates of an attention pattern.

    Raises:
        InputError: if the pattern is one of another number of tokens.
    """
    pattern.mask(data.sizes["token_a"])
    other = {name: value for name, value in data.attrs.items() if name not in PATTERN_ATTRIBUTES}
    return data.drop_attrs(deep=False).assign_attrs({**other, **pattern.attributes()})


def observed_path(data: xr.Dataset) -> Path:
    """The used transitions of a Dataset in which every layer was observed.

    Raises:
        InputError: for invalid data, for data that skip layers, or if a transition starts at a singular covariance and
            so has no density.
    """
    path = any_transitions(data)
    if (path.gap != 1).any():
        layers = ", ".join(f"{number:g}" for number in data["layer"].values[:4])
        raise InputError(f"layer: the full path needs every layer, got layers {layers}, …; use models.thinned_path")
    require_densities(path, data)
    return path


def any_transitions(data: xr.Dataset) -> Path:
    """The used transitions from each observed layer to the next; they may skip layers or start at singular V."""
    data = validate(data)
    if outputs_of(data):
        raise InputError("outputs: the data hold covariances of outputs, not of the last layer; use models.outputs")
    return _path(data)


def outputs_transitions(data: xr.Dataset) -> Path:
    """The transitions from the first layer of each network to the sample covariance of its outputs.

    Raises:
        InputError: for invalid data or data without outputs.
    """
    data = validate(data)
    if not outputs_of(data):
        raise InputError("outputs: the data are not of outputs; make them with observe_outputs")
    return _path(data)


def _path(data: xr.Dataset) -> Path:
    network, layer = np.nonzero(used_of(data))
    if not len(network):
        raise InputError("used: no transition is left")
    width, gap = data["width"].values.astype(np.float64), np.diff(data["layer"].values).astype(int)
    return Path(data["covariance"].values, width, network, layer, gap, pattern=Pattern.in_attributes(data.attrs))


def require_densities(path: Path, data: xr.Dataset, *, ends: bool = False) -> None:
    """Raise an InputError if a transition of the path starts (or, with `ends`, ends) at a singular covariance.

    Arguments:
        path: the transitions.
        data: the Dataset of the path, for the layer numbers in the message.
        ends: whether to check the ends as well.
    """
    for later in (0, 1) if ends else (0,):
        for block in path.blocks():
            without_density = singular(path.covariance[path.network[block], path.layer[block] + later])
            if without_density.any():
                first = block[np.argmax(without_density)]
                layer = data["layer"].values[path.layer[first] + later]
                raise InputError(
                    f"covariance: network {path.network[first]}, layer {layer:g}: singular, so that its transition has "
                    "no density (two tokens coincide, up to rounding)"
                )


def used_of(data: xr.Dataset) -> Bool[np.ndarray, "networks transitions"]:
    """Whether each transition of a Dataset is used; all are if the variable `used` is missing."""
    if USED not in data:
        return np.ones((data.sizes["network"], data.sizes["layer"] - 1), bool)
    return data[USED].transpose("network", "layer").values[:, :-1].astype(bool)


def with_used(data: xr.Dataset, used: Bool[np.ndarray, "networks transitions"]) -> xr.Dataset:
    """The Dataset with the variable `used` set."""
    from_last = np.zeros((len(used), 1), bool)
    return data.assign({USED: (("network", "layer"), np.concatenate([used, from_last], axis=1))})


def largest_variances(V: Float[np.ndarray, "... m m"]) -> Float[np.ndarray, "..."]:
    """The largest variance of a token, in float32; sorted by it, transitions have an order of their own."""
    return np.diagonal(V, axis1=-2, axis2=-1).max(axis=-1).astype(np.float32)


def evenly_by(key: Float[np.ndarray, " all"], count: int) -> Int[np.ndarray, " some"]:
    """Indices of `count` values that are evenly spaced in the order of the values; fewer, if there are not so many."""
    order = np.argsort(key, kind="stable")
    return np.sort(order[np.linspace(0, len(key) - 1, min(count, len(key))).round().astype(int)])


def _symmetric(V: np.ndarray) -> Float[np.ndarray, "transitions m m"]:
    array = np.asarray(V, np.float64)
    return (array + np.swapaxes(array, -1, -2)) / 2


def terms_of(
    V: Float[Any, "transitions m m"],
    after: Float[Any, "transitions m m"],
    h: Float[Any, " transitions"],
    *,
    pattern: Pattern = EVERY_TOKEN,
) -> Terms:
    """Terms of transitions from V to `after` over steps h; NumPy handles NumPy arrays, JAX differentiates."""
    xp, (rows, columns) = V.__array_namespace__(), pairs(V.shape[-1])
    root, step = np.where(rows == columns, math.sqrt(2), 1.0).astype(V.dtype), xp.sqrt(h)[:, None]
    at, drift = coordinates(V, pattern), drift_terms(V, pattern)
    moved = vech(at.whiten(xp.concatenate([(after - V)[None], drift]))) / root
    return Terms(
        increments=moved[0] / step,
        drift=(moved[1:] * step).swapaxes(0, 1),
        mixing=at.mixing,
        variance=variance_terms(V, at, drift, pattern).swapaxes(0, 1),
        log_jacobian=-(V.shape[-1] + 1) * at.log_volume - xp.log(root * step).sum(axis=1),
    )


def increments_of(
    at: Spectrum | PatternSpectrum,
    which: Int[np.ndarray, " draws"],
    dV: Float[np.ndarray, "draws m m"],
    width: Float[np.ndarray, " draws"],
) -> Float[np.ndarray, "draws p"]:
    """The increments z of `Terms` for changes dV by one layer, in the coordinates of the starts with these indices."""
    rows, columns = pairs(dV.shape[-1])
    chosen = jax.tree.map(lambda x: x[which], at)
    return vech(chosen.whiten(dV)) * np.sqrt(width[:, None] / np.where(rows == columns, 2.0, 1.0))


def remembered_terms(
    V: Float[np.ndarray, "transitions m m"],
    after: Float[np.ndarray, "transitions m m"],
    h: Float[np.ndarray, " transitions"],
    *,
    pattern: Pattern,
) -> Terms:
    """`terms_of` data with an attention pattern or many tokens, from the last `REMEMBERED` bytes of them.

    A fit and its check pass over the same data some ten times. A pass costs O(m⁴) per transition, and with a pattern
    O(p³).
    """
    key = hashlib.blake2b(b"".join(np.ascontiguousarray(x).tobytes() for x in (V, after, h)))
    key.update(repr((pattern, V.shape, V.dtype)).encode())
    with _LOCK:
        found = _TERMS.pop(key.digest(), None)
    found = terms_of(V, after, h, pattern=pattern) if found is None else found
    with _LOCK:
        _TERMS[key.digest()] = found
        while len(_TERMS) > 1 and sum(x.nbytes for terms in _TERMS.values() for x in vars(terms).values()) > REMEMBERED:
            _TERMS.pop(next(iter(_TERMS)))
    return found


def _next_order(V: Float[np.ndarray, "transitions m m"]) -> tuple[np.ndarray, np.ndarray]:
    drift = drift_terms(V)
    return drift[2:].swapaxes(0, 1), variance_terms(V, coordinates(V), drift).swapaxes(0, 1)


def _in_parts[T](function: Callable[..., T], V: Float[np.ndarray, "transitions m m"], *more: np.ndarray) -> T:
    """Apply a function to blocks of V and the other arrays, and concatenate the results."""
    size = max(1, ENTRIES // V.shape[-1] ** 3)
    # Callers raise an error that names the network if terms overflow.
    with np.errstate(all="ignore"):
        parts = [function(*(x[start : start + size] for x in (V, *more))) for start in range(0, len(V), size)]
    return parts[0] if len(parts) == 1 else jax.tree.map(lambda *each: np.concatenate(each), *parts)
