"""Covariances of many independent finite networks."""

import functools
import math
import operator
from collections.abc import Callable, Iterator
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import xarray as xr
from jaxtyping import Array, Float, PRNGKeyArray

from sdeinfer._arguments import at_least_one, checked
from sdeinfer._compiler import padded_size
from sdeinfer._files import InputError
from sdeinfer._progress import ProgressBar, phase, with_progress_line
from sdeinfer._threads import in_threads, on_cpu
from sdeinfer.covariance._matrix import factor, validate_covariance
from sdeinfer.layers import AbstractLayer
from sdeinfer.layers._base import check_parameters
from sdeinfer.layers._keys import NetworkKeys
from sdeinfer.layers._over_depth import layer_time
from sdeinfer.layers._streams import GROUP, NetworkStreams
from sdeinfer.layers._templates import architecture_in, is_named
from sdeinfer.layers._wishart import COLUMNS_AT_ONCE
from sdeinfer.networks._chain import check_chain_width, covariance_chain, host_chain
from sdeinfer.networks._tokens import tokens_with_covariance
from sdeinfer.observation import covariance_dataset, observe_outputs, validate
from sdeinfer.observation._dataset import truth_of

ENTRIES_AT_ONCE = 2**24
"""Largest number of entries of one array that are computed at a time, as of a weight matrix (n² per network): 128 MiB
in float64."""

BATCH_NETWORKS = 64
"""Networks per batch of the chain on a CPU, for every number of networks, so that one compiled shape serves all."""


