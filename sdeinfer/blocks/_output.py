"""The density of V′ after one block, for covariances of the residual stream."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from sdeinfer._files import InputError
from sdeinfer.blocks._block import Block
from sdeinfer.blocks._law import LogMatrixNormal, output_moments
from sdeinfer.blocks._logarithm import log_moments
from sdeinfer.blocks._moments import MatrixMoments, fourth_moments
from sdeinfer.blocks._norms import normalised_covariance


def output_law(
    block: Block, V: Float[Array, "m m"], after: Float[Array, "m m"], nodes: object, *, width: Int[Array, ""] | int
) -> LogMatrixNormal:
    """The law of V′ = X′X′ᵀ/n after one block, at an observed V′, given V = XXᵀ/n before it.

    Given S, V′ has the mean M_S = α²V + g²S. Its logarithm about M = α²V + g²K is that of M_S, whose moments are the
    branch's `hidden_logarithm`, plus what the n columns of the increment add to M_S, to leading order in 1/n. Both are
    small for weak branches and those of `increment_law` for α = 0. Differentiable in V, V′ and the block's parameters.

    LayerNorm takes the means of tokens over features as 0: an error of order 1/n in what the branch reads.

    Arguments:
        block: one Pre-LN block without dropout, not the blocks of a whole layer.
        V: the covariance of the residual stream before the block, definite.
        after: V′, definite.
        nodes: those of `nodes_of`.
        width: n.

    Raises:
        InputError: for Post-LN, where V′ is seen after a norm, and for dropout.
    """
    if block.position == "post":
        raise InputError("position: V′ after a Post-LN block is normalised and has no density: observe increments")
    block.require_no_dropout("the density of V′ has none: observe networks in evaluation mode")
    read, squared = normalised_covariance(V, block.norm), jnp.square(block.strength)
    hidden = block.branch.moments(read, nodes, width=width)
    # In units of g², as K is: what S is added to.
    bias = block.bias / squared
    base = bias + jnp.square(block.skip) * V / squared
    of_mean = block.branch.hidden_logarithm(read, hidden, nodes, bias=base, width=width)
    K = hidden.mean + bias
    at_K = MatrixMoments(K, fourth_moments(K[None]) / width)
    given_mean = output_moments(V, at_K, strength=block.strength, skip=block.skip, width=width)
    of_columns = log_moments(given_mean.mean, given_mean.covariance)
    both = of_columns._replace(
        mean=of_mean.mean + of_columns.mean, covariance=of_mean.covariance + of_columns.covariance
    )
    return LogMatrixNormal.about(after, given_mean.mean, both)
