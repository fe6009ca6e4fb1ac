"""Sufficient statistics of a full path: a few thousand numbers per network, see `docs/theory/likelihood.md`.

By the law of finite width variances depend on features f_k of V in terms of O(1/n). Each f_k is replaced by its mean
f̄_k over the data, and G, which is of second order in e, by e (g₀ + g₁ e), fitted to the data.
"""
# pyright: reportIncompatibleMethodOverride=false
# Equinox implements abstract properties by fields.

import dataclasses
import functools
import itertools
import math
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array, Float, Int

from sdeinfer.covariance import Pattern
from sdeinfer.covariance._matrix import engine
from sdeinfer.covariance._pattern import EVERY_TOKEN
from sdeinfer.layers import FiniteWidth, Limit
from sdeinfer.layers._finite_width import ATTENTION_NEXT, VARIANCE_FEATURES, drift_count
from sdeinfer.likelihood._assumptions import NOTHING_ASSUMED, Assumptions
from sdeinfer.likelihood._path import AbstractPath, Adjustment
from sdeinfer.likelihood._terms import Moments, bounded, moments_of, of_limits
from sdeinfer.observation._dataset import Groups

NODES = (64, 192)
"""Numbers of nodes for which programs are compiled."""


class Estimates(eqx.Module):
    """Estimates of each group's coordinates by itself, which determine a sampler's coordinates and no density."""

    centre: Float[Array, "groups parameters"]
    precision: Float[Array, "groups parameters"]


class PathStatistics(AbstractPath):
    """Sufficient statistics of observed paths under every shaped architecture.

    Attributes:
        weights: sums over a network's terms of each of the `rows_of` rows, at each node of each pair.
        nodes: values of e, the first 0.
        centre: f̄_k.
        next_order: g₀ and g₁, and the largest |g₀ + g₁ e|.
        constant: additive constant of the log density, log |∂z/∂dV| − ½ Σ log 2π.
        widths: the distinct widths n, ascending; of networks in groups those of each pair of a group and a width.
        width: index of each network into `widths`.
        initial: V of each network at its first layer; None if networks cannot be sampled.
        group: index of the group of each of `widths`; None for networks without groups.
    """

    arrays = ("weights", "constant", "width", "initial")

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
    group: Int[Any, " widths"] | None = None
    groups: int = eqx.field(default=0, static=True)
    estimates: Estimates | None = None

    @property
    def value(self) -> Float[Array | np.ndarray, "networks rows p nodes"]:
        return self.weights

    def log_density(self, law: Limit | FiniteWidth, value: Any) -> Float[Any, "... networks"]:
        law = of_limits(law, len(self.widths)) if isinstance(law, Limit) else law
        moments = moments_of(law, self.centre)
        quadratic, variance = products(moments.drift), variance_at_nodes(moments, self)
        weights = engine(variance).asarray(value)
        if isinstance(weights, np.ndarray):
            twice = _contracted_on_host(quadratic, variance, weights, self.width)
        elif self.networks == len(self.widths):
            twice = jax.vmap(contracted_nodes)(quadratic[self.width], variance[self.width], weights)
        else:
            kernels = jax.vmap(kernel)(quadratic, variance)
            of_widths = weights.reshape(self.networks, -1) @ kernels.reshape(len(self.widths), -1).T
            twice = jnp.take_along_axis(of_widths, self.width[:, None], axis=1)[:, 0]
        if self.adjustment is not None:
            twice = twice / engine(twice).broadcast_to(self.adjustment.dispersion, self.widths.shape)[self.width]
        return self.constant - twice / 2

    @property
    def group_of_network(self) -> Int[Array, " networks"]:
        """Group of each network."""
        assert self.group is not None
        return self.group[self.width]

    @property
    def entries(self) -> int:
        """Entries of the largest array of the likelihood at one draw; layers of groups are those of each network."""
        networks, rows, *nodes = self.weights.shape
        laws = len(self.widths) if self.group is None else networks
        return laws * math.prod(nodes) * (1 if laws == networks else rows)  # see `log_density`

    def by_network(self) -> "PathStatistics":
        """The same data with one width, group and adjustment per network."""
        statistics = AbstractPath.by_network(dataclasses.replace(self, group=None))
        group = None if self.group is None else self.group_of_network
        return dataclasses.replace(statistics, group=group)  # pyright: ignore[reportReturnType]

    def in_groups(self, groups: Groups) -> "PathStatistics":
        """The same data with one width for each pair of a group and a width."""
        width = np.asarray(self.widths)[np.asarray(self.width)]
        pairs, number = np.unique(np.stack([groups.group, width]), axis=1, return_inverse=True)
        arrays = {"widths": pairs[1].astype(width.dtype), "width": number.reshape(-1), "group": pairs[0].astype(int)}
        return dataclasses.replace(self, **jax.device_put(arrays), groups=len(groups))

    def of_networks(self, networks: Int[np.ndarray, " some"]) -> "PathStatistics":
        """The statistics of some networks, without groups."""
        distinct, width = np.unique(np.asarray(self.width)[networks], return_inverse=True)
        arrays = {
            **{name: np.asarray(getattr(self, name))[networks] for name in ("weights", "constant", "initial")},
            "widths": np.asarray(self.widths)[distinct],
            "width": width,
        }
        return dataclasses.replace(self, **jax.device_put(arrays), group=None, groups=0)

    def pooled(self) -> "PathStatistics":
        """The statistics summed over the networks of one width, and group; the joint likelihood is the same."""
        count, width = len(self.widths), np.asarray(self.width)
        weights, constant = (np.zeros((count, *x.shape[1:]), x.dtype) for x in (self.weights, self.constant))
        np.add.at(constant, width, np.asarray(self.constant))
        for place, row in zip(width, np.asarray(self.weights), strict=True):
            weights[place] += row
        number = np.arange(count, dtype=width.dtype)
        weights, constant, number = map(jax.device_put, (weights, constant, number))
        return dataclasses.replace(self, weights=weights, constant=constant, width=number, initial=None, depth=0)


