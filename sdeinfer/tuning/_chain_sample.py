"""Statistics of exact chains and their derivatives along some directions, block by block, on common random numbers."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from sdeinfer._threads import in_threads
from sdeinfer.criteria import AbstractStatistic, Ensemble, evaluate
from sdeinfer.layers import AbstractLayer, NetworkKeys
from sdeinfer.networks import chains_at_once, covariance_chain
from sdeinfer.tuning._ensemble import Sample


def sample_chain_statistics(
    statistics: Sequence[AbstractStatistic],
    layer: AbstractLayer,
    V0: Float[np.ndarray, "m m"],
    *,
    width: int,
    depth: int,
    networks: int,
    slopes: AbstractLayer | None = None,
    key: PRNGKeyArray,
) -> Sample:
    """Draw networks by `covariance_chain` and evaluate statistics, in memory that does not grow with their number.

    A network depends only on its number, the key, and whether `slopes` are wanted. Its random numbers do not depend on
    the layer's parameters: statistics are functions of these, with slopes smooth wherever every V is definite. Where V
    is singular, as with equal tokens, they are smooth along directions that keep it so.

    Arguments:
        statistics: the statistics.
        layer: the layer.
        V0: covariance at layer 0.
        width: n.
        depth: d.
        networks: number of networks.
        slopes: derivatives of the layer's parameters: a layer whose arrays have a leading axis of directions; None for
            statistics alone.
        key: PRNG key.
    """
    every = any(each.every_step for each in statistics)
    layer, slopes = (jax.tree.map(lambda x: np.asarray(x, V0.dtype), each) for each in (layer, slopes))
    directions = 0 if slopes is None else len(jax.tree.leaves(slopes)[0])
    values = np.empty((len(statistics), networks), V0.dtype)
    along = np.empty((len(statistics), directions, networks), V0.dtype)
    exploded = np.empty(networks, bool)
    room, tokens = depth if every else 1, len(V0)
    batch = chains_at_once(networks, tokens, layer.column_blocks, room)

    def draw(number: int) -> None:
        members = np.arange(number * batch, (number + 1) * batch)
        chosen = members[members < networks]
        found = _block(
            tuple(statistics), layer, slopes, V0, members.astype(np.uint32), key,
            width=np.int32(width), depth=np.int32(depth), room=room,
        )  # fmt: skip
        values[:, chosen], along[:, :, chosen], exploded[chosen] = (np.asarray(x)[..., : len(chosen)] for x in found)

    in_threads(draw, range(-(-networks // batch)))
    return Sample(values, along, exploded)


@functools.partial(jax.jit, static_argnums=0, static_argnames="room")
def _block(statistics, layer, slopes, V0, numbers, key, *, width, depth, room):
    """Values of the statistics of one block of networks, their derivatives, and whether networks exploded."""
    keys = NetworkKeys.numbered(key, numbers)
    every = any(each.every_step for each in statistics)
    sizes = {"width": width, "layers": depth, "observe_every": 1 if every else depth, "room": room, "keys": keys}

    def values(layer: AbstractLayer) -> tuple[Array, Bool[Array, " networks"]]:
        V = covariance_chain(layer, V0, **sizes)[:, 1:]
        exploded = ~jnp.isfinite(V).all(axis=(1, 2, 3))
        paths = Ensemble(V0, jnp.where(exploded[:, None, None, None], V0, V), None, exploded)
        return evaluate(statistics, paths), exploded

    if slopes is None:
        found, exploded = values(layer)
        return found, jnp.zeros((len(statistics), 0, len(numbers)), found.dtype), exploded

    def along(direction: Any) -> tuple[Array, Array, Array]:
        return jax.jvp(values, (layer,), (direction,), has_aux=True)

    return jax.vmap(along, out_axes=(None, 1, None))(slopes)
