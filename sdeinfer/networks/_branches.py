"""Increments of residual blocks, by sampling networks with their weights. Tests: `tests/blocks/test_law.py`."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import xarray as xr
from jaxtyping import Array, Float, PRNGKeyArray

from sdeinfer._arguments import at_least_one, checked
from sdeinfer.blocks import Parallel
from sdeinfer.blocks._order import BlockOrder
from sdeinfer.covariance._matrix import validate_covariance
from sdeinfer.layers import AbstractLayer
from sdeinfer.layers._base import check_parameters
from sdeinfer.layers._over_depth import layer_time
from sdeinfer.networks._tokens import tokens_with_covariance
from sdeinfer.observation import BranchObserver, joined_branches


@checked
def sample_branches(
    layer: AbstractLayer,
    V0: Float[Array | np.ndarray, "m m"],
    *,
    width: int,
    depth: int,
    networks: int = 1,
    key: PRNGKeyArray,
) -> xr.Dataset:
    """Draw networks of residual blocks with their weights, and observe what every branch reads and adds.

    Arguments:
        layer: a `Block`, a `Stack` of blocks, or `OverDepth` of one of them; repeated `depth` times with fresh weights.
        V0: covariance of the initial tokens, shape (m, m).
        width: n, at least m.
        depth: number of layers.
        networks: number of networks; one is in memory at a time.
        key: PRNG key.

    Returns:
        The Dataset of `branches_dataset`, with the values of parameters that do not change with depth as attributes.

    Raises:
        InputError: for a layer that is not of blocks, a V0 that is no covariance, and sizes that are not positive.
    """
    at_least_one(width=width, depth=depth, networks=networks)
    V0 = jnp.asarray(validate_covariance(V0))
    order = BlockOrder.of_network(layer, tokens=len(V0), width=width, depth=depth)
    check_parameters(layer)
    kinds = [block.branch.kind for block in order.blocks] * depth
    observers = []
    for number in range(networks):
        observer = BranchObserver(width, pattern=order.pattern, network=number)
        read, added = _increments(layer, V0, jr.fold_in(key, number), width, depth)
        for kind, U, D in zip(kinds, np.asarray(read), np.asarray(added), strict=True):
            observer.add(U, D, kind=kind)
        observers.append(observer)
    values = dict(layer.parameters())
    if any(block.output_norm is not None for block in order.blocks):
        values |= order.strengths  # of increments before their norm, which the layer's output does not depend on
    truth = {f"truth_{name}": float(value) for name, value in values.items()}
    return joined_branches(observers).assign_attrs(truth)


@eqx.filter_jit
def _increments(
    layer: AbstractLayer, V0: Float[Array, "m m"], key: PRNGKeyArray, width: int, depth: int
) -> tuple[Float[Array, "branches m n"], Float[Array, "branches m n"]]:
    """The inputs of the branches of one network, and their increments."""
    key_start, key_layers = jr.split(key)

    def one_layer(X: Array, number: Array) -> tuple[Array, tuple[list[Array], list[Array]]]:
        of_depth = layer.at(layer_time(number, width, V0.dtype))
        blocks = BlockOrder.of(of_depth, depth=1).blocks
        keys = jr.split(jr.fold_in(key_layers, number), len(blocks))
        if isinstance(of_depth, Parallel):
            read = [block.read(X) for block in blocks]
            added = [block.increment(U, key=block_key) for block, U, block_key in zip(blocks, read, keys, strict=True)]
            return of_depth.with_increments(X, added), (read, added)
        read, added = [], []
        for block, block_key in zip(blocks, keys, strict=True):
            read.append(block.read(X))
            added.append(block.increment(read[-1], key=block_key))
            X = block.with_increment(X, added[-1])
        return X, (read, added)

    X = tokens_with_covariance(V0, width=width, key=key_start)
    _, (read, added) = jax.lax.scan(one_layer, X, jnp.arange(depth))
    flat = [jnp.stack(arrays, axis=1).reshape(-1, len(V0), width) for arrays in (read, added)]
    return flat[0], flat[1]
