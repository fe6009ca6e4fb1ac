"""Covariances of many independent finite networks with weights."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import xarray as xr
from jaxtyping import Array, Float, PRNGKeyArray
from tqdm import tqdm

from sdeinfer._files import InputError
from sdeinfer.covariance import validate_covariance
from sdeinfer.layers import AbstractLayer, architecture_name, check_parameters
from sdeinfer.networks._tokens import tokens_with_covariance
from sdeinfer.observe import covariance_dataset

WEIGHTS_IN_MEMORY = 2**24
"""How many weights of one kind (n² for each network) are drawn at a time: 128 MiB in float64."""


def sample_networks(
    layer: AbstractLayer,
    V0: Float[Array, "m m"],
    *,
    width: int,
    depth: int,
    networks: int,
    observe_every: int = 1,
    progress: bool = False,
    key: PRNGKeyArray,
) -> xr.Dataset:
    """Draw independent networks with N(0, 1) weights and record their covariances V = XXᵀ/n.

    The networks come in batches of bounded memory; a network's weights depend on its number and the key alone.

    Arguments:
        layer: the architecture, with its parameters; repeated `depth` times with fresh weights.
        V0: covariance of the initial tokens, shape (m, m); every network starts at exactly this V0, in its own
            directions.
        width: n ≥ m.
        depth: d ≥ 1, the number of layers.
        networks: how many networks.
        observe_every: k, to record layers 0, k, 2k, … only.
        progress: show a progress bar.
        key: where the randomness comes from.

    Returns:
        The Dataset of `covariance_dataset`, in V0's floating-point type, with the truth in its attributes.

    Raises:
        InputError: for a V0 that is not a covariance, sizes that are not positive, or a network whose covariance
            overflows.
    """
    for name, value in {"width": width, "depth": depth, "networks": networks, "observe_every": observe_every}.items():
        if value < 1:
            raise InputError(f"{name}: at least 1 is needed, got {value}")
    if observe_every > depth:
        raise InputError(f"observe_every: must not exceed the depth {depth}, got {observe_every}")
    V0 = jnp.asarray(validate_covariance(V0))
    layer = check_parameters(layer)
    batch = max(1, min(networks, WEIGHTS_IN_MEMORY // width**2))
    keys = jr.split(key, networks)
    observed = depth // observe_every
    covariance = np.empty((networks, observed + 1, *V0.shape), V0.dtype)
    with tqdm(total=networks, desc="networks", disable=not progress, delay=2) as bar:
        for start in range(0, networks, batch):
            # The last batch is filled up with networks already drawn, so that every batch has one compiled shape.
            chosen = slice(max(0, min(start, networks - batch)), min(start + batch, networks))
            covariance[chosen] = _sample_batch(layer, V0, keys[chosen], width, observe_every, observed)
            bar.update(min(start + batch, networks) - start)
    return covariance_dataset(
        covariance,
        width=width,
        layers=observe_every * np.arange(observed + 1),
        architecture=architecture_name(layer),
        truth={name: float(value) for name, value in layer.parameters().items()},
    )


@eqx.filter_jit
def _sample_batch(layer, V0, keys, width, observe_every, observed):
    layer = jax.tree.map(lambda value: value.astype(V0.dtype), layer)

    def network(key):
        key_tokens, key_layers = jr.split(key)
        X0 = tokens_with_covariance(V0, width=width, key=key_tokens)

        def one_layer(number, X):
            return layer.forward(X, key=jr.fold_in(key_layers, number))

        def block(X, number):
            X = jax.lax.fori_loop(number * observe_every, (number + 1) * observe_every, one_layer, X)
            return X, _covariance(X)

        _, V = jax.lax.scan(block, X0, jnp.arange(observed))
        return jnp.concatenate([_covariance(X0)[None], V])

    return jax.vmap(network)(keys)


def _covariance(X):
    V = X @ X.T / X.shape[1]
    return (V + V.T) / 2
