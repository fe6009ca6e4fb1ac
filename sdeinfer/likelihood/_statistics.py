"""Sufficient statistics of a full path: a few thousand numbers per network.

The log density of a path depends on the data through sums over its terms of data times a function of the term's e (see
`Terms`): with variances v that are functions of e it is −½ Σ [(z − Σ_s θ_s b_s)²/v + log 2πv]. By the law of finite
width, v also depends on features f_k of V (see `FiniteWidth`) in terms of O(1/n). Each f_k is replaced by its mean f̄_k
over the data, and G, which is of second order in e, by e (g₀ + g₁ e), fitted to the data. `Transitions` have the exact
law; `tests/benchmarks/test_mechanisms.py` compares the posteriors.

The functions of e are interpolated at the nodes of a `Layout`, with weights computed in one pass over the data.
"""
# pyright: reportIncompatibleMethodOverride=false
# Equinox implements abstract properties by fields.

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array, Float, Int

from sdeinfer.covariance import Pattern
from sdeinfer.covariance._pattern import EVERY_TOKEN
from sdeinfer.layers import FiniteWidth, Limit
from sdeinfer.layers._finite_width import ATTENTION_NEXT, VARIANCE_FEATURES, drift_count
from sdeinfer.likelihood._assumptions import NOTHING_ASSUMED, Assumptions
from sdeinfer.likelihood._path import AbstractPath, Adjustment
from sdeinfer.likelihood._terms import Moments, bounded, moments_of, of_limits
from sdeinfer.observation._dataset import Groups

BLOCKS, BLOCK_ENTRIES = (64, 256), 2**25
"""Numbers of networks for which programs are compiled, and a bound on the entries of their weights; fewer networks if
there are many tokens."""

NODES = (64, 192)
"""Numbers of nodes for which programs are compiled."""


class Estimates(eqx.Module):
    """Separate estimates of each group's parameters, in the coordinates of `Coordinates.unconstrained`.

    They determine a sampler's coordinates and change no density.
    """

    centre: Float[Array, "groups parameters"]
    precision: Float[Array, "groups parameters"]


