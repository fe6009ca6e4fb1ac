"""Mean and covariance of V over depth, to leading order in 1/n."""

from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from sdeinfer._arguments import at_least_one, checked
from sdeinfer.blocks._block import Block
from sdeinfer.blocks._coefficients import nodes_of
from sdeinfer.blocks._law import increment_moments, output_moments
from sdeinfer.blocks._norms import normalised_covariance
from sdeinfer.blocks._order import BlockOrder
from sdeinfer.covariance import unvech, validate_covariance, vech
from sdeinfer.layers import AbstractLayer, layer_time


class MomentsOverDepth(NamedTuple):
    """Mean and covariance of V after each layer.

    Attributes:
        mean: shape (layers, m, m); layer 0 is V0.
        covariance: covariance of the entries on and above the diagonal, shape (layers, p, p).
    """

    mean: Float[Array, "layers m m"]
    covariance: Float[Array, "layers p p"]


@checked
def moments_over_depth(
    layer: AbstractLayer, V0: Float[Array | np.ndarray, "m m"], *, width: int, depth: int, log2: int | None = None
) -> MomentsOverDepth:
    """Mean and covariance of V over depth, to leading order in 1/n: no networks are sampled.

    The mean obeys V ↦ α²V + g²K(V̂) in each block. With g² of order 1/L this is an ordinary differential equation in
    ℓ/L, and one layer is one step of Euler's method. The covariance, of order 1/n, is carried along by the derivative
    of this map, and each block adds that of `output_moments`. Differentiable in the layer's parameters.

    Arguments:
        layer: a `Block`, a `Stack` of blocks, or `OverDepth` of one of them.
        V0: covariance of the initial tokens, definite.
        width: n.
        depth: number of layers.
        log2: logarithm of the number of nodes; None for those of a fit.

    Raises:
        InputError: for a layer that is not of blocks, a V0 that is no covariance, and sizes that are not positive.
    """
    at_least_one(width=width, depth=depth)
    V0 = jnp.asarray(validate_covariance(V0))
    blocks = BlockOrder.of_network(layer, tokens=len(V0), width=width, depth=1).blocks
    nodes = [nodes_of(block, len(V0), width, log2=log2) for block in blocks]
    return _over_depth(layer, V0, nodes, width, depth)


@eqx.filter_jit
def _over_depth(layer, V0, nodes, width, depth):
    def one_layer(state, number):
        blocks = BlockOrder.of(layer.at(layer_time(number, width, V0.dtype)), depth=1).blocks
        for block, own in zip(blocks, nodes, strict=True):
            state = _after(block, *state, own, width)
        return state, state

    start = (vech(V0), jnp.zeros((vech(V0).size,) * 2, V0.dtype))
    _, (means, covariances) = jax.lax.scan(one_layer, start, jnp.arange(depth))
    mean = jnp.concatenate([start[0][None], means])
    return MomentsOverDepth(unvech(mean), jnp.concatenate([start[1][None], covariances]))


def _after(
    block: Block, v: Float[Array, " p"], covariance: Float[Array, "p p"], nodes: object, width: int
) -> tuple[Float[Array, " p"], Float[Array, "p p"]]:
    """Mean and covariance after a block, from those before."""

    def moments(v):
        V = unvech(v)
        read = normalised_covariance(V, block.norm) if block.position == "pre" else V
        hidden = block.branch.moments(read, nodes, width=width)
        hidden = hidden._replace(mean=hidden.mean + block.bias / jnp.square(block.strength))
        increment = increment_moments(hidden, width=width, dropout=block.dropout)
        out = output_moments(V, increment, strength=block.strength, skip=block.skip, width=width)
        return vech(out.mean), (vech(out.mean), out.covariance)

    slope, (v, own) = jax.jacfwd(moments, has_aux=True)(v)
    covariance = slope @ covariance @ slope.T + own
    if block.position == "pre":
        return v, covariance

    def norm(v):
        return vech(normalised_covariance(unvech(v), block.norm))

    slope = jax.jacfwd(norm)(v)
    return norm(v), slope @ covariance @ slope.T