def blank_statistics(
    tokens: int,
    networks: int = 1,
    *,
    pattern: Pattern = EVERY_TOKEN,
    assumptions: Assumptions = NOTHING_ASSUMED,
) -> PathStatistics:
    """Statistics without data, in the most common shapes for these tokens."""
    p, nodes = tokens * (tokens + 1) // 2, NODES[0] + 1
    shapes: Any = jax.device_put(
        {
            "weights": np.zeros((networks, row_count(drift_count(pattern, assumptions.other_terms)), p, nodes)),
            "nodes": np.ones((p, nodes)),
            "centre": np.ones((len(VARIANCE_FEATURES), p)),
            "next_order": np.zeros((3, p)),
            "constant": np.zeros(networks),
            "widths": np.full(1, 100.0),
            "width": np.zeros(networks, int),
        }
    )
    return PathStatistics(**shapes, pattern=pattern, assumptions=assumptions)


@functools.cache
def quadratic_pairs(drifts: int) -> list[tuple[int, int]]:
    """Pairs (s, t), s ≤ t, whose products b_s b_t are summed, with b₀ = z."""
    return list(itertools.combinations_with_replacement(range(1 + drifts), 2))


def row_count(drifts: int) -> int:
    """Number of sums per node: of 1, and of b_s b_t."""
    return 1 + len(quadratic_pairs(drifts))


def variance_at_nodes(moments: Moments, path: "PathStatistics") -> Float[Any, "... p nodes"]:
    """Variances by a law, with its leading axes and with functions of e for the features."""
    mixing, e = moments.mixing[..., None], path.nodes
    next_order = path.next_order[0][:, None] + path.next_order[1][:, None] * e
    strength = moments.variance[..., ATTENTION_NEXT, None, None] / engine(mixing).where(mixing > 0, mixing, 1.0)
    # One factor for all e of a pair, since interpolation needs a variance that is analytic in e.
    largest = strength * path.next_order[2][:, None]
    # Changes of the variance are bounded by ¾, and unchanged below half of that.
    return moments.noise[..., None] + mixing * e * (1 + strength * next_order * bounded(largest / 0.75))


