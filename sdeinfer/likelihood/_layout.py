"""The layout of sufficient statistics, found in a first pass over the data: nodes in e, and means of the features.

The functions of e (see `PathStatistics`) are interpolated at Chebyshev points in s = log e. The sums over terms become
sums over some tens of nodes. Since v is affine in e, the singularities v = 0 lie at Im s = ±π for *every* value of the
parameters. For log e in an interval of half-width H, the interpolation therefore converges like r^{−J},
r = π/H + √(1 + π²/H²), uniformly in the parameters. J satisfies r^{−J} ≤ 1e-13, relative to the function's largest
value.

Each pair (i, j) of spectral coordinates has its own nodes and its own f̄_k. There is an additional node at e = 0:
Lᵀ H_m L has an eigenvalue 0, so e = 0 up to rounding for one term of every transition, and for several with an
attention pattern.
"""

import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from sdeinfer._files import InputError
from sdeinfer.layers import ATTENTION_NEXT
from sdeinfer.likelihood._chunked_path import ChunkedPath
from sdeinfer.likelihood._terms import Terms
from sdeinfer.likelihood._transitions import BLOCK, Path

ROUNDING = 64
"""Bound, in units of eps times the largest δ, below which an eigenvalue δ counts as zero; e is quadratic in δ."""

SMALL = 1e-3
"""With a pattern, the largest e, relative to the largest of a transition, for which G is replaced by its mean."""

ACCURACY = 1e-13
"""Bound on the relative interpolation error."""

NODES = (64, 192)
"""Numbers of nodes for which programs are compiled."""


class Layout(NamedTuple):
    """Nodes and mean features of statistics; statistics with the same layout can be added.

    Attributes:
        middle: midpoint of the range of log e for each pair, shape (p,).
        half_width: half-width of that range, shape (p,).
        nodes: number of Chebyshev points.
        centre: f̄, the means of the finite-width features over a sample of the data, 0 for G; shape (features, p).
        next_order: g₀, g₁ and the largest |g₀ + g₁ e| of the range of e, shape (3, p).
    """

    middle: np.ndarray
    half_width: np.ndarray
    nodes: int
    centre: np.ndarray
    next_order: np.ndarray

    @property
    def points(self) -> np.ndarray:
        """Values of e at the nodes, the first 0; shape (p, nodes + 1)."""
        x = np.cos(angles(self.nodes))
        e = np.exp(self.middle[:, None] + self.half_width[:, None] * x)
        return np.concatenate([np.zeros((len(e), 1)), e], axis=1)


def path_layout(path: Path | ChunkedPath, *, nodes: int | None = None) -> Layout:
    """Find the range of e and the means of the finite-width features in a first pass over the data.

    Arguments:
        path: the observed transitions.
        nodes: number of nodes besides the one at e = 0; see `nodes_needed` if None.
    """
    lowest, highest = path.reduced(_range_of_e, _wider, name="range of e")
    lowest, highest = (np.where(highest == 0, 1.0, bound) for bound in (lowest, highest))
    half_width = np.maximum(np.log(highest / lowest) / 2, 1e-3)
    centre, mixing, next_terms = _sample_of_features(path)
    # G is negative and of fourth order in V: its mean could make the variance negative at small V. In coordinates of a
    # pattern in which e is next to nothing, G is positive.
    small = _is_small(mixing) & (not path.pattern.everything)
    centre[ATTENTION_NEXT] = np.where(small, centre[ATTENTION_NEXT], 0.0)
    next_order = _next_order_of(mixing, next_terms, highest, small)
    return Layout(
        middle=(np.log(lowest) + np.log(highest)) / 2,
        half_width=half_width,
        nodes=nodes_needed(float(half_width.max())) if nodes is None else nodes,
        centre=centre,
        next_order=next_order,
    )


def _range_of_e(path: Path) -> tuple[Float[np.ndarray, " p"], Float[np.ndarray, " p"]]:
    """The smallest and the largest e of each pair that is not zero."""
    p = path.tokens * (path.tokens + 1) // 2
    lowest, highest = np.full(p, np.inf), np.zeros(p)
    for block, e in path.over_blocks(lambda block: (block, path.mixing(block))):
        require_finite({"mixing": e}, path.first + path.network[block])
        zero = at_zero(e)
        lowest = np.minimum(lowest, np.where(zero, np.inf, e).min(axis=0))
        highest = np.maximum(highest, np.where(zero, 0.0, e).max(axis=0))
    return lowest, highest


def _wider(one: tuple[np.ndarray, np.ndarray], other: tuple[np.ndarray, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """The smallest range that holds two ranges."""
    return np.minimum(one[0], other[0]), np.maximum(one[1], other[1])


def _next_order_of(e: np.ndarray, G: np.ndarray, highest: np.ndarray, small: np.ndarray) -> Float[np.ndarray, "3 p"]:
    """The line in e closest to G/e, for each pair, and its largest value for e in [0, highest]; 0 where e is small."""
    zero = at_zero(e).any(axis=0) | small
    if not np.isfinite(G).all():  # refused later, with the network's number
        return np.zeros((3, e.shape[-1]))
    ratio, e = np.where(zero, 0.0, G / np.where(zero, 1.0, e)), np.where(zero, 0.0, e)
    away = e - e.mean(axis=0)
    square = (away**2).sum(axis=0)
    slope = (away * ratio).sum(axis=0) / np.where(square > 0, square, 1.0)
    start = ratio.mean(axis=0) - slope * e.mean(axis=0)
    return np.stack([start, slope, np.maximum(abs(start), abs(start + slope * highest))])


def _is_small(e: Float[np.ndarray, "transitions p"]) -> np.ndarray:
    """Whether e is small for each pair, relative to the largest of a transition."""
    return (e / np.maximum(e.max(axis=1, keepdims=True), np.finfo(e.dtype).tiny)).mean(axis=0) <= SMALL


def _sample_of_features(path: Path | ChunkedPath) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Means of the variance features, shape (features, p), and e and G, over a sample of the transitions."""
    each = [terms for _, terms in terms_by_block(path.thinned(BLOCK))]
    variance, mixing = np.concatenate([x.variance for x in each]), np.concatenate([x.mixing for x in each])
    return variance.mean(axis=0), mixing, variance[:, ATTENTION_NEXT]


def terms_by_block(path: Path) -> Iterator[tuple[np.ndarray, Terms]]:
    """Iterate over blocks of transitions: their indices and their terms."""
    yield from path.over_blocks(lambda block: (block, path.terms(block)))


def nodes_needed(half_width: float) -> int:
    """Smallest J in `NODES` (or beyond them) with ρ^{−J} ≤ `ACCURACY`, for log e in an interval of this half-width."""
    slope = math.pi / half_width
    rho = slope + math.hypot(1.0, slope)
    needed = -math.log(ACCURACY) / math.log(rho)
    return next((count for count in NODES if count >= needed), math.ceil(needed))


def at_zero(e: np.ndarray) -> np.ndarray:
    """Whether each e is zero up to rounding, relative to the largest e of its transition."""
    return e <= (ROUNDING * float(jnp.finfo(float).eps)) ** 2 * e.max(axis=-1, keepdims=True)


def require_finite(terms: Mapping[str, np.ndarray], network: np.ndarray) -> None:
    for name, term in terms.items():
        finite = np.isfinite(term).reshape(len(term), -1).all(axis=1)
        if not finite.all():
            where = network[int(np.argmin(finite))]
            raise InputError(f"covariance: network {where}: too large or too small for its law, {name} overflows")


def angles(count: int) -> np.ndarray:
    return (np.arange(count) + 0.5) * math.pi / count
