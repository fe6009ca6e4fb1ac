"""Everything that the likelihood of a path needs from the data, computed once."""

import dataclasses
import math
from collections.abc import Callable, Iterator
from functools import partial

import equinox as eqx
import jax
import numpy as np
import xarray as xr
from jaxtyping import Bool, Float

from sdeinfer._files import InputError
from sdeinfer.covariance import CausalSpectrum, Spectrum, coordinates, pairs, singular, spectrum, vech
from sdeinfer.layers import drift_terms, variance_terms
from sdeinfer.observation import outputs_of, validate

BLOCK = 2048
"""Transitions that are reduced at a time."""

ENTRIES = 2**17
"""Most entries of the largest arrays, of m³ a transition, that are computed at a time: they stay in a cache."""


class Terms(eqx.Module):
    """One-layer transitions V → V + dV in the spectral coordinates of V (see `covariance.Spectrum`, `CausalSpectrum`).

    In these coordinates, and divided by √(h (1 + [i = j])), the p entries of dV are independent normals under the Euler
    chain of every architecture: z ~ N(θ₁ b₁ + θ₂ b₂, a + κ² e). `FiniteWidth` says what comes with a finite width.

    Attributes:
        increments: z, shape (..., p).
        drift: b₁ to b₄ of `layers.drift_terms`, in the coordinates of z; shape (..., 4, p).
        mixing: e, shape (..., p).
        variance: f of `layers.variance_terms`, shape (..., features, p).
        log_jacobian: log |∂z/∂dV|, which makes densities of z densities of V; shape (...).
    """

    increments: Float[np.ndarray, "... p"]
    drift: Float[np.ndarray, "... 4 p"]
    mixing: Float[np.ndarray, "... p"]
    variance: Float[np.ndarray, "... features p"]
    log_jacobian: Float[np.ndarray, "..."]


@dataclasses.dataclass(frozen=True)
class Path:
    """The transitions to be used of observed paths, network by network.

    Attributes:
        covariance: V of every network after every layer, shape (networks, layers, m, m).
        width: n of each network, shape (networks,).
        network: the network of each transition, ascending; shape (transitions,).
        layer: the position of the layer that it starts from; shape (transitions,).
        gap: how many layers lie between each observed layer and the next, shape (layers − 1,).
        causal: whether the coordinates are those of attention with a causal mask.
    """

    covariance: np.ndarray
    width: np.ndarray
    network: np.ndarray
    layer: np.ndarray
    gap: np.ndarray
    causal: bool = False

    @property
    def tokens(self) -> int:
        """The number of tokens m."""
        return self.covariance.shape[-1]

    def __len__(self) -> int:
        return len(self.network)

    def starts(self, chosen: slice | np.ndarray) -> Float[np.ndarray, "transitions m m"]:
        """The covariances from which transitions start, symmetrised."""
        return _symmetric(self.covariance[self.network[chosen], self.layer[chosen]])

    def ends(self, chosen: slice | np.ndarray) -> Float[np.ndarray, "transitions m m"]:
        """The covariances at which they end."""
        return _symmetric(self.covariance[self.network[chosen], self.layer[chosen] + 1])

    def terms(self, chosen: slice | np.ndarray) -> Terms:
        """Transitions in their spectral coordinates, with one leading axis; each as one step of the SDE."""
        h = self.gap[self.layer[chosen]] / self.width[self.network[chosen]]
        return _in_parts(partial(_terms, causal=self.causal), self.starts(chosen), self.ends(chosen), h)

    def coordinates(self, chosen: slice | np.ndarray) -> Spectrum | CausalSpectrum:
        """The coordinates of transitions, stacked along a leading axis."""
        return _in_parts(partial(coordinates, causal=self.causal), self.starts(chosen))

    def mixing(self, chosen: slice | np.ndarray) -> Float[np.ndarray, "transitions p"]:
        """The e of transitions alone; it may overflow."""
        with np.errstate(over="ignore"):
            return np.asarray(self.coordinates(chosen).mixing)

    def next_order(self) -> tuple[Float[np.ndarray, "transitions 2 m m"], Float[np.ndarray, "transitions features p"]]:
        """The terms of the drift beyond the limit's and the features of the variance, where transitions start."""
        return _in_parts(_next_order, self.starts(slice(None)))

    def blocks(self) -> Iterator[np.ndarray]:
        """Indices of all transitions, block by block."""
        yield from (np.arange(start, min(start + BLOCK, len(self))) for start in range(0, len(self), BLOCK))

    def chosen(self, which: np.ndarray) -> "Path":
        """Some of the transitions, by their indices."""
        which = np.sort(which)
        return dataclasses.replace(self, network=self.network[which], layer=self.layer[which])

    def of_networks(self, which: np.ndarray) -> "Path":
        """The transitions of some of the networks, by their ascending positions; they are numbered anew."""
        mine = np.isin(self.network, which)
        network = np.searchsorted(which, self.network[mine])
        return Path(self.covariance[which], self.width[which], network, self.layer[mine], self.gap, self.causal)

    def thinned(self, count: int) -> "Path":
        """At most so many of the transitions, evenly spread."""
        return self.chosen(np.unique(np.linspace(0, len(self) - 1, min(count, len(self))).round().astype(int)))

    def which(self, widths: np.ndarray) -> np.ndarray:
        """Which of these ascending widths each transition has."""
        return np.searchsorted(widths, self.width)[self.network]