def kernel(quadratic: Float[Array, " count"], variance: Float[Array, "p nodes"]) -> Float[Array, "rows p nodes"]:
    """Coefficients of the rows of the statistics in −2 log density, for one width: log v and θ_s θ_t/v."""
    return jnp.concatenate([jnp.log(variance)[None], quadratic[:, None, None] / variance])


@jax.custom_jvp
def contracted_nodes(
    quadratic: Float[Array, " count"], variance: Float[Array, "p nodes"], weights: Float[Array, "rows p nodes"]
) -> Float[Array, ""]:
    """`kernel` times the statistics of one width; cheaper, since it sums over rows first."""
    return _value_and_slopes(quadratic, variance, weights)[0]


def _contracted_on_host(
    quadratic: Float[np.ndarray, "... widths count"],
    variance: Float[np.ndarray, "... widths p nodes"],
    weights: Float[np.ndarray, "networks rows p nodes"],
    width: Int[Any, " networks"],
) -> Float[np.ndarray, "... networks"]:
    """`kernel` times the statistics of each network, by one product of matrices for each width."""
    rows, points = weights.reshape(len(weights), -1), variance.shape[:-3]
    kernels = np.empty((*points, *weights.shape[1:]), variance.dtype)
    values = np.empty((*points, len(rows)), variance.dtype)
    for number in range(variance.shape[-3]):
        np.log(variance[..., number, :, :], out=kernels[..., 0, :, :])
        inverse = 1 / variance[..., number, None, :, :]
        np.multiply(quadratic[..., number, :, None, None], inverse, out=kernels[..., 1:, :, :])
        members = np.flatnonzero(np.asarray(width) == number)
        values[..., members] = kernels.reshape(*points, -1) @ rows[members].T
    return values


def _value_and_slopes(
    quadratic: Array, variance: Array, weights: Array
) -> tuple[Float[Array, ""], tuple[Array, Array]]:
    """The value Σ n log v + S/v with S = Σ c b b, and its derivatives in the first two arguments.

    The derivatives are written out because automatic differentiation compiles three times as many kernels.
    """
    count, rows = weights[0], weights.reshape(len(weights), -1)
    # Products with all rows: XLA would copy the others in every evaluation.
    r, S = 1 / variance, (jnp.concatenate([jnp.zeros_like(quadratic[:1]), quadratic]) @ rows).reshape(variance.shape)
    slopes = ((rows @ r.reshape(-1))[1:], r * (count - r * S))
    return jnp.sum(count * jnp.log(variance) + r * S), slopes


@functools.partial(contracted_nodes.defjvp, symbolic_zeros=True)
def _contracted_jvp(primals: tuple, tangents: tuple) -> tuple[Array, Array]:
    if not isinstance(tangents[2], SymbolicZero):
        raise NotImplementedError("PathStatistics have no derivative in V; use Transitions, of `sdeinfer.transitions`")
    value, slopes = _value_and_slopes(*primals)
    moved = [(slope, dx) for slope, dx in zip(slopes, tangents[:2], strict=True) if not isinstance(dx, SymbolicZero)]
    return value, sum((jnp.sum(slope * dx) for slope, dx in moved), jnp.zeros_like(value))


def products(drift: Float[Any, "... drifts"]) -> Float[Any, "... count"]:
    """Coefficients of b_s b_t in (z − Σ_s θ_s b_s)², for `quadratic_pairs`."""
    xp, used = engine(drift), quadratic_pairs(drift.shape[-1])
    signed = xp.concatenate([xp.ones_like(drift[..., :1]), -drift], axis=-1)
    chosen = np.zeros((len(used), signed.shape[-1], signed.shape[-1]), drift.dtype)
    for row, (s, t) in enumerate(used):
        chosen[row, s, t] = 2 - (s == t)
    both = signed[..., :, None] * signed[..., None, :]
    return both.reshape(*drift.shape[:-1], -1) @ chosen.reshape(len(used), -1).T
