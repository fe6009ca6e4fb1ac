"""The used transitions between observed layers."""

import collections
import dataclasses
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import xarray as xr
from jaxtyping import Bool, Float, Int

from sdeinfer._files import InputError
from sdeinfer._progress import done
from sdeinfer.covariance import Pattern, coordinates
from sdeinfer.covariance._diffusion import Spectrum
from sdeinfer.covariance._matrix import singular
from sdeinfer.covariance._pattern import EVERY_TOKEN, PATTERN_ATTRIBUTES
from sdeinfer.covariance._pattern_noise import PatternSpectrum
from sdeinfer.layers._finite_width import drift_terms, variance_terms
from sdeinfer.likelihood._terms import TERM_ENTRIES, Terms, over_covariances, remembered_terms, terms_of
from sdeinfer.observation import validate
from sdeinfer.observation._dataset import outputs_of
from sdeinfer.terms import AbstractTerm

BLOCK_TRANSITIONS = 2048
"""Largest number of transitions reduced at a time; fewer with many tokens, see `TERM_ENTRIES`."""

MANY_TOKENS = 16
"""Number of tokens from which terms are remembered, as those with an attention pattern are."""


@dataclasses.dataclass(frozen=True)
class Path:
    """The used transitions of observed paths, ordered by network."""

    covariance: np.ndarray
    width: np.ndarray
    network: np.ndarray
    layer: np.ndarray
    gap: np.ndarray
    pattern: Pattern = EVERY_TOKEN
    others: tuple[AbstractTerm, ...] = ()
    first: int = 0
    first_layer: int = 0
    outputs: int = 0

    @property
    def used(self) -> Bool[np.ndarray, "networks transitions"]:
        """Whether each transition from an observed layer to the next is one of these."""
        mask = np.zeros((len(self.covariance), len(self.gap)), bool)
        mask[self.network, self.layer] = True
        return mask

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
        function = partial(terms_of if cheap else remembered_terms, pattern=self.pattern, others=self.others)
        return over_covariances(function, self.starts(chosen), self.ends(chosen), h)

    def coordinates(self, chosen: slice | np.ndarray) -> Spectrum | PatternSpectrum:
        """Spectral coordinates at the starts of transitions, stacked along a leading axis."""
        return over_covariances(partial(coordinates, pattern=self.pattern), self.starts(chosen))

    def mixing(self, chosen: slice | np.ndarray) -> Float[np.ndarray, "transitions p"]:
        """The e of transitions, without their other terms."""
        return over_covariances(lambda V: np.asarray(coordinates(V, self.pattern).mixing), self.starts(chosen))

    def next_order(
        self,
    ) -> tuple[Float[np.ndarray, "transitions more m m"], Float[np.ndarray, "transitions features p"]]:
        """Drift terms beyond the limit and variance features, at the starts of all transitions."""

        def terms(V: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            drift = drift_terms(V)
            return drift[2:].swapaxes(0, 1), variance_terms(V, coordinates(V), drift).swapaxes(0, 1)

        return over_covariances(terms, self.starts(slice(None)))

    def blocks(self) -> Iterator[np.ndarray]:
        """Iterate over blocks of indices of all transitions."""
        size = max(1, min(BLOCK_TRANSITIONS, TERM_ENTRIES // (self.tokens * (self.tokens + 1) // 2)))
        yield from (np.arange(start, min(start + size, len(self))) for start in range(0, len(self), size))

    def over_blocks[T](self, function: Callable[[np.ndarray], T]) -> Iterator[T]:
        """Iterate over the results of a function of blocks of indices, in order; threads compute the next ones."""
        blocks, cores = list(self.blocks()), os.cpu_count() or 1
        if len(blocks) == 1:
            yield function(blocks[0])
            return
        with ThreadPoolExecutor(cores) as pool:
            ahead = collections.deque(pool.submit(function, block) for block in blocks[:cores])
            for number in range(len(blocks)):
                done(number / len(blocks))
                result = ahead.popleft().result()
                if number + cores < len(blocks):
                    ahead.append(pool.submit(function, blocks[number + cores]))
                yield result

    def take(self, indices: np.ndarray) -> "Path":
        """The transitions with the given indices, in ascending order."""
        indices = np.sort(indices)
        return dataclasses.replace(self, network=self.network[indices], layer=self.layer[indices])

    def between(
        self, starts: Float[np.ndarray, "some m m"], ends: Float[np.ndarray, "some m m"], width: np.ndarray
    ) -> "Path":
        """Transitions from given starts to given ends, each of a network of its own, as those of this path."""
        number = np.arange(len(starts))
        V, gap = np.stack([starts, ends], axis=1), np.ones(1, int)
        return Path(V, width, number, 0 * number, gap=gap, pattern=self.pattern, others=self.others)

    def require_densities(self, *, ends: bool = False) -> None:
        """Check that transitions have densities."""
        for later in (0, 1) if ends else (0,):
            for block in self.blocks():
                flat = singular(self.covariance[self.network[block], self.layer[block] + later])
                if flat.any():
                    first = block[np.argmax(flat)]
                    numbers = self.first_layer + np.cumsum([0, *self.gap])
                    network, layer = self.first + int(self.network[first]), float(numbers[self.layer[first] + later])
                    raise InputError(
                        f"covariance: network {network}, layer {layer:g}: singular, so that its transition has no "
                        "density (two tokens coincide, up to rounding)"
                    )

    def of_networks(self, networks: np.ndarray) -> "Path":
        """The transitions of the networks with the given ascending indices; the networks are renumbered."""
        members = np.isin(self.network, networks)
        network = np.searchsorted(networks, self.network[members])
        fields = {"covariance": self.covariance[networks], "width": self.width[networks], "network": network}
        return dataclasses.replace(self, **fields, layer=self.layer[members], first=0)

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
    """The Dataset with the coordinates of an attention pattern."""
    pattern.mask(data.sizes["token_a"])
    attributes = {name: value for name, value in data.attrs.items() if name not in PATTERN_ATTRIBUTES}
    return data.drop_attrs(deep=False).assign_attrs({**attributes, **pattern.attributes()})


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


def observed_path(data: xr.Dataset, others: tuple[AbstractTerm, ...] = ()) -> Path:
    """The used transitions of a Dataset in which every layer was observed, all of which have densities."""
    path = every_transition(data, others)
    path.require_densities()
    return path


def every_transition(data: xr.Dataset, others: tuple[AbstractTerm, ...] = ()) -> Path:
    """The used transitions of a Dataset in which every layer was observed; they may start at singular V."""
    path = any_transitions(data, others)
    if (path.gap != 1).any():
        layers = ", ".join(f"{number:g}" for number in data["layer"].values[:4])
        raise InputError(f"layer: the full path needs every layer, got layers {layers}, …; use models.thinned_path")
    return path


def any_transitions(data: xr.Dataset, others: tuple[AbstractTerm, ...] = ()) -> Path:
    """The used transitions from each observed layer to the next; they may skip layers or start at singular V."""
    data = validate(data)
    if outputs_of(data):
        raise InputError("outputs: the data hold covariances of outputs, not of the last layer; use models.outputs")
    return _path(data, others)


def outputs_transitions(data: xr.Dataset) -> Path:
    """The transitions from the first layer of each network to the sample covariance of its outputs."""
    data = validate(data)
    if not outputs_of(data):
        raise InputError("outputs: the data are not of outputs; make them with observe_outputs")
    return _path(data)


def require_some(count: int) -> None:
    """Check that transitions are left."""
    if not count:
        raise InputError("used: no transition is left")


def _path(data: xr.Dataset, others: tuple[AbstractTerm, ...] = ()) -> Path:
    network, layer = np.nonzero(used_of(data))
    require_some(len(network))
    width, gap = data["width"].values.astype(np.float64), np.diff(data["layer"].values).astype(int)
    pattern, first = Pattern.in_attributes(data.attrs), int(data["layer"].values[0])
    V, count = data["covariance"].values, outputs_of(data)
    return Path(V, width, network, layer, gap, pattern, others, first_layer=first, outputs=count)
