"""The data of a full path, reduced to a few thousand numbers a network.

In the log density of a path the data enter only through sums over all its terms of a product of data times a function
of the term's e (see `Terms`, and `FullPath` for the law): at variances v + Δ with v a function of e, to first order
about a reference that gave the term the mean z − y and the variance ρ times its v,

    −½ Σ [ (z − Σ_s θ_s b_s)²/(ρ v) + log(ρ v) + (1/ρ − y²/(ρ² v)) (Σ_k c_k (f_k − f̄_k) − (ρ − 1)) ],

where c_k = (w_k + w′_k e)/v. The functions of e are interpolated at Chebyshev points in s = log e, so that the sums
over terms become sums over some tens of nodes with weights made once, by one pass over the data. In s their
singularities, v = 0, lie at Im s = ±π for *every* value of the parameters, since v is affine in e: the interpolation
converges like r^{−J}, r = π/H + √(1 + π²/H²), for data with log e in an interval of half-width H, uniformly in the
parameters. J is chosen for r^{−J} ≤ 1e-13, relative to the function's largest value.

Each pair (i, j) of spectral coordinates has nodes of its own, and its own mean f̄_k of the finite-width features. One
node stands apart, at e = 0: Lᵀ H_m L has an eigenvalue 0, so one term of every transition is there, up to rounding, and
as many as there are tokens with a causal mask.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from sdeinfer._files import InputError
from sdeinfer.layers import ATTENTION_NEXT, VARIANCE_FEATURES
from sdeinfer.likelihood._adjustment import Adjustment
from sdeinfer.likelihood._assumptions import NOTHING_ASSUMED, Assumptions
from sdeinfer.likelihood._moments import Moments, no_moments
from sdeinfer.likelihood._transitions import BLOCK, Path, Terms

ROUNDING = 64
"""An eigenvalue δ below this multiple of eps times the largest is a zero that was rounded; e goes with its square."""

ACCURACY = 1e-13
NODES = (64, 192)
"""Numbers of nodes that are compiled for."""

BLOCKS = (64, 256)
"""Numbers of networks that are compiled for."""

LIMIT_DRIFTS, DRIFTS, FEATURES = 2, 4, len(VARIANCE_FEATURES)
QUADRATIC = sorted(itertools.combinations_with_replacement(range(1 + DRIFTS), 2), key=lambda st: st[1] > LIMIT_DRIFTS)
"""Pairs (s, t) of z = b₀, b₁, …, b₄ whose products are summed; those of the limit, with s, t ≤ 2, come first."""

LIMIT_ROWS = 1 + sum(t <= LIMIT_DRIFTS for _, t in QUADRATIC)
FIRST_ORDER = FEATURES + 1
ROWS = 1 + len(QUADRATIC) + 2 * FIRST_ORDER
"""Sums a node: of 1, of the products b_s b_t/ρ, of (f_k − f̄_k)/ρ and (ρ − 1)/ρ, and of the latter times y²/ρ."""

ROW_GROUPS = (1, 1 + len(QUADRATIC), 1 + len(QUADRATIC) + FIRST_ORDER)
"""Where those four kinds of rows meet."""

SMALLEST_RATIO = 0.5
"""Of ρ: where a reference says less of some term, the expansion is about this."""


class Layout(NamedTuple):
    """Where the statistics of some data are taken; those of parts of the data add up if their layout is the same.

    Attributes:
        middle: midpoint of log e for each pair, shape (p,).
        half_width: half its range, shape (p,).
        nodes: how many Chebyshev points.
        centre: f̄, shape (features, p): the means of the finite-width features over some of the data, and 0 for G.
        reference: the moments about which is expanded, with a leading axis of widths.
    """

    middle: np.ndarray
    half_width: np.ndarray
    nodes: int
    centre: np.ndarray
    reference: Moments

    @property
    def points(self) -> np.ndarray:
        """Values of e at the nodes, the first of them 0; shape (p, nodes + 1)."""
        x = np.cos(_angles(self.nodes))
        e = np.exp(self.middle[:, None] + self.half_width[:, None] * x)
        return np.concatenate([np.zeros((len(e), 1)), e], axis=1)


class PathStatistics(eqx.Module):
    """Sufficient statistics of observed paths under every shaped architecture; those of parts of a path add up.

    Attributes:
        weights: the sums over a network's terms of each row of `ROWS`, at each node of each pair; shape (networks,
            rows, p, nodes).
        nodes: values of e, the first of them 0; shape (p, nodes).
        centre: f̄_k, shape (features, p).
        spread: the largest |f_k − f̄_k|, shape (features, p).
        least: the smallest ρ, shape (p,).
        constant: what the log density has beside them: log |∂z/∂dV| − ½ Σ log(2π ρ); shape (networks,).
        widths: the different widths n, ascending, the last of them repeated as by `repeated_widths`; shape (widths,).
        width: which of them each network has, shape (networks,).
        reference: the moments about which is expanded, with a leading axis of widths.
        assumptions: of the fit.
        adjustment: of the parameters before they enter the likelihood, maybe with a leading axis of widths; none where
            None.
        initial: V of each network at its first layer, from which networks are sampled; shape (networks, m, m). None
            where no networks can be sampled.
        causal: whether the coordinates are those of attention with a causal mask.
        depth: how many layers follow the first.
        hidden: whether `observed` hides the data, so that a program samples them.
    """

    weights: Float[Array, "networks rows p nodes"]
    nodes: Float[Array, "p nodes"]
    centre: Float[Array, "features p"]
    spread: Float[Array, "features p"]
    least: Float[Array, " p"]
    constant: Float[Array, " networks"]
    widths: Float[Array, " widths"]
    width: Int[Array, " networks"]
    reference: Moments
    adjustment: Adjustment | None = None
    initial: Float[Array, "networks m m"] | None = None
    causal: bool = eqx.field(default=False, static=True)
    assumptions: Assumptions = eqx.field(default=NOTHING_ASSUMED, static=True)
    depth: int = eqx.field(default=0, static=True)
    hidden: bool = eqx.field(default=False, static=True)

    @property
    def networks(self) -> int:
        """How many networks."""
        return self.weights.shape[0]

    @property
    def observed(self) -> Float[Array, "networks rows p nodes"] | None:
        """What a program observes of the networks: pass it on as `obs`."""
        return None if self.hidden else self.weights

    def unobserved(self) -> "PathStatistics":
        """The same networks with their data hidden: a program that is run on them samples covariances."""
        return dataclasses.replace(self, hidden=True)

    def by_network(self) -> "PathStatistics":
        """The same statistics with a width, a reference and an adjustment for each network."""
        own = jax.tree.map(lambda x: x[self.width], (self.widths, self.reference))
        adjustment = self.adjustment
        if adjustment is not None and adjustment.centre.ndim > 1:
            adjustment = jax.tree.map(lambda x: x[self.width], adjustment)
        number = jnp.arange(self.networks)
        return dataclasses.replace(self, widths=own[0], reference=own[1], adjustment=adjustment, width=number)

    def pooled(self) -> "PathStatistics":
        """All networks of one width taken together as one: the same likelihood at a cost free of their number."""
        count, width = len(self.widths), np.asarray(self.width)
        weights, constant = (
            np.stack([np.asarray(x)[width == number].sum(axis=0) for number in range(count)])
            for x in (self.weights, self.constant)
        )
        number = np.arange(count, dtype=width.dtype)
        weights, constant, number = map(jax.device_put, (weights, constant, number))
        return dataclasses.replace(self, weights=weights, constant=constant, width=number, initial=None, depth=0)

    def blocks(self) -> Iterator[tuple["PathStatistics", int]]:
        """Parts of one shape with the networks in turn, and how many of each are networks of this path.

        The last part is filled up with networks without transitions.
        """
        size = next((size for size in BLOCKS if size >= self.networks), BLOCKS[-1])
        weights, constant, width = (np.asarray(x) for x in (self.weights, self.constant, self.width))
        for start in range(0, self.networks, size):
            count = min(size, self.networks - start)
            parts = (_filled(x[start : start + count], size) for x in (weights, constant, width))
            own = dict(zip(("weights", "constant", "width"), parts, strict=True))
            yield dataclasses.replace(self, **own, initial=None, depth=0), count

    def __add__(self, other: "PathStatistics") -> "PathStatistics":
        """The statistics of two parts of the same networks' paths, taken with one layout; no networks are sampled."""
        summed = (self.weights + other.weights, self.constant + other.constant)
        extremes = jnp.maximum(self.spread, other.spread), jnp.minimum(self.least, other.least)
        names = ("weights", "constant", "spread", "least")
        values = dict(zip(names, (*summed, *extremes), strict=True))
        return dataclasses.replace(self, **values, initial=None, depth=0)


