"""The interface of a branch, what a residual block computes before its last linear map; its parameters and nodes.

Tests: `tests/blocks/test_law.py`.
"""

import abc
import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float, Int, PRNGKeyArray
from scipy.interpolate import CubicSpline
from scipy.special import gammaincinv, ndtr, ndtri

from sdeinfer._arguments import shown
from sdeinfer._files import InputError
from sdeinfer.blocks._law import LogMoments, MatrixMoments, log_moments, sampled_log_moments
from sdeinfer.layers._keys import NetworkKeys
from sdeinfer.parameters import Parameter, distributions

GAIN = Parameter("gain", "w", "gain n σ² of the first projections", "log", lambda: distributions().LogNormal(0.0, 1.0))


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
        """Draws of S, for a branch whose S is a mean of few parts; None if the leading order in Cov(S) is enough."""
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
        """Moments of the logarithm of S + b about its mean: by `hidden_draws`, or to leading order in Cov(S)."""
        draws = self.hidden_draws(V, nodes, width=width)
        if draws is None:
            return log_moments(hidden.mean + bias, hidden.covariance)
        return sampled_log_moments(hidden.mean + bias, draws + bias)

    def check_width(self, width: int) -> None:
        """Raise an InputError for a width that the branch does not support; none for sizes that are no fractions."""
        del width

    def alternatives(self, width: int) -> "dict[str, AbstractBranch]":
        """Branches that a network may have by mistake in place of this one, by what is other; `check` compares them."""
        del width
        return {}

    def with_changes(self, changes: Mapping[str, Mapping[str, Any]]) -> "dict[str, AbstractBranch]":
        """The branch with other values of some fields, for each of the keys of `changes` that changes anything."""
        return {
            words: dataclasses.replace(self, **fields)
            for words, fields in changes.items()
            if any(getattr(self, name) != value for name, value in fields.items())
        }

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


MOST_DIMENSIONS = 16_384
"""Dimensions beyond which nodes are random: SciPy's Sobol sequence ends at 21,201."""


def split_nodes(
    dimensions: Sequence[int], log2: int, seed: int, rng: np.random.Generator
) -> list[Float[np.ndarray, "nodes dimension"]]:
    """Uniform numbers of 2^`log2` nodes in several parts, quasi-random unless they are of too many dimensions."""
    dimension = int(sum(dimensions))
    if dimension > MOST_DIMENSIONS:
        uniforms = rng.random((2**log2, dimension))
    else:
        uniforms = uniform_nodes(dimension, log2, seed)
    return np.split(uniforms, np.cumsum(dimensions)[:-1], axis=1)


@functools.lru_cache(maxsize=4)
def uniform_nodes(dimension: int, log2: int, seed: int = 0) -> Float[np.ndarray, "nodes dimension"]:
    """2^`log2` points of a scrambled Sobol sequence in the open unit cube, read-only."""
    from scipy.stats import qmc  # noqa: PLC0415 half a second

    points = qmc.Sobol(dimension, scramble=True, rng=np.random.default_rng([seed, dimension])).random_base2(log2)
    # A coordinate of 0 has probability 2⁻³⁰.
    points = np.clip(points, 2.0**-31, 1 - 2.0**-31)
    points.setflags(write=False)
    return points


def wishart_factors(
    uniforms: Float[np.ndarray, "nodes p"], tokens: int, freedom: int
) -> Float[np.ndarray, "nodes m m"]:
    """Bartlett's factors of Wishart matrices from uniform numbers; see `layers.wishart_factor`."""
    B = np.zeros((len(uniforms), tokens, tokens))
    a, b = np.tril_indices(tokens, -1)
    B[:, a, b] = ndtri(uniforms[:, tokens:])
    for k in range(min(tokens, freedom)):
        B[:, k, k] = _chi_quantile(freedom - k)(ndtri(uniforms[:, k]))
    B[:, :, freedom:] = 0.0
    return B


@functools.lru_cache(maxsize=256)
def _chi_quantile(freedom: int) -> CubicSpline:
    """The quantile of a chi variable at that of a normal variable; to 1e-7, in a seventh of SciPy's time."""
    z = np.linspace(-6.5, 6.5, 521)
    # A chi-square variable of ν degrees of freedom is twice a gamma variable of ν/2.
    return CubicSpline(z, np.sqrt(2 * gammaincinv(freedom / 2, ndtr(z))))