class PathStatistics(AbstractPath):
    """Sufficient statistics of observed paths under every shaped architecture.

    Attributes:
        weights: sums over a network's terms of each of the `rows_of` rows, at each node of each pair; shape (networks,
            rows, p, nodes).
        nodes: values of e, the first 0; shape (p, nodes).
        centre: f̄_k, shape (features, p).
        next_order: g₀ and g₁ of e (g₀ + g₁ e), which stands for G, and the largest |g₀ + g₁ e|; shape (3, p).
        constant: additive constant of the log density, log |∂z/∂dV| − ½ Σ log 2π; shape (networks,).
        widths: the distinct widths n, ascending, padded by `repeated_widths`; shape (widths,). Of networks in groups,
            the width of each pair of a group and a width.
        width: index of each network into `widths`, shape (networks,).
        adjustment: adjustment of the likelihood, possibly with a leading axis of widths.
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
        """The weights."""
        return self.weights

    def log_density(self, law: Limit | FiniteWidth, value: Any) -> Float[Array, " networks"]:
        """Log density of each network."""
        return log_density(law, self, jnp.asarray(value))

    @property
    def group_of_network(self) -> Int[Array, " networks"]:
        """Group of each network."""
        assert self.group is not None
        return self.group[self.width]

    @property
    def entries(self) -> int:
        """Entries of the largest array of the likelihood at one draw: of a width, like the weights of a network."""
        networks, rows, *nodes = self.weights.shape
        # Without rows for widths of one network, see `_kernels.log_density`.
        return len(self.widths) * math.prod(nodes) * (1 if networks == len(self.widths) else rows)

    def by_network(self) -> "PathStatistics":
        """The same data with one width, group and adjustment per network."""
        found = AbstractPath.by_network(dataclasses.replace(self, group=None))
        group = None if self.group is None else self.group_of_network
        return dataclasses.replace(found, group=group)  # pyright: ignore[reportReturnType]

    def in_groups(self, groups: Groups) -> "PathStatistics":
        """The same data with one width for each pair of a group and a width."""
        width = np.asarray(self.widths)[np.asarray(self.width)]
        pairs, number = np.unique(np.stack([groups.group, width]), axis=1, return_inverse=True)
        group, widths = (repeated_widths(row) for row in pairs)
        arrays = {"widths": widths.astype(width.dtype), "width": number.reshape(-1), "group": group.astype(int)}
        return dataclasses.replace(self, **jax.device_put(arrays), groups=len(groups))

    def of_networks(self, networks: Int[np.ndarray, " some"]) -> "PathStatistics":
        """The statistics of some networks, without groups."""
        distinct, width = np.unique(np.asarray(self.width)[networks], return_inverse=True)
        arrays = {
            **{name: np.asarray(getattr(self, name))[networks] for name in ("weights", "constant", "initial")},
            "widths": repeated_widths(np.asarray(self.widths)[distinct]),
            "width": width,
        }
        return dataclasses.replace(self, **jax.device_put(arrays), group=None, groups=0)

    def pooled(self) -> "PathStatistics":
        """The statistics summed over the networks of one width, and group; the joint likelihood is the same."""
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
        arrays = {name: np.asarray(getattr(self, name)) for name in ("weights", "constant", "width")}
        for start in range(0, self.networks, size):
            count = min(size, self.networks - start)
            own = {
                name: np.pad(x[start : start + count], ((0, size - count), *((0, 0),) * (x.ndim - 1)))
                for name, x in arrays.items()
            }
            yield dataclasses.replace(self, **own, initial=None, depth=0), count


def blank_statistics(
    tokens: int,
    widths: int,
    *,
    networks: int | None = None,
    pattern: Pattern = EVERY_TOKEN,
    assumptions: Assumptions = NOTHING_ASSUMED,
) -> PathStatistics:
    """Statistics without data, in the most common shapes for these tokens and widths; pooled if `networks` is None."""
    p, nodes = tokens * (tokens + 1) // 2, NODES[0] + 1
    count = len(repeated_widths(np.arange(widths)))
    width = np.arange(count) if networks is None else np.zeros(networks, int)
    shapes: Any = jax.device_put(
        {
            "weights": np.zeros((len(width), rows_of(drift_count(pattern, assumptions.other_terms)), p, nodes)),
            "nodes": np.ones((p, nodes)),
            "centre": np.ones((FEATURES, p)),
            "next_order": np.zeros((3, p)),
            "constant": np.zeros(len(width)),
            "widths": np.full(count, 100.0),
            "width": width,
        }
    )
    return PathStatistics(**shapes, pattern=pattern, assumptions=assumptions)


def repeated_widths(widths: np.ndarray) -> np.ndarray:
    """Widths, with the last one repeated up to a power of two, which limits the number of compiled shapes."""
    return np.pad(widths, (0, (1 << (len(widths) - 1).bit_length()) - len(widths)), mode="edge")


def _sums_by_group(x: np.ndarray, group: np.ndarray, count: int) -> np.ndarray:
    """Sums over the rows of each group, without a copy of the rows."""
    sums = np.zeros((count, *x.shape[1:]), x.dtype)
    for number, row in zip(group, x, strict=True):
        sums[number] += row
    return sums


LARGEST_CHANGE = 0.75
"""Bound on the relative change of attention's variance by G; changes below half of it are unchanged."""

LIMIT_DRIFTS, FEATURES = 2, len(VARIANCE_FEATURES)


@functools.cache
def quadratic_pairs(drifts: int) -> list[tuple[int, int]]:
    """Pairs (s, t), s ≤ t, whose products b_s b_t are summed, with b₀ = z; those of the limit, t ≤ 2, come first."""
    pairs = itertools.combinations_with_replacement(range(1 + drifts), 2)
    return sorted(pairs, key=lambda st: st[1] > LIMIT_DRIFTS)


def rows_of(drifts: int) -> int:
    """Number of sums per node: of 1, and of b_s b_t."""
    return 1 + len(quadratic_pairs(drifts))


