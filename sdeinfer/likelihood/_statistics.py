"""Sufficient statistics of a full path: a few thousand numbers per network.

The log density of a path depends on the data through sums over its terms of data times a function of the term's e (see
`Terms`): with variances v that are functions of e it is −½ Σ [(z − Σ_s θ_s b_s)²/v + log 2πv]. By the law of finite
width, v also depends on features f_k of V (see `FiniteWidth`) in terms of O(1/n). Each f_k is replaced by its mean f̄_k
over the data, and G, which is of second order in e, by e (g₀ + g₁ e), fitted to the data. `Transitions` have the exact
law; `tests/benchmarks/test_mechanisms.py` compares the posteriors.

The functions of e are interpolated at Chebyshev points in s = log e. The sums over terms become sums over some tens of
nodes, with weights computed in one pass over the data. Since v is affine in e, the singularities v = 0 lie at Im s = ±π
for *every* value of the parameters. For log e in an interval of half-width H, the interpolation therefore converges
like r^{−J}, r = π/H + √(1 + π²/H²), uniformly in the parameters. J satisfies r^{−J} ≤ 1e-13, relative to the function's
largest value.

Each pair (i, j) of spectral coordinates has its own nodes and its own f̄_k. There is an additional node at e = 0:
Lᵀ H_m L has an eigenvalue 0, so e = 0 up to rounding for one term of every transition, and for several with an
attention pattern.
"""
# pyright: reportIncompatibleMethodOverride=false
# Equinox implements abstract properties by fields.

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from sdeinfer._files import InputError
from sdeinfer.covariance import EVERY_TOKEN, Pattern
from sdeinfer.layers import ATTENTION_NEXT, FiniteWidth, Limit, drift_count
from sdeinfer.likelihood._adjustment import Adjustment
from sdeinfer.likelihood._assumptions import NOTHING_ASSUMED, Assumptions
from sdeinfer.likelihood._chunked_path import ChunkedPath, added
from sdeinfer.likelihood._kernels import FEATURES, log_density, quadratic_pairs, rows_of
from sdeinfer.likelihood._path import AbstractPath
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

BLOCKS, BLOCK_ENTRIES = (64, 256), 2**25
"""Numbers of networks for which programs are compiled, and a bound on the entries of their weights; fewer networks if
there are many tokens."""

CACHED = 2**20
"""Bytes of the functions of e that are computed at a time for data in chunks."""


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
        x = np.cos(_angles(self.nodes))
        e = np.exp(self.middle[:, None] + self.half_width[:, None] * x)
        return np.concatenate([np.zeros((len(e), 1)), e], axis=1)