def path_layout(path: Path, *, nodes: int | None = None) -> Layout:
    """Look at the range of e and at the means of the finite-width features, in a first pass over the data.

    Arguments:
        path: the observed transitions.
        nodes: how many nodes beside the one at e = 0; as many as ρ^{−J} ≤ 1e-13 asks for where None.
    """
    p = path.tokens * (path.tokens + 1) // 2
    lowest, highest = np.full(p, np.inf), np.zeros(p)
    for block in path.blocks():
        e = path.mixing(block)
        _require_finite({"mixing": e}, path.network[block])
        zero = _at_zero(e)
        lowest = np.minimum(lowest, np.where(zero, np.inf, e).min(axis=0))
        highest = np.maximum(highest, np.where(zero, 0.0, e).max(axis=0))
    lowest, highest = (np.where(highest == 0, 1.0, bound) for bound in (lowest, highest))
    half_width = np.maximum(np.log(highest / lowest) / 2, 1e-3)
    centre = mean_features(path)
    # G goes with the fourth power of V and is negative: its mean would take away more than there is where V is small.
    centre[ATTENTION_NEXT] = 0.0
    return Layout(
        middle=(np.log(lowest) + np.log(highest)) / 2,
        half_width=half_width,
        nodes=nodes_needed(float(half_width.max())) if nodes is None else nodes,
        centre=centre,
        reference=jax.tree.map(np.asarray, no_moments(len(np.unique(path.width)), *centre.shape)),
    )