def log_density(
    law: Limit | FiniteWidth, path: "PathStatistics", weights: Float[Array, "networks rows p nodes"]
) -> Float[Array, " networks"]:
    """Log density of each network; see `AbstractPath.log_density`."""
    if isinstance(law, Limit) and not law.others:
        weights = weights[:, : rows_of(LIMIT_DRIFTS)]
        drift = jnp.stack([law.attention_drift, law.relu_drift], axis=-1)
        variance = law.linear_noise[..., None, None] + law.attention_noise[..., None, None] * path.nodes
        drift, variance = (
            jnp.broadcast_to(x, (len(path.widths), *x.shape[x.ndim - axes :]))
            for x, axes in ((drift, 1), (variance, 2))
        )
    else:
        law = of_limits(law, len(path.widths)) if isinstance(law, Limit) else law
        moments = jax.vmap(lambda law: moments_of(law, path.centre))(law)
        drift, variance = moments.drift, jax.vmap(variance_at_nodes, (0, None))(moments, path)
    quadratic = jax.vmap(products)(drift)
    if path.networks == len(path.widths):
        twice = jax.vmap(contracted)(quadratic[path.width], variance[path.width], weights)
    else:
        kernels = jax.vmap(kernel)(quadratic, variance)
        of_widths = weights.reshape(path.networks, -1) @ kernels.reshape(len(path.widths), -1).T
        twice = jnp.take_along_axis(of_widths, path.width[:, None], axis=1)[:, 0]
    dispersion = jnp.ones(()) if path.adjustment is None else path.adjustment.dispersion
    return path.constant - twice / (2 * jnp.broadcast_to(dispersion, path.widths.shape)[path.width])


def variance_at_nodes(moments: Moments, path: "PathStatistics") -> Float[Array, "p nodes"]:
    """Variances by the law of one width, with functions of e for the features."""
    mixing, e = moments.mixing[:, None], path.nodes
    next_order = path.next_order[0][:, None] + path.next_order[1][:, None] * e
    change = moments.variance[ATTENTION_NEXT] * next_order / jnp.where(mixing > 0, mixing, 1.0)
    # One factor for all e of a pair, since interpolation needs a variance that is analytic in e.
    largest = moments.variance[ATTENTION_NEXT] * path.next_order[2][:, None] / jnp.where(mixing > 0, mixing, 1.0)
    return moments.noise[:, None] + mixing * e * (1 + change * bounded(largest / LARGEST_CHANGE))


def kernel(quadratic: Float[Array, " count"], variance: Float[Array, "p nodes"]) -> Float[Array, "rows p nodes"]:
    """Coefficients of the rows of the statistics in −2 log density, for one width: log v and θ_s θ_t/v."""
    return jnp.concatenate([jnp.log(variance)[None], quadratic[:, None, None] / variance])


@jax.custom_jvp
def contracted(
    quadratic: Float[Array, " count"], variance: Float[Array, "p nodes"], weights: Float[Array, "rows p nodes"]
) -> Float[Array, ""]:
    """`kernel` times the statistics of one width; cheaper, since it sums over rows first."""
    return _value_and_slopes(quadratic, variance, weights)[0]


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


@functools.partial(contracted.defjvp, symbolic_zeros=True)
def _contracted_jvp(primals: tuple, tangents: tuple) -> tuple[Array, Array]:
    if not isinstance(tangents[2], SymbolicZero):
        raise NotImplementedError("PathStatistics have no derivative in V; use Transitions, of `sdeinfer.transitions`")
    value, slopes = _value_and_slopes(*primals)
    moved = [(slope, dx) for slope, dx in zip(slopes, tangents[:2], strict=True) if not isinstance(dx, SymbolicZero)]
    return value, sum((jnp.sum(slope * dx) for slope, dx in moved), jnp.zeros_like(value))


def products(drift: Float[Array, " drifts"]) -> Float[Array, " count"]:
    """Coefficients of b_s b_t in (z − Σ_s θ_s b_s)², for `quadratic_pairs`."""
    signed = jnp.concatenate([jnp.ones_like(drift[:1]), -drift])
    used = quadratic_pairs(len(drift))
    chosen = np.zeros((len(used), len(signed), len(signed)))
    for row, (s, t) in enumerate(used):
        chosen[row, s, t] = 2 - (s == t)
    return jnp.asarray(chosen.reshape(len(used), -1), signed.dtype) @ jnp.outer(signed, signed).reshape(-1)
