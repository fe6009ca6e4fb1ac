"""Full-path data of networks in groups with separate parameters."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import equinox as eqx
import jax
import numpy as np
import xarray as xr
from jaxtyping import Array, Float, Int

from sdeinfer._files import InputError
from sdeinfer.likelihood._adjustment import Adjustment
from sdeinfer.likelihood._assumptions import Assumptions
from sdeinfer.likelihood._observed import observed_path
from sdeinfer.likelihood._statistics import PathStatistics, path_layout, path_statistics
from sdeinfer.observation import groups_of


class Estimates(eqx.Module):
    """Separate estimates of each group's parameters, in the coordinates of `Coordinates.unconstrained`.

    They determine a sampler's coordinates and change no density.

    Attributes:
        centre: û, shape (groups, parameters).
        precision: 1/s² with standard deviation s; zero without information. Shape (groups, parameters).
    """

    centre: Float[Array, "groups parameters"]
    precision: Float[Array, "groups parameters"]


class GroupedStatistics(eqx.Module):
    """Sufficient statistics of observed paths of networks in groups.

    A kind is a pair of a group and a width.

    Attributes:
        path: the statistics; the fields that `PathStatistics` has per width, and its adjustment, are per kind here.
        group: group of each kind, shape (kinds,).
        groups: number of groups.
        estimates: estimates of the groups' parameters; None if not computed.
    """

    path: PathStatistics
    group: Int[Any, " kinds"]
    groups: int = eqx.field(static=True)
    estimates: Estimates | None = None

    @property
    def assumptions(self) -> Assumptions:
        """Assumptions of the fit."""
        return self.path.assumptions

    @property
    def adjustment(self) -> Adjustment | None:
        """Adjustment of each kind's parameters; None if there is none."""
        return self.path.adjustment

    def with_adjustment(self, adjustment: Adjustment) -> "GroupedStatistics":
        """The same data with another adjustment."""
        return eqx.tree_at(lambda grouped: grouped.path, self, dataclasses.replace(self.path, adjustment=adjustment))

    @property
    def group_of_network(self) -> Int[Array, " networks"]:
        """Group of each network of the path."""
        return self.group[self.path.width]

    def pooled(self) -> "GroupedStatistics":
        """The statistics summed over the networks of one group and width."""
        return eqx.tree_at(lambda grouped: grouped.path, self, self.path.pooled())

    def blocks(self) -> Iterator[tuple["GroupedStatistics", int]]:
        """Blocks of networks, padded to one shape; see `PathStatistics.blocks`."""
        for path, count in self.path.blocks():
            yield eqx.tree_at(lambda grouped: grouped.path, self, path), count


def grouped_statistics(
    data: xr.Dataset, assumptions: Assumptions, reduced: Callable[..., PathStatistics] | None = None
) -> GroupedStatistics:
    """Reduce the networks of each group to sufficient statistics with common nodes.

    Arguments:
        data: observed networks with the coordinate `group`, see `groups_of`.
        assumptions: assumptions of the fit.
        reduced: function from a group's transitions and a layout to its statistics; `path_statistics` if None.

    Raises:
        InputError: for invalid data, fewer than two groups, or a group without transitions.
    """
    reduced = partial(path_statistics, assumptions=assumptions) if reduced is None else reduced
    groups, path = groups_of(data), observed_path(data)
    layout, parts = path_layout(path), []
    for number, label in enumerate(groups.labels):
        own = path.of_networks(groups.members(number))
        try:
            if not len(own):
                raise InputError("used: no transition is left")
            parts.append(reduced(own, layout))
        except InputError as error:
            raise InputError(f"group {label}: {error}") from error
    order = np.argsort(np.concatenate([groups.members(number) for number in range(len(groups))]))
    kinds = [len(part.widths) for part in parts]
    group = np.repeat(np.arange(len(groups)), kinds)
    return GroupedStatistics(_joined(parts, kinds, order), jax.device_put(group), len(groups))


def _joined(parts: Sequence[PathStatistics], kinds: Sequence[int], order: np.ndarray) -> PathStatistics:
    """The joined statistics of groups with one layout; `order` restores the networks' order in the data."""

    def together(field: Callable[[PathStatistics], Array]) -> np.ndarray:
        return np.concatenate([field(part) for part in parts])

    adjustments = [part.adjustment for part in parts if part.adjustment is not None]
    firsts = np.cumsum([0, *kinds[:-1]])
    joined = dict(
        weights=together(lambda part: part.weights)[order],
        nodes=parts[0].nodes,
        centre=parts[0].centre,
        next_order=parts[0].next_order,
        constant=together(lambda part: part.constant)[order],
        widths=together(lambda part: part.widths),
        width=np.concatenate([np.asarray(part.width) + first for part, first in zip(parts, firsts, strict=True)])[
            order
        ],
        adjustment=_each_as_often(adjustments, kinds) if adjustments else None,
        initial=np.concatenate([np.asarray(part.initial) for part in parts])[order],
    )
    statics = {"pattern": parts[0].pattern, "assumptions": parts[0].assumptions, "depth": parts[0].depth}
    return PathStatistics(**jax.device_put(joined), **statics)


def _each_as_often(adjustments: Sequence[Adjustment], kinds: Sequence[int]) -> Adjustment:
    """The adjustments of the groups, repeated along a leading axis of kinds."""
    return jax.tree.map(lambda *each: np.repeat(np.stack(each), np.asarray(kinds), axis=0), *adjustments)
