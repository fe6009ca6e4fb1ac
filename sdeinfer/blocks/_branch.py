"""The interface of a branch: what a residual block computes before its last linear map."""

import abc
import dataclasses
from typing import Any, ClassVar

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float, Int, PRNGKeyArray

from sdeinfer._arguments import shown
from sdeinfer._files import InputError
from sdeinfer.blocks._logarithm import LogMoments, log_moments, sampled_log_moments
from sdeinfer.blocks._moments import MatrixMoments
from sdeinfer.layers import NetworkKeys
from sdeinfer.parameters import Parameter


class AbstractBranch(eqx.Module):
    """The hidden features h (m × u) of a residual branch with Gaussian weights, given what it reads, U (m × n).

    Their Gram matrix S = hhᵀ/u is all that the rest of the network depends on: the branch adds Δ = g hW/√u with W of
    independent N(0, 1), so that given U and h the n columns of Δ are independent N(0, g² S).

    S is a mean of independent parts, whose law depends on U through G = w UUᵀ/n + b, the covariance of the first
    projections; w is the gain and b the variance of their biases.

    Attributes:
        kind: name of the kind in Datasets and of the branch's parameters.
        shape: the parameter that the data identify beside the strength where the branch is far from linear.
    """

    kind: ClassVar[str]
    shape: ClassVar[Parameter]

    @abc.abstractmethod
    def hidden(self, U: Float[Array, "m n"], *, key: PRNGKeyArray) -> Float[Array, "m u"]:
        """Draw weights and compute h."""

    @abc.abstractmethod
    def hidden_covariance(
        self, V: Float[Array, "m m 1 networks"], *, width: Int[Array, ""] | int, keys: NetworkKeys
    ) -> Float[Array, "m m 1 networks"]:
        """Draw S for many networks without drawing weights, given V = UUᵀ/n."""

    @property
    def log2_nodes(self) -> int:
        """Logarithm of the number of nodes of a fit, which give a mean increment to 2 % of its standard deviation."""
        return 12

    @abc.abstractmethod
    def nodes(self, tokens: int, width: int, *, log2: int, seed: int = 0) -> Any:
        """Random numbers of 2^`log2` parts, for `moments`; the same for all covariances and parameters."""

    @abc.abstractmethod
    def moments(self, V: Float[Array, "m m"], nodes: Any, *, width: Int[Array, ""] | int) -> MatrixMoments:
        """Mean and covariance of S given V = UUᵀ/n; differentiable in V and in the branch's parameters."""

    def hidden_draws(
        self, V: Float[Array, "m m"], nodes: Any, *, width: Int[Array, ""] | int
    ) -> Float[Array, "nodes m m"] | None:
        """Draws of S, for a branch whose S is a mean of few parts; None if the leading order in C is enough.

        Arguments:
            V: UUᵀ/n.
            nodes: those of `nodes`.
            width: n.
        """
        del V, nodes, width
        return None

    def hidden_logarithm(
        self,
        V: Float[Array, "m m"],
        hidden: MatrixMoments,
        nodes: Any,
        *,
        bias: ArrayLike,
        width: Int[Array, ""] | int,
    ) -> LogMoments:
        """Moments of the logarithm of S + b about its mean: by `hidden_draws`, or to leading order in C.

        Arguments:
            V: UUᵀ/n.
            hidden: the result of `moments`.
            nodes: those of `nodes`.
            bias: b, the variance of the biases of the last map over g².
            width: n.
        """
        draws = self.hidden_draws(V, nodes, width=width)
        if draws is None:
            return log_moments(hidden.mean + bias, hidden.covariance)
        return sampled_log_moments(hidden.mean + bias, draws + bias)

    @abc.abstractmethod
    def check_width(self, width: int) -> None:
        """Raise an InputError for a width that the branch does not support."""

    def declared(self) -> dict[str, Parameter]:
        """The branch's parameters by name."""
        return {self.shape.name: self.shape}

    def reshaped(self, factor: ArrayLike) -> "AbstractBranch":
        """The branch with its parameter `shape` multiplied by a factor."""
        return dataclasses.replace(self, **{self.shape.name: factor * getattr(self, self.shape.name)})


def projected(V: Float[Array, "m m *networks"], gain: ArrayLike, bias: float) -> Float[Array, "m m *networks"]:
    """G = w V + b, the covariance of projections with biases."""
    return jnp.asarray(gain) * V + bias


def projection(
    U: Float[Array, "m n"], W: Float[Array, "n u"], offset: Float[Array, " u"], gain: ArrayLike, bias: float
) -> Float[Array, "m u"]:
    """√(w/n) U W + √b (bias normals)."""
    return U @ W * jnp.sqrt(gain / U.shape[1]) + jnp.sqrt(bias) * offset


def check_bias(bias: float) -> None:
    """Raise an InputError for a negative variance."""
    if not (isinstance(bias, int | float) and 0 <= bias < np.inf):
        raise InputError(f"bias: the variance of the biases must not be negative, got {shown(bias)}")