class PathStatistics(AbstractPath):
    """Sufficient statistics of observed paths under every shaped architecture.

    Attributes:
        weights: sums over a network's terms of each of the `rows_of` rows, at each node of each pair; shape (networks,
            rows, p, nodes).
        nodes: values of e, the first 0; shape (p, nodes).
        centre: f̄_k, shape (features, p).
        next_order: g₀ and g₁ of e (g₀ + g₁ e), which stands for G, and the largest |g₀ + g₁ e|; shape (3, p).
        constant: additive constant of the log density, log |∂z/∂dV| − ½ Σ log 2π; shape (networks,).
        widths: the distinct widths n, ascending, padded by `repeated_widths`; shape (widths,).
        width: index of each network into `widths`, shape (networks,).
        assumptions: assumptions of the fit.
        adjustment: adjustment of the likelihood, possibly with a leading axis of widths; None for no adjustment.
        initial: V of each network at its first layer, for sampling networks; shape (networks, m, m). None if networks
            cannot be sampled.
        pattern: the attention pattern of the coordinates.
        depth: number of layers after the first.
        hidden: whether `observed` is None, so that a program samples the data.
    """

    weights: Float[Any, "networks rows p nodes"]
    nodes: Float[Any, "p nodes"]
    centre: Float[Any, "features p"]
    next_order: Float[Any, "3 p"]
    constant: Float[Any, " networks"]
    widths: Float[Any, " widths"]
    width: Int[Any, " networks"]
    adjustment: Adjustment | None = None
    initial: Float[Any, "networks m m"] | None = None
    pattern: Pattern = eqx.field(default=EVERY_TOKEN, static=True)
    assumptions: Assumptions = eqx.field(default=NOTHING_ASSUMED, static=True)
    depth: int = eqx.field(default=0, static=True)
    hidden: bool = eqx.field(default=False, static=True)

    @property
    def value(self) -> Float[Array, "networks rows p nodes"]:
        """The weights."""
        return self.weights

    def log_density(self, law: Limit | FiniteWidth, value: Any) -> Float[Array, " networks"]:
        """Log density of each network."""
        return log_density(law, self, jnp.asarray(value))

    def pooled(self) -> "PathStatistics":
        """The statistics summed over the networks of one width; the joint likelihood is the same."""
        count, width = len(self.widths), np.asarray(self.width)
        weights, constant = (_sums_by_group(np.asarray(x), width, count) for x in (self.weights, self.constant))
        number = np.arange(count, dtype=width.dtype)
        weights, constant, number = map(jax.device_put, (weights, constant, number))
        return dataclasses.replace(self, weights=weights, constant=constant, width=number, initial=None, depth=0)

    def blocks(self) -> Iterator[tuple["PathStatistics", int]]:
        """Blocks of networks, padded to one shape by networks without transitions, and each block's number of networks.

        `initial` and `depth` are dropped.
        """
        size = next((size for size in BLOCKS if size >= self.networks), BLOCKS[-1])
        size = min(size, max(1, BLOCK_ENTRIES // math.prod(self.weights.shape[1:])))
        weights, constant, width = (np.asarray(x) for x in (self.weights, self.constant, self.width))
        for start in range(0, self.networks, size):
            count = min(size, self.networks - start)
            parts = (_filled(x[start : start + count], size) for x in (weights, constant, width))
            own = dict(zip(("weights", "constant", "width"), parts, strict=True))
            yield dataclasses.replace(self, **own, initial=None, depth=0), count

    def __add__(self, other: "PathStatistics") -> "PathStatistics":
        """Add the statistics of two parts of the same networks' paths, with one layout; drops `initial`."""
        weights, constant = self.weights + other.weights, self.constant + other.constant
        return dataclasses.replace(self, weights=weights, constant=constant, initial=None, depth=0)


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
        _require_finite({"mixing": e}, path.first + path.network[block])
        zero = _at_zero(e)
        lowest = np.minimum(lowest, np.where(zero, np.inf, e).min(axis=0))
        highest = np.maximum(highest, np.where(zero, 0.0, e).max(axis=0))
    return lowest, highest


def _wider(one: tuple[np.ndarray, np.ndarray], other: tuple[np.ndarray, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """The smallest range that holds two ranges."""
    return np.minimum(one[0], other[0]), np.maximum(one[1], other[1])


def _next_order_of(e: np.ndarray, G: np.ndarray, highest: np.ndarray, small: np.ndarray) -> Float[np.ndarray, "3 p"]:
    """The line in e closest to G/e, for each pair, and its largest value for e in [0, highest]; 0 where e is small."""
    zero = _at_zero(e).any(axis=0) | small
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


def blank_statistics(
    tokens: int, widths: int, *, pattern: Pattern = EVERY_TOKEN, assumptions: Assumptions = NOTHING_ASSUMED
) -> PathStatistics:
    """Pooled statistics without data, in the most common shapes for the given numbers of tokens and widths."""
    p, nodes = tokens * (tokens + 1) // 2, NODES[0] + 1
    count = len(repeated_widths(np.arange(widths)))
    shapes: Any = jax.device_put(
        {
            "weights": np.zeros((count, rows_of(drift_count(pattern)), p, nodes)),
            "nodes": np.ones((p, nodes)),
            "centre": np.ones((FEATURES, p)),
            "next_order": np.zeros((3, p)),
            "constant": np.zeros(count),
            "widths": np.full(count, 100.0),
            "width": np.arange(count),
        }
    )
    return PathStatistics(**shapes, pattern=pattern, assumptions=assumptions)


def _sample_of_features(path: Path | ChunkedPath) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Means of the variance features, shape (features, p), and e and G, over a sample of the transitions."""
    sample, sums, mixing, next_terms = path.thinned(BLOCK), [], [], []
    for _, terms in terms_by_block(sample):
        sums.append(terms.variance.sum(axis=0))
        mixing.append(terms.mixing)
        next_terms.append(terms.variance[:, ATTENTION_NEXT])
    return np.sum(sums, axis=0) / len(sample), np.concatenate(mixing), np.concatenate(next_terms)


def path_statistics(
    path: Path | ChunkedPath,
    layout: Layout | None = None,
    *,
    pooled: bool = False,
    assumptions: Assumptions = NOTHING_ASSUMED,
) -> PathStatistics:
    """Reduce transitions to sufficient statistics, in one pass, in float64, and in memory independent of their number.

    Arguments:
        path: the observed transitions.
        layout: nodes and mean features; `path_layout` if None.
        pooled: sum over the networks of one width directly, as `PathStatistics.pooled` does afterwards; so are
            transitions in chunks in any case.
        assumptions: assumptions of the fit.

    Returns:
        The statistics, in JAX's default floating-point type.

    Raises:
        InputError: if a covariance is so large or small that a term overflows.
    """
    layout = path_layout(path) if layout is None else layout
    widths, width = np.unique(path.width, return_inverse=True)
    padded = repeated_widths(widths)
    pooled = pooled or not path.in_memory
    weights, constant = path.reduced(
        partial(_sums, layout=layout, widths=widths if pooled else None), added, name="statistics"
    )
    groups, weights = len(constant), np.require(weights, requirements="W")
    to_nodes = _moments_to_nodes(layout.nodes)
    for own in weights:  # one at a time: the product is a copy
        own[..., 1:] @= to_nodes
    statistics = dict(
        weights=weights.swapaxes(1, 2),
        nodes=layout.points,
        centre=layout.centre,
        next_order=layout.next_order,
        constant=constant,
        widths=padded,
        width=np.arange(groups) if pooled else width,
        initial=None if pooled else path.initial,
    )
    arrays = jax.device_put(jax.tree.map(_in_default_type, statistics))
    depth = 0 if pooled else int(path.gap.sum())
    return PathStatistics(**arrays, pattern=path.pattern, assumptions=assumptions, depth=depth)


def _sums(
    path: Path, *, layout: Layout, widths: Float[np.ndarray, " widths"] | None
) -> tuple[Float[np.ndarray, "groups p rows nodes"], Float[np.ndarray, " groups"]]:
    """Sums over the transitions of each network, or of each of the widths: of rows times T_k(e), and the constant."""
    p, nodes, group, groups = len(layout.middle), layout.nodes, path.network, len(path.width)
    if widths is not None:
        group, groups = path.width_index(widths), len(repeated_widths(widths))
    weights = np.zeros((groups, p, rows_of(drift_count(path.pattern)), nodes + 1))
    constant = np.zeros(groups)
    # The functions of so many transitions fit in the cache.
    at_once = max(1, CACHED // (8 * p * (nodes + 1)))
    for block, terms in terms_by_block(path):
        _require_finite(vars(terms), path.first + path.network[block])
        np.add.at(constant, group[block], terms.log_jacobian - p * math.log(2 * math.pi) / 2)
        data, e = _rows(terms), terms.mixing
        zero = _at_zero(e)
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
    """Indicator of e = 0, and T_k(x) for the other terms, with the nodes first, so that BLAS takes the strides.

    Arguments:
        x: log e, scaled to [−1, 1]; shape (p, transitions).
        away: whether e is not zero, shape (p, transitions).
        nodes: number of polynomials.
    """
    T = np.empty((nodes + 1, *x.shape))
    T[0], T[1] = ~away, away
    if nodes > 1:
        T[2] = x * away
    double = 2 * x
    for k in range(3, nodes + 1):
        np.multiply(double, T[k - 1], out=T[k])
        T[k] -= T[k - 2]
    return T


def repeated_widths(widths: np.ndarray) -> np.ndarray:
    """Widths, with the last one repeated up to a power of two, which limits the number of compiled shapes."""
    return _repeated(widths, 1 << (len(widths) - 1).bit_length())


def terms_by_block(path: Path) -> Iterator[tuple[np.ndarray, Terms]]:
    """Iterate over blocks of transitions: their indices and their terms."""
    yield from path.over_blocks(lambda block: (block, path.terms(block)))


def nodes_needed(half_width: float) -> int:
    """Smallest J in `NODES` (or beyond them) with ρ^{−J} ≤ `ACCURACY`, for log e in an interval of this half-width."""
    slope = math.pi / half_width
    rho = slope + math.hypot(1.0, slope)
    needed = -math.log(ACCURACY) / math.log(rho)
    return next((count for count in NODES if count >= needed), math.ceil(needed))


def _rows(terms: Terms) -> np.ndarray:
    """The summands of each row, shape (p, transitions, rows)."""
    b = np.concatenate([terms.increments[:, None], terms.drift], axis=1)
    rows = np.stack([np.ones_like(b[:, 0]), *(b[:, s] * b[:, t] for s, t in quadratic_pairs(b.shape[1] - 1))], axis=1)
    return np.ascontiguousarray(rows.transpose(2, 0, 1))


def _at_zero(e: np.ndarray) -> np.ndarray:
    """Whether each e is zero up to rounding, relative to the largest e of its transition."""
    return e <= (ROUNDING * float(jnp.finfo(float).eps)) ** 2 * e.max(axis=-1, keepdims=True)


def _sums_by_group(x: np.ndarray, group: np.ndarray, count: int) -> np.ndarray:
    """Sums over the rows of each group, without a copy of the rows."""
    sums = np.zeros((count, *x.shape[1:]), x.dtype)
    for number, row in zip(group, x, strict=True):
        sums[number] += row
    return sums


def _repeated(x: np.ndarray, length: int) -> np.ndarray:
    """Pad x to a length by repeating its last row."""
    x = np.asarray(x)
    return x[np.minimum(np.arange(length), len(x) - 1)]


def _in_default_type(x: np.ndarray) -> np.ndarray:
    return np.asarray(x, jnp.result_type(float) if np.issubdtype(x.dtype, np.floating) else jnp.result_type(int))


def _filled(x: np.ndarray, length: int) -> np.ndarray:
    """Pad x to a length with zeros."""
    return np.concatenate([x, np.zeros((length - len(x), *x.shape[1:]), x.dtype)])


def _require_finite(terms: Mapping[str, np.ndarray], network: np.ndarray) -> None:
    for name, term in terms.items():
        finite = np.isfinite(term).reshape(len(term), -1).all(axis=1)
        if not finite.all():
            where = network[int(np.argmin(finite))]
            raise InputError(f"covariance: network {where}: too large or too small for its law, {name} overflows")


def _moments_to_nodes(count: int) -> np.ndarray:
    """Matrix that converts sums over T_k to sums over the cardinal functions at the Chebyshev points."""
    to_nodes = np.cos(np.arange(count)[:, None] * _angles(count)) * (2 / count)
    to_nodes[0] /= 2
    return to_nodes


def _angles(count: int) -> np.ndarray:
    return (np.arange(count) + 0.5) * math.pi / count
