"""The Markov chain that the covariance of a finite network is, without the network."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from sdeinfer._files import InputError
from sdeinfer.covariance import gram, matmul, transpose
from sdeinfer.layers import AbstractLayer
from sdeinfer.layers._keys import NetworkKeys
from sdeinfer.layers._wishart import whole, wishart_draws, wishart_factor, with_gram


def covariance_chain(
    layer: AbstractLayer,
    V0: Float[Array, "*networks m m"],
    *,
    width: Int[Array, ""] | int,
    layers: Int[Array, ""] | int,
    observe_every: Int[Array, ""] | int = 1,
    room: int | None = None,
    keys: NetworkKeys,
) -> Float[Array, "networks observed m m"]:
    """Draw the covariances of many finite networks side by side, from exactly the law that their weights give them.

    By rotation invariance V_{ℓ+1} depends on X_ℓ through V_ℓ alone, or through the covariances of each head's columns:
    a layer costs O(m² n) random numbers and operations, O(m³) if it is attention, instead of O(m n²). To be called
    under `jax.jit`; all but the room may be traced.

    Arguments:
        layer: the architecture, with its parameters in V0's type.
        V0: covariance of the initial tokens, shape (m, m), or (networks, m, m) if each network has its own; possibly
            singular. The tokens' directions are uniformly random.
        width: n, one that `check_chain_width` has seen.
        layers: how many; of these the last that `observe_every` does not divide are left out.
        observe_every: k, to return layers 0, k, 2k, … only.
        room: how many of them to have room for beside layer 0; ⌊layers/k⌋ where None, for known `layers`.
        keys: one for each network.

    Returns:
        V, of shape (networks, 1 + room, m, m), zero where there are no layers left.
    """
    key_start, key_layers = keys.split(2)
    networks = keys.high.shape[0]

    def one_layer(number, V):
        return layer.forward_covariance(V, width=width, keys=key_layers.fold_in(number))

    def observed(number, state):
        V, path = state
        V = jax.lax.fori_loop(number * observe_every, (number + 1) * observe_every, one_layer, V)
        seen = whole(V)[:, :, 0]
        return V, path.at[number].set((seen + transpose(seen)) / 2)

    V0 = jnp.broadcast_to(V0, (networks, *V0.shape[-2:]))
    V = _initial_blocks(jnp.moveaxis(V0, 0, -1)[:, :, None], layer.column_blocks, width, key_start)
    count = layers // observe_every
    path = jnp.zeros((int(count) if room is None else room, *V.shape[:2], networks), V.dtype)
    _, path = jax.lax.fori_loop(0, count, observed, (V, path))
    return jnp.concatenate([V0[:, None], jnp.moveaxis(path, -1, 0)], axis=1)


def check_chain_width(layer: AbstractLayer, *, tokens: int, width: int) -> None:
    """Refuse a width for which the chain has no law: see `covariance_chain`."""
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
    V: Float[Array, "m m 1 networks"], blocks: int, width: Int[Array, ""] | int, keys: NetworkKeys
) -> Float[Array, "m m blocks networks"]:
    """X_b X_bᵀ/n of each block of columns of uniformly random tokens X with X Xᵀ/n = V."""
    if blocks == 1:
        return V
    columns = width // blocks
    drawn = wishart_draws([columns], tokens=len(V), blocks=blocks, dtype=V.dtype, keys=keys)
    G = wishart_factor(columns, drawn.normals[0], drawn.chi[0]) / jnp.sqrt(jnp.asarray(width, V.dtype))
    return gram(matmul(with_gram(V, whole(gram(G))), G))