USED = "used"
"""Optional variable of a Dataset over network and layer: whether the transition that starts there is to be used."""


CAUSAL = "causal"
"""Attribute of a Dataset whose transitions are to be seen in the coordinates of attention with a causal mask."""


def with_mask(data: xr.Dataset, *, causal: bool) -> xr.Dataset:
    """The Dataset whose transitions are to be seen with attention's causal mask, or without."""
    seen = data.assign_attrs({CAUSAL: 1.0})
    if not causal:
        del seen.attrs[CAUSAL]
    return seen


def observed_path(data: xr.Dataset) -> Path:
    """The transitions of a Dataset in which every layer was observed, but for those that its `used` leaves out.

    Raises:
        InputError: for data that are not valid, that skip layers, or in which a covariance is singular, so that its
            transition has no density.
    """
    path = transitions(data)
    if (path.gap != 1).any():
        layers = ", ".join(f"{number:g}" for number in data["layer"].values[:4])
        raise InputError(f"layer: the full path needs every layer, got layers {layers}, …; use models.thinned_path")
    require_densities(path, data)
    return path


def transitions(data: xr.Dataset) -> Path:
    """From each observed layer to the next, whatever lies between, and whether all of them have a density or not."""
    data = validate(data)
    if outputs_of(data):
        raise InputError("outputs: the data hold covariances of outputs, not of the last layer; use models.outputs")
    return _path(data)


def outputs_transitions(data: xr.Dataset) -> Path:
    """From the first layer of each network to its outputs, whose sample covariance stands in for the last layer's.

    Raises:
        InputError: for data that are not valid, or that are not of outputs.
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
    return Path(data["covariance"].values, width, network, layer, gap, causal=bool(data.attrs.get(CAUSAL, False)))


def require_densities(path: Path, data: xr.Dataset, *, ends: bool = False) -> None:
    """Raise where a transition of the path starts at a singular covariance, or ends there; the data name its layer."""
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
    """Which transitions of a Dataset are to be used: all, where it does not say."""
    if USED not in data:
        return np.ones((data.sizes["network"], data.sizes["layer"] - 1), bool)
    return data[USED].transpose("network", "layer").values[:, :-1].astype(bool)


def with_used(data: xr.Dataset, used: Bool[np.ndarray, "networks transitions"]) -> xr.Dataset:
    """The Dataset with only these of its transitions to be used."""
    from_last = np.zeros((len(used), 1), bool)
    return data.assign({USED: (("network", "layer"), np.concatenate([used, from_last], axis=1))})


def _symmetric(V: np.ndarray) -> Float[np.ndarray, "transitions m m"]:
    array = np.asarray(V, np.float64)
    return (array + np.swapaxes(array, -1, -2)) / 2


def _terms(
    V: Float[np.ndarray, "transitions m m"],
    after: Float[np.ndarray, "transitions m m"],
    h: Float[np.ndarray, " transitions"],
    *,
    causal: bool,
) -> Terms:
    rows, columns = pairs(V.shape[-1])
    root, step = np.where(rows == columns, math.sqrt(2), 1.0), np.sqrt(h)[:, None]
    at, drift = coordinates(V, causal=causal), drift_terms(V, causal=causal)
    moved = vech(at.whiten(np.concatenate([(after - V)[None], drift]))) / root
    return Terms(
        increments=moved[0] / step,
        drift=(moved[1:] * step).swapaxes(0, 1),
        mixing=np.asarray(at.mixing),
        variance=vech(variance_terms(V, at, drift)).swapaxes(0, 1),
        log_jacobian=-(V.shape[-1] + 1) * np.asarray(at.log_volume) - np.log(root * step).sum(axis=1),
    )


def _next_order(V: Float[np.ndarray, "transitions m m"]) -> tuple[np.ndarray, np.ndarray]:
    drift = drift_terms(V)
    return drift[2:].swapaxes(0, 1), vech(variance_terms(V, spectrum(V), drift)).swapaxes(0, 1)


def _in_parts[T](function: Callable[..., T], V: Float[np.ndarray, "transitions m m"], *more: np.ndarray) -> T:
    """Apply a function to parts of V and of what goes with it, and put together what it returns."""
    size = max(1, ENTRIES // V.shape[-1] ** 3)
    # Callers refuse terms that overflow, with their place.
    with np.errstate(all="ignore"):
        parts = [function(*(x[start : start + size] for x in (V, *more))) for start in range(0, len(V), size)]
    return parts[0] if len(parts) == 1 else jax.tree.map(lambda *each: np.concatenate(each), *parts)
