"""Groups of networks, such as runs or sizes."""

from typing import NamedTuple

import numpy as np
import pandas as pd
import xarray as xr
from jaxtyping import Int

from sdeinfer._files import InputError
from sdeinfer.observation._faults import labels_of


class Groups(NamedTuple):
    """The partition of networks into groups."""

    labels: np.ndarray
    group: Int[np.ndarray, " networks"]

    def __len__(self) -> int:
        return len(self.labels)

    def members(self, number: int) -> Int[np.ndarray, " members"]:
        """The indices of a group's networks."""
        return np.flatnonzero(self.group == number)


def groups_of(data: xr.Dataset) -> Groups:
    """The groups of networks that the coordinate `group` of a Dataset defines."""
    if "group" not in data.coords:
        raise InputError("group: a coordinate on network with the label of each network's group is needed")
    coordinate = data["group"]
    if coordinate.dims != ("network",):
        dims = ", ".join(map(str, coordinate.dims)) or "none"
        raise InputError(f"group: must be one label per network, got dimensions {dims}")
    group, labels = pd.factorize(coordinate.values)
    if (group < 0).any():
        raise InputError(f"group: network {labels_of(data)[np.argmin(group)]} has no label")
    if len(labels) < 2:
        raise InputError(f"group: at least 2 groups are needed, got {labels[0]!s} alone; use models.full_path")
    return Groups(np.array(list(labels)), group)
