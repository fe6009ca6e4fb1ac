"""The used transitions of data in chunks, which are never in memory together."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, Literal

import jax
import numpy as np
import xarray as xr
from jaxtyping import Bool, Float, Int

from sdeinfer._map_reduce import Combine, map_chunks, reduce_chunks
from sdeinfer.covariance import EVERY_TOKEN, Pattern
from sdeinfer.likelihood._transitions import Path, evenly_by, used_of, used_only, without_density
from sdeinfer.observation import Chunk, chunks_of
from sdeinfer.terms import AbstractTerm

GATHERED = 2**26
"""Bytes of the largest number of transitions that are taken into memory."""

SPREAD, ATTENTION_GROWTH, GROWTH, ROUNDING = "logit_spread", "attention_growth", "relu_growth", "rounding"
SINGULAR, LARGEST = "singular", "largest_variance"
"""Variables over network and layer that `infer.survey` adds to data in chunks: the spread of the logits, times τ0, the
growth by attention with θ₁ = 1 and by a ReLU with θ₂ = 1, the rounding of V and whether it is singular, at the start of
each transition; and the largest variance of a token at its end."""


@dataclasses.dataclass(frozen=True, eq=False)
class ChunkedPath:
    """The used transitions of networks observed at every layer, in chunks of networks.

    Attributes:
        chunks: the chunks.
        width: n of each network, shape (networks,).
        used: whether each transition is used, shape (networks, transitions).
        singular: whether each transition starts at a singular covariance, shape (networks, transitions).
        largest: the largest variance of a token at the end of each transition, shape (networks, transitions).
        layers: numbers of the observed layers.
        tokens: number of tokens m.
        pattern: the attention pattern of the coordinates.
        others: terms of the limit beside the package's.
        nearby: indices of some transitions, ascending, and these transitions, which are in memory.
    """

    in_memory: ClassVar[Literal[False]] = False
    initial: ClassVar[None] = None

    chunks: tuple[Chunk, ...]
    width: Float[np.ndarray, " networks"]
    used: Bool[np.ndarray, "networks transitions"]
    singular: Bool[np.ndarray, "networks transitions"]
    largest: Float[np.ndarray, "networks transitions"]
    layers: np.ndarray
    tokens: int
    pattern: Pattern = EVERY_TOKEN
    others: tuple[AbstractTerm, ...] = ()
    nearby: tuple[Int[np.ndarray, " some"], Path] | None = None

    def __len__(self) -> int:
        return int(np.count_nonzero(self.used))

    @property
    def gap(self) -> Int[np.ndarray, " transitions"]:
        """Number of layers from each observed layer to the next, which is 1."""
        return np.ones(self.used.shape[1], int)

    @property
    def at_once(self) -> int:
        """Largest number of transitions that are taken into memory."""
        return max(1, GATHERED // (16 * self.tokens**2))

    def take(self, indices: Int[np.ndarray, " some"]) -> "Path | ChunkedPath":
        """The transitions with the given indices, in ascending order; in memory if there are at most `at_once`."""
        indices = np.sort(indices)
        if self.nearby is not None:
            there, path = self.nearby
            place = np.searchsorted(there, indices)
            if (place < len(there)).all() and (there[place] == indices).all():
                return path.take(place)
        if len(indices) <= self.at_once:
            return self._gathered(indices)
        return dataclasses.replace(self, used=used_only(self.used, indices), nearby=None)

    def with_nearby(self, indices: Int[np.ndarray, " some"]) -> "ChunkedPath":
        """The path with some transitions in memory, from which `take` takes."""
        indices = np.sort(indices)
        return dataclasses.replace(self, nearby=(indices, self._gathered(indices)))

    def thinned(self, count: int) -> Path:
        """At most `count` of the transitions, the same as of `Path.thinned`."""
        return self._gathered(evenly_by(self.largest[self.used], count))

    def require_densities(self, chosen: Int[np.ndarray, " some"] | None = None) -> None:
        """Raise an InputError if a transition, or one of those chosen, starts at a singular covariance."""
        flat = np.flatnonzero(self.used & self.singular)
        if chosen is not None and len(flat):
            flat = np.intersect1d(flat, np.flatnonzero(self.used)[chosen])
        if len(flat):
            network, layer = divmod(int(flat[0]), self.used.shape[1])
            raise without_density(network, float(self.layers[layer]))

    def reduced[T](self, function: Callable[[Path], T], combine: Combine[T], *, name: str) -> T:
        """The combined results of a function of the transitions of each chunk that has some."""
        parts = [_PathOfChunk(self, chunk) for chunk in self.chunks if self.used[chunk.first : chunk.last].any()]
        return reduce_chunks(partial(_on_path, function), parts, combine, name=name)

    def _gathered(self, indices: Int[np.ndarray, " some"]) -> Path:
        """Some transitions in memory; ascending indices."""
        network, layer = np.divmod(np.flatnonzero(self.used)[indices], self.used.shape[1])
        found = gathered_networks(self.chunks, network, layer)
        each = np.arange(len(indices))
        return Path(found, self.width[network], each, np.zeros_like(each), np.ones(1, int), self.pattern, self.others)


def chunked_path(data: xr.Dataset, others: tuple[AbstractTerm, ...] = ()) -> ChunkedPath:
    """The used transitions of a Dataset in chunks, which `infer.survey` has examined."""
    return ChunkedPath(
        chunks=tuple(chunks_of(data)),
        width=data["width"].values.astype(np.float64),
        used=used_of(data),
        singular=data[SINGULAR].values[:, :-1],
        largest=data[LARGEST].values[:, :-1],
        layers=data["layer"].values,
        tokens=data.sizes["token_a"],
        pattern=Pattern.in_attributes(data.attrs),
        others=others,
    )


def added[T](one: T, other: T) -> T:
    """The sums of the leaves of two trees of arrays."""
    return jax.tree.map(np.add, one, other)


def gathered_networks(
    chunks: tuple[Chunk, ...], network: Int[np.ndarray, " some"], layer: Int[np.ndarray, " some"] | None
) -> Float[np.ndarray, "some layers m m"]:
    """Covariances of some networks, ascending: at all layers, or for each at one layer and the next."""
    parts, first = [], np.searchsorted(network, [chunk.first for chunk in chunks])
    for chunk, start, stop in zip(chunks, first, [*first[1:], len(network)], strict=True):
        if start < stop:
            own = None if layer is None else layer[start:stop].astype(np.int32)
            parts.append(_SomeOfChunk(chunk, (network[start:stop] - chunk.first).astype(np.int32), own))
    return np.concatenate(map_chunks(_some, parts, name="gather"))


def repeated_once(values: np.ndarray) -> np.ndarray:
    """Values, or one of them if all are equal: what workers are sent should be small."""
    return values[:1] if (values == values[0]).all() else values


class _PathOfChunk:
    """The used transitions of a chunk, which a worker reads."""

    def __init__(self, path: ChunkedPath, chunk: Chunk):
        own = slice(chunk.first, chunk.last)
        self.chunk, self.pattern, self.width, self.gap = chunk, path.pattern, repeated_once(path.width[own]), path.gap
        self.others, self.used = path.others, np.packbits(path.used[own])

    def read(self) -> Path:
        networks, transitions = len(self.chunk), len(self.gap)
        used = np.unpackbits(self.used, count=networks * transitions).astype(bool).reshape(networks, transitions)
        network, layer = np.nonzero(used)
        V = self.chunk.read(used.any(axis=1))
        width = np.broadcast_to(self.width, networks)
        return Path(V, width, network, layer, self.gap, self.pattern, self.others, first=self.chunk.first)


class _SomeOfChunk:
    """Some networks or transitions of a chunk, which a worker reads."""

    def __init__(self, chunk: Chunk, network: np.ndarray, layer: np.ndarray | None):
        self.chunk, self.network, self.layer = chunk, network, layer


def _on_path(function: Callable[[Path], Any], part: _PathOfChunk) -> Any:
    return function(part.read())


def _some(part: _SomeOfChunk) -> np.ndarray:
    wanted = np.zeros(len(part.chunk), bool)
    wanted[part.network] = True
    V = part.chunk.read(wanted)
    if part.layer is None:
        return V[part.network]
    return np.stack([V[part.network, part.layer], V[part.network, part.layer + 1]], axis=1)