def blank_statistics(
    tokens: int, widths: int, *, causal: bool = False, assumptions: Assumptions = NOTHING_ASSUMED
) -> PathStatistics:
    """Statistics without data, pooled, of the shapes that most data of so many tokens and widths have."""
    p, nodes = tokens * (tokens + 1) // 2, NODES[0] + 1
    count = len(repeated_widths(np.arange(widths)))
    shapes: Any = jax.device_put(
        {
            "weights": np.zeros((count, ROWS, p, nodes)),
            "nodes": np.ones((p, nodes)),
            "centre": np.ones((FEATURES, p)),
            "spread": np.ones((FEATURES, p)),
            "least": np.ones(p),
            "constant": np.zeros(count),
            "widths": np.full(count, 100.0),
            "width": np.arange(count),
            "reference": no_moments(count, FEATURES, p),
        }
    )
    return PathStatistics(**shapes, causal=causal, assumptions=assumptions)


def mean_features(path: Path) -> Float[np.ndarray, "features p"]:
    """Means of the features of the variance over some of the transitions."""
    some = path.thinned(BLOCK)
    return some.terms(slice(None)).variance.mean(axis=0)


def path_statistics(
    path: Path,
    layout: Layout | None = None,
    *,
    pooled: bool = False,
    by_network: bool = False,
    assumptions: Assumptions = NOTHING_ASSUMED,
) -> PathStatistics:
    """Reduce transitions to their sufficient statistics, in one pass and in float64; memory does not grow with them.

    Arguments:
        path: the observed transitions.
        layout: where to take them; as the data ask for where None.
        pooled: take all networks of one width together, as `PathStatistics.pooled` does, without those of each.
        by_network: the layout's reference is of each network instead of each width, and so are the statistics'.
        assumptions: of the fit.

    Returns:
        The statistics, in JAX's default floating-point type.

    Raises:
        InputError: where a covariance is too large or too small for its law.
    """
    layout = path_layout(path) if layout is None else layout
    p = len(layout.middle)
    if by_network:
        widths, width = path.width, np.arange(len(path.width))
    else:
        widths, width = np.unique(path.width, return_inverse=True)
        widths = repeated_widths(widths)
    which_width = width[path.network]
    group = which_width if pooled else path.network
    groups = len(widths) if pooled else len(width)
    weights = np.zeros((groups, p, ROWS, layout.nodes + 1))
    constant = np.zeros(groups)
    spread, least = np.zeros_like(layout.centre), np.full(p, np.inf)
    for block, terms in terms_by_block(path):
        _require_finite(vars(terms), path.network[block])
        reference = layout.reference.at(which_width[block])
        ratio = variance_ratio(reference, terms, layout.centre)
        spread = np.maximum(spread, np.abs(terms.variance - layout.centre).max(axis=0, initial=0.0))
        least = np.minimum(least, ratio.min(axis=0))
        np.add.at(constant, group[block], terms.log_jacobian - np.log(2 * math.pi * ratio).sum(axis=1) / 2)
        data = _rows(terms, layout.centre, ratio, terms.increments - reference.mean(terms))
        functions = _cardinal(terms.mixing, layout)
        first = np.flatnonzero(np.diff(group[block], prepend=-1))
        for start, stop in itertools.pairwise([*first, len(block)]):
            # (p, rows, transitions) @ (p, transitions, nodes)
            weights[group[block[start]]] += data[:, start:stop].swapaxes(1, 2) @ functions[:, start:stop]
    weights[..., 1:] @= _moments_to_nodes(layout.nodes)
    statistics = dict(
        weights=weights.swapaxes(1, 2),
        nodes=layout.points,
        centre=layout.centre,
        spread=spread,
        least=least,
        constant=constant,
        widths=widths,
        width=np.arange(groups) if pooled else width,
        reference=jax.tree.map(lambda x: _repeated(x, len(widths)), layout.reference),
        initial=None if pooled else path.covariance[:, 0],
    )
    arrays = jax.device_put(jax.tree.map(_in_default_type, statistics))
    depth = 0 if pooled else int(path.gap.sum())
    return PathStatistics(**arrays, causal=path.causal, assumptions=assumptions, depth=depth)


