"""Draws of models of networks in groups, and predictions at them: what is of each group has one axis more."""

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import jax.random as jr
import numpy as np
import xarray as xr
from arviz_base import dict_to_dataset
from jaxtyping import Array, ArrayLike, Float, PRNGKeyArray

from sdeinfer.infer._predictive import predict
from sdeinfer.layers import Architecture
from sdeinfer.likelihood import Program
from sdeinfer.observation import groups_of


def labelled_draws(program: Program, draws: Mapping[str, ArrayLike], data: xr.Dataset) -> xr.Dataset:
    """Name the axes of draws with leading axes (chain, draw), and the groups by their labels."""
    values = {name: np.asarray(value) for name, value in draws.items()}
    if program.alike is None:
        return dict_to_dataset(values)
    dims: dict[Hashable, Sequence[Hashable]] = {name: ["group"] for name, value in values.items() if value.ndim == 3}
    coords: dict[Any, Any] = {"group": groups_of(data).labels}
    return dict_to_dataset(values, dims=dims, coords=coords)


def predict_each(
    program: Program,
    draws: Mapping[str, Float[Array | np.ndarray, "draws ..."]],
    data: xr.Dataset,
    *,
    architecture: Architecture,
    key: PRNGKeyArray,
) -> xr.Dataset:
    """Replicate the observed networks as `predict` does, those of a group at the group's own parameters.

    Arguments:
        program: the model whose draws these are.
        draws: of its sites.
        data: the observed networks.
        architecture: the kind of layer.
        key: where the randomness comes from.
    """
    if program.alike is None:
        own = {name: np.asarray(draws[name]) for name in architecture.parameters}
        return predict(own, data, architecture=architecture, key=key)
    groups = groups_of(data)
    parts: list[xr.Dataset] = []
    for number, key_group in enumerate(jr.split(key, len(groups))):
        own = {name: np.asarray(draws[f"group_{name}"])[:, number] for name in architecture.parameters}
        members = data.isel(network=groups.members(number))
        parts.append(predict(own, members, architecture=architecture, key=key_group))
    order = np.argsort(np.concatenate([groups.members(number) for number in range(len(groups))]))
    predicted = xr.concat(parts, "network", combine_attrs="drop").isel(network=order)
    exploded = np.isnan(np.asarray(predicted["covariance"])[:, :, -1, 0, 0])
    return predicted.assign_attrs(exploded=float(exploded.mean()))
