"""Random numbers of networks by NumPy: the counterpart of `NetworkKeys` for networks that are sampled once.

Tests: `tests/networks/test_chain.py`.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from sdeinfer.layers._keys import CHI, COLUMNS

GROUP = 256
"""Networks that share a stream of Philox, in order: a network's numbers do not depend on how many follow it."""


@dataclasses.dataclass(frozen=True)
class NetworkStreams:
    """Consecutive networks of one group, and the layer or part of it whose numbers are drawn.

    Each call draws from a stream of its own, which the words of the key, the group and the path determine.

    Attributes:
        words: the integers of the key.
        group: number of the group.
        networks: the networks, counted within the group.
        path: numbers of the layers and parts that `split` and `fold_in` have chosen.
    """

    words: tuple[int, ...]
    group: int
    networks: range
    path: tuple[int, ...] = ()

    def fold_in(self, number: int) -> "NetworkStreams":
        """The streams of one layer."""
        return dataclasses.replace(self, path=(*self.path, int(number)))

    def split(self, count: int) -> "list[NetworkStreams]":
        """The streams of the parts of a layer."""
        return [self.fold_in(part) for part in range(count)]

    def normals(self, shape: tuple[int, ...], dtype: Any) -> Float[np.ndarray, "... networks"]:
        """Standard normals."""
        drawn = self._generator(0).standard_normal((self.networks.stop, *shape))
        return self._last(drawn, dtype)

    def chi(self, freedom: Int[np.ndarray, " k"], *, blocks: int, dtype: Any) -> Float[np.ndarray, "k blocks networks"]:
        """Chi variables with integer degrees of freedom ν ≥ 1."""
        size = (self.networks.stop, len(freedom), blocks)
        return np.sqrt(2 * self._last(self._generator(CHI).standard_gamma(freedom[:, None] / 2, size), dtype))

    def column_sum(
        self,
        K: Float[Any, "m m blocks networks"] | None,
        image: Callable[[Any], Any],
        columns: int,
        *,
        tokens: int,
        blocks: int,
    ) -> Float[Any, "m m blocks networks"]:
        """As `_wishart.column_sum`; a product of stacked matrices is faster here than sums along the networks."""
        first, count = self.networks.start, len(self.networks)
        S, together = 0.0, max(16, 256 // (tokens * blocks))
        first_axes, last_axes = (0, 1), (3, 2)
        factor = None if K is None else np.moveaxis(K, last_axes, first_axes)
        for start in range(0, columns, together):
            shape = (self.networks.stop, blocks, tokens, min(together, columns - start))
            G = self._generator(COLUMNS, start).standard_normal(shape)[first:]
            columns_of = np.moveaxis(G if factor is None else factor @ G, first_axes, last_axes)
            Y = np.moveaxis(image(columns_of), last_axes, first_axes)
            S = S + Y @ Y.mT
        return np.moveaxis(np.broadcast_to(S, (count, blocks, tokens, tokens)), first_axes, last_axes)

    def _generator(self, stream: int, block: int = 0) -> np.random.Generator:
        seeds = np.random.SeedSequence(self.words, spawn_key=(self.group, stream, block, *self.path))
        return np.random.Generator(np.random.Philox(seeds))

    def _last(self, drawn: np.ndarray, dtype: Any) -> np.ndarray:
        return np.ascontiguousarray(np.moveaxis(drawn[self.networks.start :], 0, -1), dtype)