def repeated_widths(widths: np.ndarray) -> np.ndarray:
    """Widths with the last of them repeated up to a power of two, so that few numbers of widths are compiled for."""
    return _repeated(widths, 1 << (len(widths) - 1).bit_length())


def terms_by_block(path: Path) -> Iterator[tuple[np.ndarray, Terms]]:
    """The indices of transitions and their terms, block by block."""
    for block in path.blocks():
        yield block, path.terms(block)


def variance_ratio(moments: Moments, terms: Terms, centre: np.ndarray) -> np.ndarray:
    """ρ of each term: its whole variance over the part of it that is a function of e, and at least ½."""
    own = moments.own_variance(terms.mixing, terms.variance - centre)
    return np.maximum(1 + own / moments.common_variance(terms.mixing), SMALLEST_RATIO)


def nodes_needed(half_width: float) -> int:
    """The least J in `NODES` with ρ^{−J} ≤ 1e-13, for data with log e in an interval of this half-width."""
    slope = math.pi / half_width
    rho = slope + math.hypot(1.0, slope)
    needed = -math.log(ACCURACY) / math.log(rho)
    return next((count for count in NODES if count >= needed), math.ceil(needed))


def _rows(terms: Terms, centre: np.ndarray, ratio: np.ndarray, residual: np.ndarray) -> np.ndarray:
    """What is summed, shape (p, transitions, rows)."""
    weighted = np.concatenate([terms.increments[:, None], terms.drift], axis=1) / np.sqrt(ratio)[:, None]
    products = np.stack([weighted[:, s] * weighted[:, t] for s, t in QUADRATIC], axis=1)
    first = np.concatenate([terms.variance - centre, ratio[:, None] - 1], axis=1) / ratio[:, None]
    square = (residual**2 / ratio)[:, None]
    rows = np.concatenate([np.ones_like(square), products, first, first * square], axis=1)
    return np.ascontiguousarray(rows.transpose(2, 0, 1))


def _at_zero(e: np.ndarray) -> np.ndarray:
    """Which e are zero up to rounding, which is relative to the largest of the same transition."""
    return e <= (ROUNDING * float(jnp.finfo(float).eps)) ** 2 * e.max(axis=-1, keepdims=True)


def _cardinal(e: np.ndarray, layout: Layout) -> np.ndarray:
    """1 at the node e = 0 for the terms there, and Chebyshev polynomials T_k of log e for the others: (p, ·, nodes)."""
    zero = _at_zero(e)
    x = (np.log(np.where(zero, 1.0, e)) - np.where(zero, 0.0, layout.middle)) / layout.half_width
    T = np.empty((layout.nodes + 1, *e.shape))
    T[0] = zero
    T[1] = ~zero
    T[2:3] = x
    for k in range(3, layout.nodes + 1):
        T[k] = 2 * x * T[k - 1] - T[k - 2]
    T[2:, zero] = 0.0
    return np.ascontiguousarray(T.transpose(2, 1, 0))


def _repeated(x: np.ndarray, length: int) -> np.ndarray:
    """With its last row repeated, to a length."""
    x = np.asarray(x)
    return x[np.minimum(np.arange(length), len(x) - 1)]


def _in_default_type(x: np.ndarray) -> np.ndarray:
    return np.asarray(x, jnp.result_type(float) if np.issubdtype(x.dtype, np.floating) else jnp.result_type(int))


def _filled(x: np.ndarray, length: int) -> np.ndarray:
    """With zeros at its end, to a length."""
    return np.concatenate([x, np.zeros((length - len(x), *x.shape[1:]), x.dtype)])


def _require_finite(terms: Mapping[str, np.ndarray], network: np.ndarray) -> None:
    for name, term in terms.items():
        finite = np.isfinite(term).reshape(len(term), -1).all(axis=1)
        if not finite.all():
            where = network[int(np.argmin(finite))]
            raise InputError(f"covariance: network {where}: too large or too small for its law, {name} overflows")


def _moments_to_nodes(count: int) -> np.ndarray:
    """Matrix from sums over T_k to sums over the cardinal functions of interpolation at the Chebyshev points."""
    to_nodes = np.cos(np.arange(count)[:, None] * _angles(count)) * (2 / count)
    to_nodes[0] /= 2
    return to_nodes


def _angles(count: int) -> np.ndarray:
    return (np.arange(count) + 0.5) * math.pi / count
