"""The reduction of transitions to sufficient statistics: a first pass finds their layout, a second one the sums.

The functions of e (see `PathStatistics`) are interpolated at Chebyshev points in s = log e. Since v is affine in e, the
singularities v = 0 lie at Im s = ±π for *every* value of the parameters. For log e in an interval of half-width H, the
interpolation converges like r^{−J}, r = π/H + √(1 + π²/H²), uniformly in the parameters; J satisfies r^{−J} ≤ 1e-13.

Each pair (i, j) of spectral coordinates has its own nodes and f̄_k, and a node at e = 0: Lᵀ H_m L has an eigenvalue 0,
so e = 0 up to rounding for one term of every transition, and for several with an attention pattern.
Tests: `tests/likelihood/test_statistics.py`.
"""

import dataclasses
import itertools
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float

from sdeinfer._files import InputError
from sdeinfer.covariance import Pattern
from sdeinfer.layers._finite_width import ATTENTION_NEXT, drift_count
from sdeinfer.likelihood._assumptions import NOTHING_ASSUMED, Assumptions
from sdeinfer.likelihood._path import in_default_types
from sdeinfer.likelihood._statistics import NODES, PathStatistics, quadratic_pairs, row_count
from sdeinfer.likelihood._terms import Terms
from sdeinfer.likelihood._transitions import BLOCK_TRANSITIONS, Path


class Layout(NamedTuple):
    """Nodes and mean features of statistics; statistics with the same layout can be added.

    The range of log e of each pair, by its middle and half-width; the number of Chebyshev points; f̄, the means of the
    finite-width features over a sample of the data, 0 for G; and g₀, g₁ and the largest |g₀ + g₁ e| of the range.
    """

    middle: np.ndarray
    half_width: np.ndarray
    nodes: int
    centre: np.ndarray
    next_order: np.ndarray

    @property
    def points(self) -> np.ndarray:
        """Values of e at the nodes, the first 0; shape (p, nodes + 1)."""
        x = np.cos(projection_angles(self.nodes))
        e = np.exp(self.middle[:, None] + self.half_width[:, None] * x)
        return np.concatenate([np.zeros((len(e), 1)), e], axis=1)

    def holds(self, e: Float[np.ndarray, "transitions p"]) -> Bool[np.ndarray, " transitions"]:
        """Whether each transition has all of its e in the range, or zero."""
        zero = at_zero(e)
        away = np.abs(np.log(np.where(zero, 1.0, e)) - self.middle)
        return (zero | (away <= self.half_width)).all(axis=1)


