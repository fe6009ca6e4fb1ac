"""Labels of the axes of draws, including the axis of groups."""

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np
import xarray as xr
from arviz_base import dict_to_dataset
from jaxtyping import ArrayLike

from sdeinfer.likelihood import AbstractModel, Groups
from sdeinfer.observation import groups_of


def labelled_draws(model: AbstractModel, draws: Mapping[str, ArrayLike], data: xr.Dataset) -> xr.Dataset:
    """Label the axes of draws with leading axes (chain, draw); groups and networks get their coordinates."""
    values = {name: np.asarray(value) for name, value in draws.items()}
    if isinstance(model, Groups):
        axis, labels = "group", groups_of(data).labels
    else:
        axis, labels = "network", data["network"].values
    of_each = [name for name, value in values.items() if value.ndim == 3 and value.shape[-1] == len(labels)]
    dims: dict[Hashable, Sequence[Hashable]] = {name: [axis] for name in of_each}
    coords: dict[Any, Any] = {axis: labels} if of_each else {}
    return dict_to_dataset(values, dims=dims, coords=coords)
