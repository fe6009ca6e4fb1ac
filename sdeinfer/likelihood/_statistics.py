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
import math
from collections.abc import Iterator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from sdeinfer.covariance import EVERY_TOKEN, Pattern
from sdeinfer.layers import FiniteWidth, Limit, drift_count
from sdeinfer.likelihood._adjustment import Adjustment
from sdeinfer.likelihood._assumptions import NOTHING_ASSUMED, Assumptions
from sdeinfer.likelihood._kernels import FEATURES, log_density, rows_of
from sdeinfer.likelihood._layout import NODES
from sdeinfer.likelihood._path import AbstractPath
from sdeinfer.observation import Groups

BLOCKS, BLOCK_ENTRIES = (64, 256), 2**25
"""Numbers of networks for which programs are compiled, and a bound on the entries of their weights; fewer networks if
there are many tokens."""


class Estimates(eqx.Module):
    """Separate estimates of each group's parameters, in the coordinates of `Coordinates.unconstrained`.

    They determine a sampler's coordinates and change no density.

    Attributes:
        centre: û, shape (groups, parameters).
        precision: 1/s² with standard deviation s; zero without information. Shape (groups, parameters).
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
        assumptions: assumptions of the fit.
        adjustment: adjustment of the likelihood, possibly with a leading axis of widths; None for no adjustment.
        initial: V of each network at its first layer, for sampling networks; shape (networks, m, m). None if networks
            cannot be sampled.
        pattern: the attention pattern of the coordinates.
        depth: number of layers after the first.
        hidden: whether `observed` is None, so that a program samples the data.
        group: index of the group of each of `widths`; None for networks without groups.
        groups: number of groups.
        estimates: estimates of the groups' parameters; None if not computed.
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
