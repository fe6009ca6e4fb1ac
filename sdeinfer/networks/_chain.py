"""The covariance of a finite network as a Markov chain, drawn without the network's weights."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from sdeinfer._files import InputError
from sdeinfer.covariance._batched import gram, matmul, transpose
from sdeinfer.layers import AbstractLayer, Stack
from sdeinfer.layers._keys import NetworkKeys
from sdeinfer.layers._over_depth import layer_time
from sdeinfer.layers._stack import AbstractStack
from sdeinfer.layers._streams import NetworkStreams
from sdeinfer.layers._wishart import Keys, whole, wishart_draws, wishart_factor, with_gram


def covariance_chain(
    layer: AbstractLayer,
    V0: Float[Array, "*networks m m"],
    *,
    width: Int[Array, ""] | int,
    layers: Int[Array, ""] | int,
    observe_every: Int[Array, ""] | int = 1,
    room: int | None = None,
    tangents: bool = False,
    keys: NetworkKeys,
) -> Float[Array, "networks observed m m"]:
    """Draw the covariances of many finite networks at once, from exactly the law that Gaussian weights give them.

    By rotation invariance V_{ℓ+1} depends on X_ℓ only through V_ℓ, or through the covariances of each head's columns:
    a layer costs O(m² n) random numbers and operations, O(m³) for attention, instead of O(m n²). Call this under
    `jax.jit`; every argument but `room` may be traced.

    Arguments:
        layer: the architecture, with its parameters in V0's type.
        V0: covariance of the initial tokens, shape (m, m), or (networks, m, m) if each network has its own; may be
            singular. The tokens' directions are uniformly random.
        width: n, checked by `check_chain_width`.
        layers: number of layers; those after the last multiple of `observe_every` are not drawn.
        observe_every: k, to return layers 0, k, 2k, … only.
        room: number of observed layers to allocate beside layer 0; None allocates ⌊layers/k⌋, for concrete `layers`.
        tangents: whether V0 is the joint covariance [[V, C], [Cᵀ, D]] of tokens and tangents (see `tangents`), for
            a layer that `has_tangents`; the width is then at least 4m.
        keys: one per network.

    Returns:
        V, of shape (networks, 1 + room, m, m), zero after the last observed layer.
    """
    key_start, key_layers = keys.split(2)
    networks = keys.high.shape[0]

    def one_layer(number, V):
        current_layer = layer.at(layer_time(number, width, V.dtype))
        joint = {"tangents": True} if tangents else {}  # a custom layer may know no tangents
        return current_layer.forward_covariance(V, width=width, keys=key_layers.fold_in(number), **joint)

    def observed(number, state):
        V, path = state
        V = jax.lax.fori_loop(number * observe_every, (number + 1) * observe_every, one_layer, V)
        full = whole(V)[:, :, 0]
        return V, path.at[number].set((full + transpose(full)) / 2)

    V0 = jnp.broadcast_to(V0, (networks, *V0.shape[-2:]))
    V = _initial_blocks(jnp.moveaxis(V0, 0, -1)[:, :, None], layer.column_blocks, width, key_start)
    count = layers // observe_every
    path = jnp.zeros((int(count) if room is None else room, *V.shape[:2], networks), V.dtype)
    _, path = jax.lax.fori_loop(0, count, observed, (V, path))
    return jnp.concatenate([V0[:, None], jnp.moveaxis(path, -1, 0)], axis=1)


def host_chain(
    layer: AbstractLayer,
    V0: Float[np.ndarray, "networks m m"],
    *,
    width: int,
    observed: int,
    observe_every: int,
    streams: NetworkStreams,
) -> Float[np.ndarray, "networks observed m m"]:
    """`covariance_chain` by NumPy, for a layer that is `on_host`: nothing is compiled."""
    start, layers = streams.split(2)
    V = _initial_blocks(np.moveaxis(V0, 0, -1)[:, :, None], layer.column_blocks, width, start)
    path = np.empty((len(V0), observed + 1, *V0.shape[1:]), V0.dtype)
    path[:, 0] = V0
    current_layer, parts = None, layer
    for number in range(observed * observe_every):
        before, current_layer = current_layer, layer.at(layer_time(np.int32(number), width, V.dtype))
        if current_layer is not before:
            # The parts of a shaped Transformer are not made again at each depth.
            parts = Stack(current_layer.parts) if isinstance(current_layer, AbstractStack) else current_layer
            parts = jax.tree.map(lambda value: np.asarray(value, V0.dtype), parts)
        V = parts.forward_covariance(V, width=width, keys=layers.fold_in(number))
        if (number + 1) % observe_every == 0:
            full: Any = whole(V)[:, :, 0]
            path[:, (number + 1) // observe_every] = np.moveaxis((full + transpose(full)) / 2, -1, 0)
    return path


def check_chain_width(layer: AbstractLayer, *, tokens: int, width: int) -> None:
    """Raise `InputError` for a width at which the chain is not defined: see `covariance_chain`."""
    blocks = layer.column_blocks
    if width % blocks != 0:
        raise InputError(f"heads: the width {width} is not a multiple of {blocks}")
    if width < 2 * tokens * blocks:
        heads = "" if blocks == 1 else f" in {blocks} heads"
        raise InputError(
            f"width: {tokens} tokens{heads} need a width of at least {2 * tokens * blocks}, got {width}; "
            "method='weights' allows less"
        )
    layer.check_width(width)


def _initial_blocks(
    V: Float[Any, "m m 1 networks"], blocks: int, width: Int[Any, ""] | int, keys: Keys
) -> Float[Any, "m m blocks networks"]:
    """X_b X_bᵀ/n for each block b of columns of uniformly random tokens X with X Xᵀ/n = V."""
    if blocks == 1:
        return V
    columns = width // blocks
    drawn = wishart_draws([columns], tokens=len(V), blocks=blocks, dtype=V.dtype, keys=keys)
    xp = V.__array_namespace__()
    G = wishart_factor(columns, drawn.normals[0], drawn.chi[0]) / xp.sqrt(xp.asarray(width, dtype=V.dtype))
    return gram(matmul(with_gram(V, whole(gram(G))), G))
