"""The data of full paths of networks in groups, each of which has parameters of its own."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import equinox as eqx
import jax
import numpy as np
import xarray as xr
from jaxtyping import Array, Float, Int

from sdeinfer._files import InputError
from sdeinfer.likelihood._adjustment import Adjustment
from sdeinfer.likelihood._assumptions import Assumptions
from sdeinfer.likelihood._moments import no_moments
from sdeinfer.likelihood._statistics import Layout, PathStatistics, path_layout, path_statistics
from sdeinfer.likelihood._transitions import observed_path
from sdeinfer.observation import groups_of


class Estimates(eqx.Module):
    """What the data of each group alone say of its parameters, in the coordinates of `Coordinates.unconstrained`.

    They change no density: a sampler's coordinates are laid by them.

    Attributes:
        centre: û, shape (groups, parameters).
        precision: 1/s², with s the standard deviation, zero where the data say nothing; shape (groups, parameters).
    """

    centre: Float[Array, "groups parameters"]
    precision: Float[Array, "groups parameters"]


class GroupedStatistics(eqx.Module):
    """Sufficient statistics of observed paths, with a kind of networks for each group and width.

    Attributes:
        path: the statistics; what `PathStatistics` has for each width, and its adjustment, is of each kind here.
        group: the group of each kind, shape (kinds,).
        groups: how many groups.
        estimates: of the groups' parameters; not made where None.
    """

    path: PathStatistics
    group: Int[Array, " kinds"]
    groups: int = eqx.field(static=True)
    estimates: Estimates | None = None

    @property
    def assumptions(self) -> Assumptions:
        """Of the fit."""
        return self.path.assumptions

    @property
    def adjustment(self) -> Adjustment | None:
        """Of each kind's parameters before they enter the likelihood; none where None."""
        return self.path.adjustment

    @property
    def group_of_network(self) -> Int[Array, " networks"]:
        """The group of each network of the path."""
        return self.group[self.path.width]

    def pooled(self) -> "GroupedStatistics":
        """All networks of one group and width taken together as one."""
        return eqx.tree_at(lambda grouped: grouped.path, self, self.path.pooled())

    def blocks(self) -> Iterator[tuple["GroupedStatistics", int]]:
        """Parts of one shape with the networks in turn, see `PathStatistics.blocks`."""
        for path, count in self.path.blocks():
            yield eqx.tree_at(lambda grouped: grouped.path, self, path), count


def grouped_statistics(
    data: xr.Dataset, assumptions: Assumptions, reduced: Callable[..., PathStatistics] | None = None
) -> GroupedStatistics:
    """Reduce the networks of each group to their sufficient statistics, all with the same nodes.

    Arguments:
        data: observed networks with the coordinate `group`, see `groups_of`.
        assumptions: of the fit.
        reduced: from a group's transitions and a layout to its statistics; `path_statistics` where None.

    Raises:
        InputError: for data that are not valid, that have fewer than two groups, or a group without transitions.
    """
    reduced = partial(path_statistics, assumptions=assumptions) if reduced is None else reduced
    groups, path = groups_of(data), observed_path(data)
    layout, parts = path_layout(path), []
    for number, label in enumerate(groups.labels):
        own = path.of_networks(groups.members(number))
        try:
            if not len(own):
                raise InputError("used: no transition is left")
            parts.append(reduced(own, _about_nothing(layout, len(np.unique(own.width)))))
        except InputError as error:
            raise InputError(f"group {label}: {error}") from error
    order = np.argsort(np.concatenate([groups.members(number) for number in range(len(groups))]))
    kinds = [len(part.widths) for part in parts]
    group = np.repeat(np.arange(len(groups)), kinds)
    return GroupedStatistics(_joined(parts, kinds, order), jax.device_put(group), len(groups))


def _about_nothing(layout: Layout, widths: int) -> Layout:
    return layout._replace(reference=jax.tree.map(np.asarray, no_moments(widths, *layout.centre.shape)))


def _joined(parts: Sequence[PathStatistics], kinds: Sequence[int], order: np.ndarray) -> PathStatistics:
    """The statistics of several groups with one layout as one; `order` puts their networks where the data have them."""

    def together(field: Callable[[PathStatistics], Array]) -> np.ndarray:
        return np.concatenate([field(part) for part in parts])

    adjustments = [part.adjustment for part in parts if part.adjustment is not None]
    firsts = np.cumsum([0, *kinds[:-1]])
    joined = dict(
        weights=together(lambda part: part.weights)[order],
        nodes=parts[0].nodes,
        centre=parts[0].centre,
        spread=np.stack([part.spread for part in parts]).max(axis=0),
        least=np.stack([part.least for part in parts]).min(axis=0),
        constant=together(lambda part: part.constant)[order],
        widths=together(lambda part: part.widths),
        width=np.concatenate([np.asarray(part.width) + first for part, first in zip(parts, firsts, strict=True)])[
            order
        ],
        reference=jax.tree.map(lambda *each: np.concatenate(each), *[part.reference for part in parts]),
        adjustment=_each_as_often(adjustments, kinds) if adjustments else None,
        initial=np.concatenate([np.asarray(part.initial) for part in parts])[order],
    )
    statics = {"causal": parts[0].causal, "assumptions": parts[0].assumptions, "depth": parts[0].depth}
    return PathStatistics(**jax.device_put(joined), **statics)


def _each_as_often(adjustments: Sequence[Adjustment], kinds: Sequence[int]) -> Adjustment:
    """The adjustments of groups, along a leading axis of kinds."""
    return jax.tree.map(lambda *each: np.repeat(np.stack(each), np.asarray(kinds), axis=0), *adjustments)
