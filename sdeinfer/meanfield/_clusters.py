"""Clusters of tokens: their number, how long it lasts, when they merge."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int
from numpy.typing import ArrayLike
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components
from scipy.spatial import KDTree

from sdeinfer._files import InputError

CLOSE = 0.999
"""Smallest inner product of neighbours in a cluster, an angle of 2.6°: as in published experiments."""


class Plateau(NamedTuple):
    """An interval of time with a constant number of clusters.

    Attributes:
        clusters: number of clusters.
        start: first time with this number.
        end: first time with another one, or the last time.
    """

    clusters: int
    start: float
    end: float


def clusters(tokens: ArrayLike, *, close: float = CLOSE) -> Int[np.ndarray, " n"]:
    """The cluster of each token, numbered from 0: tokens linked by chains of neighbours with ⟨x, x′⟩ > `close`.

    Arguments:
        tokens: tokens on the unit sphere, shape (n, D).
        close: smallest inner product of neighbours.
    """
    x = np.asarray(tokens, np.float64)
    if x.ndim != 2:
        raise InputError(f"tokens: shape (n, D) is needed, got {x.shape}")
    # ‖x − x′‖² = 2 − 2⟨x, x′⟩.
    pairs = KDTree(x).query_pairs((2 - 2 * close) ** 0.5, output_type="ndarray")
    graph = coo_array((np.ones(len(pairs)), (pairs[:, 0], pairs[:, 1])), shape=(len(x), len(x)))
    return connected_components(graph, directed=False)[1]


def cluster_counts(trajectory: ArrayLike, *, close: float = CLOSE, smallest: int = 1) -> Int[np.ndarray, " times"]:
    """The number of clusters at each time.

    Arguments:
        trajectory: tokens at times, shape (times, n, D).
        close: smallest inner product of neighbours, see `clusters`.
        smallest: number of tokens from which a cluster is counted.
    """
    return np.array(
        [(np.bincount(clusters(tokens, close=close)) >= smallest).sum() for tokens in np.asarray(trajectory)]
    )


def merging_times(ts: ArrayLike, trajectory: ArrayLike, *, close: float = CLOSE) -> Float[np.ndarray, " n"]:
    """The first times with at most 1, 2, …, n clusters; +∞ for what has not happened.

    The first entry is the time of synchronisation: all tokens in one cluster.

    Arguments:
        ts: times, shape (times,).
        trajectory: tokens at these times, shape (times, n, D).
        close: smallest inner product of neighbours, see `clusters`.
    """
    times, counts = np.asarray(ts), cluster_counts(trajectory, close=close)
    reached = counts[None] <= np.arange(1, np.shape(trajectory)[1] + 1)[:, None]
    return np.where(reached.any(axis=1), times[reached.argmax(axis=1)], np.inf)


def plateaus(ts: ArrayLike, counts: ArrayLike) -> list[Plateau]:
    """The intervals of time with a constant number of clusters, in their order.

    A metastable state is a plateau that is long on the scale of log t, such as end > 2 start.

    Arguments:
        ts: times.
        counts: number of clusters at each time, see `cluster_counts`.
    """
    times, counts = np.asarray(ts, float), np.asarray(counts)
    starts = np.flatnonzero(np.diff(counts, prepend=counts[0] - 1))
    ends = np.append(starts[1:], len(counts) - 1)
    return [Plateau(int(counts[i]), float(times[i]), float(times[j])) for i, j in zip(starts, ends, strict=True)]


def order_parameter(tokens: ArrayLike) -> Float[np.ndarray, "*batch"]:
    """‖mean token‖: 0 for balanced tokens, 1 if all are synchronised."""
    return np.asarray(np.linalg.norm(np.asarray(tokens).mean(axis=-2), axis=-1))


def mean_correlation(tokens: ArrayLike) -> Float[np.ndarray, "*batch"]:
    """Mean of ⟨x_i, x_j⟩ over pairs i ≠ j, which tends to 1 as the rank collapses: (n r² − 1)/(n − 1)."""
    n = np.shape(tokens)[-2]
    return np.asarray((n * order_parameter(tokens) ** 2 - 1) / (n - 1))
