"""Clusters of tokens: their number, how long it lasts, when they merge."""

import math
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int
from numpy.typing import ArrayLike
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components
from scipy.spatial import KDTree

from sdeinfer._files import InputError
from sdeinfer.meanfield._flow import SelfAttentionFlow
from sdeinfer.meanfield._reductions import angles

LEAST_COSINE = 0.999
"""Smallest inner product of neighbours in a cluster, an angle of 2.6°: as in published experiments."""


class Plateau(NamedTuple):
    """An interval of time with one number of clusters, until the first time with another one, or the last."""

    clusters: int
    start: float
    end: float


def clusters(tokens: ArrayLike, *, close: float = LEAST_COSINE) -> Int[np.ndarray, " n"]:
    """The cluster of each of n tokens in D dimensions: those linked by chains of neighbours with ⟨x, x′⟩ > `close`."""
    x = np.asarray(tokens, np.float64)
    if x.ndim != 2:
        raise InputError(f"tokens: shape (n, D) is needed, got {x.shape}")
    # ‖x − x′‖² = 2 − 2⟨x, x′⟩.
    pairs = KDTree(x).query_pairs((2 - 2 * close) ** 0.5, output_type="ndarray")
    graph = coo_array((np.ones(len(pairs)), (pairs[:, 0], pairs[:, 1])), shape=(len(x), len(x)))
    return connected_components(graph, directed=False)[1]


def cluster_counts(trajectory: ArrayLike, *, close: float = LEAST_COSINE) -> Int[np.ndarray, " times"]:
    """The number of `clusters` at each time of a trajectory (times, n, D)."""
    return np.array([1 + clusters(tokens, close=close).max() for tokens in np.asarray(trajectory)])


def plateaus(ts: ArrayLike, counts: ArrayLike, *, lasting: float = 1.0) -> list[Plateau]:
    """The intervals of time with one number of clusters, see `cluster_counts`; those until `lasting` times their start.

    Metastable states last on the scale of log t, as with `lasting=2`, which leaves out those from time 0; 1 keeps all.
    """
    times, counts = np.asarray(ts, float), np.asarray(counts)
    starts = np.flatnonzero(np.diff(counts, prepend=counts[0] - 1))
    ends = np.append(starts[1:], len(counts) - 1)
    intervals = [Plateau(int(counts[i]), float(times[i]), float(times[j])) for i, j in zip(starts, ends, strict=True)]
    return [p for p in intervals if lasting == 1 or p.end >= lasting * p.start > 0]


def peaks(tokens: ArrayLike, beta: float) -> Int[np.ndarray, "*times"]:
    """Number of local maxima on the circle of the potential Σ_j exp(β⟨x, x_j⟩), whose gradient tokens follow.

    These are the clusters that attention can resolve, at angles above about 2/√β. They need no threshold, and count
    tokens before they have come close.

    Arguments:
        tokens: tokens on the unit circle, shape (*times, n, 2).
        beta: inverse temperature β > 0.
    """
    x = jnp.asarray(tokens)
    if x.ndim < 2 or x.shape[-1] != 2:
        raise InputError(f"tokens: shape (*times, n, 2) is needed, got {x.shape}")
    points = 128 * math.ceil(1 + beta**0.5)  # 20 to the width 1/√β
    potential = np.asarray(_potential(x.reshape(-1, *x.shape[-2:]), jnp.asarray(beta, x.dtype), points))
    above = (potential > np.roll(potential, 1, axis=1)) & (potential >= np.roll(potential, -1, axis=1))
    return above.sum(axis=1).reshape(x.shape[:-2])


def first_clusters(flow: SelfAttentionFlow, ts: ArrayLike, trajectory: ArrayLike) -> Plateau:
    """The first clusters of tokens on the circle, for Q = K = V = I: how many, from when, until when.

    Small perturbations of uniform tokens grow, and so does the tokens' mean square speed. Its first maximum is where
    this growth ends; the `peaks` then are the first clusters, which end when their number changes.

    Arguments:
        flow: the flow, with a β > 0.
        ts: times, some ten before the clusters form.
        trajectory: tokens at these times, shape (times, n, 2).

    Raises:
        InputError: for other flows and shapes, and times that end before the speed falls.
    """
    x = jnp.asarray(trajectory)
    if any(matrix is not None for matrix in (flow.Q, flow.K, flow.V, flow.mlp)):
        raise InputError("flow: must have Q = K = V = None and no mlp")
    if x.ndim != 3 or x.shape[2] != 2:
        raise InputError(f"trajectory: shape (times, n, 2) is needed, got {x.shape}")
    falling = np.flatnonzero(np.diff(_square_speeds(flow, x)) < 0)
    if not len(falling):
        raise InputError("ts: end before the tokens' speed falls: later times are needed")
    start = falling[0]
    return plateaus(np.asarray(ts)[start:], peaks(x[start:], float(flow.beta)))[0]


@eqx.filter_jit
def _potential(
    trajectory: Float[Array, "times n 2"], beta: Float[Array, ""], points: int
) -> Float[Array, "times points"]:
    angle = angles(points, trajectory.dtype)
    x = jnp.stack([jnp.cos(angle), jnp.sin(angle)], axis=1)
    return jax.lax.map(lambda tokens: jnp.exp(beta * (x @ tokens.T - 1)).sum(axis=1), trajectory)


@eqx.filter_jit
def _square_speeds(flow: SelfAttentionFlow, trajectory: Float[Array, "times n D"]) -> Float[Array, " times"]:
    return jax.lax.map(lambda x: (flow(x) ** 2).sum(axis=1).mean(), trajectory)