@checked
@with_progress_line
def sample_networks(
    layer: AbstractLayer,
    V0: Float[Array | np.ndarray, "m m"],
    *,
    width: int,
    depth: int,
    networks: int,
    observe_every: int = 1,
    method: Literal["chain", "weights"] | None = None,
    first_network: int = 0,
    progress: bool = True,
    key: PRNGKeyArray,
) -> xr.Dataset:
    """Draw independent networks with N(0, 1) weights and record their covariances V = XXᵀ/n.

    By default the covariances are drawn without weights, from exactly the law that the weights give them: see
    `covariance_chain`. Networks are drawn in batches of bounded memory; up to rounding, a network depends only on its
    number and the key; shaped layers are drawn by NumPy, and a network is the same to the last bit in every ensemble.

    Arguments:
        layer: the architecture, with its parameters; repeated `depth` times with fresh weights.
        V0: covariance of the initial tokens, shape (m, m); every network starts at exactly this V0, with random token
            directions of its own.
        width: n; at least m with weights; at least 2m with the chain, or 2mH for H attention heads without an output
            projection.
        depth: d ≥ 1, the number of layers.
        networks: number of networks.
        observe_every: k, to record layers 0, k, 2k, … only.
        method: "chain" draws O(m² n) numbers per layer; "weights" draws the n × n matrices and applies them. Both have
            the same law. The state of the chain is V instead of X: in float32 it treats V as singular if an eigenvalue
            is below 10⁻⁶ of its diagonal. Where None, the chain if the layer has `forward_covariance`.
        first_network: number of the first network, to draw an ensemble in several parts with one key, by the chain.
        progress: whether a line on a terminal or in a notebook says what is done, after two seconds.
        key: PRNG key; its words seed NumPy's Philox for the chain of shaped layers.

    Returns:
        The Dataset of `covariance_dataset`, in V0's floating-point type, with the truth in its attributes.

    Raises:
        InputError: for a V0 that is not a covariance, sizes that are not positive, or a network whose covariance
            overflows.
    """
    at_least_one(width=width, depth=depth, networks=networks, observe_every=observe_every)
    if method is None:
        method = "chain" if layer.has_chain else "weights"
    if method not in ("chain", "weights"):
        raise InputError(f"method: must be 'chain' or 'weights', got {method!r}")
    if first_network and method != "chain":
        raise InputError("first_network: an ensemble is drawn in parts by the chain only")
    if observe_every > depth:
        raise InputError(f"observe_every: must not exceed the depth {depth}, got {observe_every}")
    V0 = validate_covariance(V0)
    V0 = V0.astype(jax.dtypes.canonicalize_dtype(V0.dtype))
    layer = check_parameters(layer)
    sizes: dict[str, Any] = {"width": width, "observe_every": observe_every, "observed": depth // observe_every}
    phase("sampling networks")
    with ProgressBar(total=networks, desc="networks", show=progress) as bar:
        if method == "chain":
            check_chain_width(layer, tokens=len(V0), width=width)
            starts = np.broadcast_to(V0, (networks, *V0.shape))
            covariance = sample_chains(layer, starts, **sizes, first=first_network, done=bar.update, key=key)
        else:
            covariance = _sample_weights(layer, V0, networks, **sizes, done=bar.update, key=key)
    data = covariance_dataset(
        covariance,
        width=width,
        layers=observe_every * np.arange(sizes["observed"] + 1),
        architecture=layer if is_named(layer) else None,
        truth={name: float(value) for name, value in layer.parameters().items()},
    )
    return data.assign_coords(network=first_network + data["network"].values) if first_network else data


def sample_chains(
    layer: AbstractLayer,
    V0: Float[np.ndarray, "networks m m"],
    *,
    width: int,
    observed: int,
    observe_every: int = 1,
    first: int = 0,
    shared: bool = True,
    done: Callable[[int], object] = lambda count: None,
    key: PRNGKeyArray,
) -> Float[np.ndarray, "networks layers m m"]:
    """Draw the covariances of networks by the chain, in threads.

    Unless the networks share its parameters, these are arrays with one value a network, and the layer is `on_host`.
    """
    networks, tokens = V0.shape[:2]
    layer = jax.tree.map(lambda value: np.asarray(value, V0.dtype), layer)
    if layer.on_host:
        sizes = {"width": width, "observed": observed, "observe_every": observe_every}
        return _on_host(layer, V0, **sizes, first=first, shared=shared, done=done, key=key)
    room = padded_size(observed, least=16)
    batch = chains_at_once(networks, tokens, layer.column_blocks, room)
    sizes = {"width": np.int32(width), "observed": np.int32(observed), "observe_every": np.int32(observe_every)}
    covariance = np.empty((networks, observed + 1, tokens, tokens), V0.dtype)

    def draw(start: int) -> int:
        number = np.arange(start, start + batch)
        members = number[number < networks]
        starts, numbers = V0[np.minimum(number, networks - 1)], (first + number).astype(np.uint32)
        drawn = _chain_batch(layer, starts, numbers, key, **sizes, room=room)
        covariance[members] = np.asarray(drawn)[: len(members), : observed + 1]
        return len(members)

    in_threads(draw, range(0, networks, batch), done=done)
    return covariance


def _on_host(layer, V0, *, first, shared, done, key, **sizes) -> Float[np.ndarray, "networks layers m m"]:
    """The chains of groups of networks, by NumPy."""
    words, last = tuple(map(int, np.ravel(jr.key_data(key)))), first + len(V0)
    covariance = np.empty((len(V0), sizes["observed"] + 1, *V0.shape[1:]), V0.dtype)

    def draw(group: int) -> int:
        start, stop = max(first, group * GROUP), min(last, (group + 1) * GROUP)
        streams = NetworkStreams(words, group, range(start - group * GROUP, stop - group * GROUP))
        members = slice(start - first, stop - first)
        theirs = layer if shared else jax.tree.map(operator.itemgetter(members), layer)
        with np.errstate(all="ignore"):  # what overflows is refused with its place
            covariance[members] = host_chain(theirs, V0[members], **sizes, streams=streams)
        return stop - start

    in_threads(draw, range(first // GROUP, -(-last // GROUP)), alone=0, done=done)
    return covariance


def chains_at_once(networks: int, tokens: int, blocks: int, room: int) -> int:
    """How many of so many networks a program of the chain draws at once, with room for some observed layers."""
    drawn, returned = tokens * blocks * max(COLUMNS_AT_ONCE, tokens), tokens**2 * (room + 1)
    # An accelerator is fastest with all networks at once.
    wanted = BATCH_NETWORKS if on_cpu() else 1 << (networks - 1).bit_length()
    return max(1, min(wanted, 2**24 // max(drawn, returned)))


@functools.partial(jax.jit, static_argnames="room")
def _chain_batch(layer, V0, numbers, key, *, width, observe_every, observed, room):
    sizes = {"width": width, "layers": observed * observe_every, "observe_every": observe_every, "room": room}
    return covariance_chain(layer, V0, **sizes, keys=NetworkKeys.numbered(key, numbers))


def _sample_weights(layer, V0, networks, *, width, observed, observe_every, done, key) -> np.ndarray:
    covariance = np.empty((networks, observed + 1, *V0.shape), V0.dtype)
    sizes = {"width": width, "observe_every": observe_every, "observed": observed}
    for batch, keys, fresh in batches(networks, ENTRIES_AT_ONCE // width**2, key):
        covariance[batch] = np.asarray(weights_batch(layer, V0, keys, **sizes))[fresh]
        done(batch.stop - batch.start)
    return covariance


def batches(networks: int, largest: int, key: PRNGKeyArray) -> Iterator[tuple[slice, Array, slice]]:
    """Batches of networks of equal size, so that one shape is compiled: few, and then small."""
    size, keys = math.ceil(networks / math.ceil(networks / max(1, largest))), jr.split(key, networks)
    for start in range(0, networks, size):
        first = min(start, networks - size)
        yield slice(start, first + size), keys[first : first + size], slice(start - first, None)


@eqx.filter_jit
def weights_batch(layer, V0, keys, D0=None, *, width, observe_every, observed):
    """V of networks with their weights; with D0, the joint covariance of tokens and of tangents that start with D0."""
    layer = jax.tree.map(lambda value: jnp.asarray(value, V0.dtype), layer)

    def network(key):
        key_tokens, key_layers = jr.split(key)

        def one_layer(number, state):
            current_layer = layer.at(layer_time(number, width, V0.dtype))
            forward = functools.partial(current_layer.forward, key=jr.fold_in(key_layers, number))
            return (forward(state[0]),) if D0 is None else jax.jvp(forward, state[:1], state[1:])

        def block(state, number):
            state = jax.lax.fori_loop(number * observe_every, (number + 1) * observe_every, one_layer, state)
            return state, covariance_of(jnp.concatenate(state))

        if D0 is None:
            start = (tokens_with_covariance(V0, width=width, key=key_tokens),)
        else:
            # Tokens and tangents are orthogonal, in random directions.
            rows = tokens_with_covariance(jnp.eye(2 * len(V0), dtype=V0.dtype), width=width, key=key_tokens)
            start = factor(V0) @ rows[: len(V0)], factor(D0) @ rows[len(V0) :]
        _, V = jax.lax.scan(block, start, jnp.arange(observed))
        return jnp.concatenate([covariance_of(jnp.concatenate(start))[None], V])

    return jax.vmap(network)(keys)


def covariance_of(X: Float[Array, "rows n"]) -> Float[Array, "rows rows"]:
    """V = XXᵀ/n, symmetric to the last bit."""
    V = X @ X.T / X.shape[1]
    return (V + V.T) / 2


def sample_layer(
    layer: AbstractLayer,
    V: Float[np.ndarray, "networks m m"],
    *,
    width: Float[np.ndarray, " networks"],
    key: PRNGKeyArray,
) -> Float[np.ndarray, "networks m m"] | None:
    """Draw the covariances of networks after one exact layer; None if the chain cannot sample them."""
    if not layer.has_chain:
        return None
    starts = V.astype(jnp.result_type(float))
    ends = np.empty_like(starts)
    for n in np.unique(width):
        members = np.flatnonzero(width == n)
        try:
            check_chain_width(layer, tokens=V.shape[-1], width=int(n))
        except InputError:
            return None
        width_key = jr.fold_in(key, np.uint32(n))
        ends[members] = sample_chains(layer, starts[members], width=int(n), observed=1, key=width_key)[:, 1]
    return ends


@checked
def sample_outputs(data: xr.Dataset, *, outputs: int, key: PRNGKeyArray) -> xr.Dataset:
    """Draw outputs of observed networks: X_out = X W_out with N(0, 1/n) weights is N(0, V_T ⊗ I_q) given V_T (Eq. 21).

    Arguments:
        data: networks observed from layer 0 on; the outputs follow their last observed layer.
        outputs: q, number of outputs per network.
        key: PRNG key.

    Returns:
        The Dataset of `observe_outputs`, with the networks' architecture and truth.

    Raises:
        InputError: for invalid data, data that do not start at layer 0, and fewer than one output.
    """
    data = validate(data)
    at_least_one(outputs=outputs)
    layers = data["layer"].values
    if layers[0] != 0:
        raise InputError(f"layer: the initial covariance, of layer 0, is needed; the first layer is {layers[0]:g}")
    V = data["covariance"].values.astype(np.float64)
    normals = np.asarray(jr.normal(key, (*V.shape[:1], V.shape[-1], outputs)), np.float64)
    values, vectors = np.linalg.eigh(V[:, -1])
    root = vectors * np.sqrt(np.maximum(values, 0.0))[:, None]
    return observe_outputs(
        root @ normals,
        V[:, 0],
        width=data["width"].values,
        depth=int(layers[-1]),
        architecture=architecture_in(data.attrs),
        truth=truth_of(data.attrs),
    )
