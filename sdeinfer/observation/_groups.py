"""Groups of networks: runs, sizes, or blocks of layers of one network."""

from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import xarray as xr
from jaxtyping import Int

from sdeinfer._files import InputError
from sdeinfer.observation._dataset import validate

GROUP = "group"
"""Name of the optional coordinate on network with the label, a number or a text, of each network's group."""


class Groups(NamedTuple):
    """The partition of networks into groups.

    Attributes:
        labels: labels of the groups, in the order of their first networks; shape (groups,).
        group: index into `labels` of each network's group; shape (networks,).
    """

    labels: np.ndarray
    group: Int[np.ndarray, " networks"]

    def __len__(self) -> int:
        return len(self.labels)

    def members(self, number: int) -> Int[np.ndarray, " members"]:
        """The indices of a group's networks."""
        return np.flatnonzero(self.group == number)


def groups_of(data: xr.Dataset) -> Groups:
    """The groups of networks that the coordinate `group` of a Dataset defines.

    Raises:
        InputError: if the coordinate is missing or not on network, if a network has no label, and for fewer than two
            groups.
    """
    if GROUP not in data.coords:
        raise InputError("group: a coordinate on network with the label of each network's group is needed")
    coordinate = data[GROUP]
    if coordinate.dims != ("network",):
        dims = ", ".join(map(str, coordinate.dims)) or "none"
        raise InputError(f"group: must be one label per network, got dimensions {dims}")
    group, labels = pd.factorize(coordinate.values)
    if (group < 0).any():
        raise InputError(f"group: network {data['network'].values[np.argmin(group)]} has no label")
    if len(labels) < 2:
        raise InputError(f"group: at least 2 groups are needed, got {labels[0]!s} alone; use models.full_path")
    return Groups(np.array(list(labels)), group)


def blocks_of_layers(data: xr.Dataset, blocks: int) -> xr.Dataset:
    """Cut every network into blocks of consecutive layers, and treat each block as a network of its own.

    A block starts at the last layer of the previous block. Given their initial covariances, blocks are independent of
    each other, as networks are.

    Arguments:
        data: observed networks, see `covariance_dataset`.
        blocks: number of blocks, with equally many transitions each.

    Returns:
        A Dataset of blocks × networks, the first block of all networks first, with layers numbered from 0. The
        coordinate `group` is "first-last", a block's layer numbers, and `network_of` the label of its network.

    Raises:
        InputError: for invalid data, fewer than two blocks, or layers that do not divide into equal blocks.
    """
    data = validate(data)
    layers = data["layer"].values
    transitions = len(layers) - 1
    if blocks < 2 or transitions % blocks:
        raise InputError(f"blocks: must be at least 2 and divide the {transitions} transitions, got {blocks}")
    ends = np.arange(blocks + 1) * (transitions // blocks)
    numbers = [layers[first : last + 1] - layers[first] for first, last in zip(ends[:-1], ends[1:], strict=True)]
    if any((each != numbers[0]).any() for each in numbers):
        raise InputError("layer: blocks of layers need the same layers of every block")
    networks: Any = data["network"].values if "network" in data.coords else np.arange(data.sizes["network"])
    parts = [
        data.isel(layer=slice(first, last + 1)).assign_coords(
            layer=numbers[0],
            network=np.arange(len(networks)) + block * len(networks),
            network_of=("network", networks),
            group=("network", np.repeat(f"{layers[first]:g}-{layers[last]:g}", len(networks))),
        )
        for block, (first, last) in enumerate(zip(ends[:-1], ends[1:], strict=True))
    ]
    return xr.concat(parts, "network")