def path_layout(path: Path, *, nodes: int | None = None, margin: float = 1.0) -> Layout:
    """Find the range of e and the means of the finite-width features in a first pass over the data."""
    lowest, highest = _range_of_e(path)
    lowest, highest = (np.where(highest == 0, 1.0, bound) for bound in (lowest, highest))
    half_width = margin * np.maximum(np.log(highest / lowest) / 2, 1e-3)
    middle = (np.log(lowest) + np.log(highest)) / 2
    centre, mixing, next_terms = _sample_of_features(path)
    # G is negative and of fourth order in V: its mean could make the variance negative at small V. In coordinates of a
    # pattern in which e is next to nothing, G is positive.
    small = _is_small(mixing) & (not path.pattern.everything)
    centre[ATTENTION_NEXT] = np.where(small, centre[ATTENTION_NEXT], 0.0)
    next_order = _next_order_of(mixing, next_terms, np.exp(middle + half_width), small)
    return Layout(
        middle=middle,
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
    """Whether e is small for each pair, relative to the largest of a transition: then G is replaced by its mean."""
    return (e / np.maximum(e.max(axis=1, keepdims=True), np.finfo(e.dtype).tiny)).mean(axis=0) <= 1e-3


def _sample_of_features(path: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Means of the variance features, and e and G, over a sample of the transitions."""
    sample = path.thinned(BLOCK_TRANSITIONS)
    blocks = list(sample.over_blocks(sample.terms))
    variance, mixing = np.concatenate([x.variance for x in blocks]), np.concatenate([x.mixing for x in blocks])
    return variance.mean(axis=0), mixing, variance[:, ATTENTION_NEXT]


def nodes_needed(half_width: float) -> int:
    """Smallest J in `NODES` (or beyond them) with ρ^{−J} ≤ 1e-13, for log e in an interval of this half-width."""
    slope = math.pi / half_width
    rho = slope + math.hypot(1.0, slope)
    needed = -math.log(1e-13) / math.log(rho)
    return next((count for count in NODES if count >= needed), math.ceil(needed))


def at_zero(e: np.ndarray) -> np.ndarray:
    """Whether each e, which is quadratic in δ, is zero up to the rounding of δ relative to the largest."""
    return e <= (64 * float(np.finfo(float).eps)) ** 2 * e.max(axis=-1, keepdims=True)


def require_finite(terms: Mapping[str, np.ndarray], network: np.ndarray) -> None:
    for name, term in terms.items():
        finite = np.isfinite(term).reshape(len(term), -1).all(axis=1)
        if not finite.all():
            where = network[int(np.argmin(finite))]
            raise InputError(f"covariance: network {where}: too large or too small for its law, {name} overflows")


def projection_angles(count: int) -> np.ndarray:
    return (np.arange(count) + 0.5) * math.pi / count


def path_statistics(
    path: Path,
    layout: Layout | None = None,
    *,
    pooled: bool = False,
    assumptions: Assumptions = NOTHING_ASSUMED,
) -> PathStatistics:
    """Reduce transitions to sufficient statistics, in one pass, in float64, in memory independent of their number."""
    layout = path_layout(path) if layout is None else layout
    widths, width = np.unique(path.width, return_inverse=True)
    sums = sums_of(path, layout=layout, widths=widths if pooled else None)
    of_networks = {} if pooled else {"width": width, "initial": path.covariance[:, 0]}
    statistics = statistics_of_sums(sums, layout, widths, pattern=path.pattern, assumptions=assumptions, **of_networks)
    return statistics if pooled else dataclasses.replace(statistics, depth=int(path.gap.sum()))


type Sums = tuple[Float[np.ndarray, "groups p rows nodes"], Float[np.ndarray, " groups"]]
"""Sums over transitions: of rows times T_k(e), and of the constant."""


def statistics_of_sums(
    sums: Sums,
    layout: Layout,
    widths: Float[np.ndarray, " widths"],
    *,
    pattern: Pattern,
    assumptions: Assumptions,
    **of_networks: np.ndarray,
) -> PathStatistics:
    """The statistics of sums over the transitions of each width, or of each network with its `width` and `initial`."""
    weights, constant = np.require(sums[0], requirements="W"), sums[1]
    to_nodes = _moments_to_nodes(layout.nodes)
    for group in weights:  # one at a time: the product is a copy
        group[..., 1:] @= to_nodes
    statistics = dict(
        weights=weights.swapaxes(1, 2),
        nodes=layout.points,
        centre=layout.centre,
        next_order=layout.next_order,
        constant=constant,
        widths=widths,
        width=np.arange(len(constant)),
    )
    arrays: dict[str, Any] = in_default_types(statistics | of_networks)
    return PathStatistics(**arrays, pattern=pattern, assumptions=assumptions)


def sums_of(path: Path, *, layout: Layout, widths: Float[np.ndarray, " widths"] | None = None) -> Sums:
    """The sums over the transitions of each network, or of each of the widths."""
    p, nodes, group, groups = len(layout.middle), layout.nodes, path.network, len(path.width)
    if widths is not None:
        group, groups = path.width_index(widths), len(widths)
    weights = np.zeros((groups, p, row_count(drift_count(path.pattern, path.others)), nodes + 1))
    constant = np.zeros(groups)
    at_once = max(1, 2**20 // (8 * p * (nodes + 1)))  # whose functions fit in the cache
    for block, terms in path.over_blocks(lambda block: (block, path.terms(block))):
        require_finite(vars(terms), path.first + path.network[block])
        np.add.at(constant, group[block], terms.log_jacobian - p * math.log(2 * math.pi) / 2)
        data, e = _summands(terms), terms.mixing
        zero = at_zero(e)
        x = (np.log(np.where(zero, 1.0, e)) - np.where(zero, 0.0, layout.middle)) / layout.half_width
        x, away = np.ascontiguousarray(x.T), np.ascontiguousarray(~zero.T)
        changes = np.flatnonzero(np.diff(group[block], prepend=-1))
        for first, last in itertools.pairwise([*changes, len(block)]):
            for start in range(first, last, at_once):
                some = slice(start, min(start + at_once, last))
                functions = _chebyshev(x[:, some], away[:, some], nodes)
                # (p, rows, transitions) @ (p, transitions, nodes)
                weights[group[block[start]]] += data[:, some].swapaxes(1, 2) @ functions.transpose(1, 2, 0)
    return weights, constant


def _chebyshev(x: np.ndarray, away: np.ndarray, nodes: int) -> Float[np.ndarray, "nodes p transitions"]:
    """Indicator of e = 0, and T_k(x) for the other terms, with the nodes first, so that BLAS takes the strides."""
    T = np.empty((nodes + 1, *x.shape))
    T[0], T[1] = ~away, away
    if nodes > 1:
        T[2] = x * away
    double = 2 * x
    for k in range(3, nodes + 1):
        np.multiply(double, T[k - 1], out=T[k])
        T[k] -= T[k - 2]
    return T


def _summands(terms: Terms) -> np.ndarray:
    """The summands of each row, shape (p, transitions, rows)."""
    b = np.concatenate([terms.increments[:, None], terms.drift], axis=1)
    rows = np.stack([np.ones_like(b[:, 0]), *(b[:, s] * b[:, t] for s, t in quadratic_pairs(b.shape[1] - 1))], axis=1)
    return np.ascontiguousarray(rows.transpose(2, 0, 1))


def _moments_to_nodes(count: int) -> np.ndarray:
    """Matrix that converts sums over T_k to sums over the cardinal functions at the Chebyshev points."""
    to_nodes = np.cos(np.arange(count)[:, None] * projection_angles(count)) * (2 / count)
    to_nodes[0] /= 2
    return to_nodes
