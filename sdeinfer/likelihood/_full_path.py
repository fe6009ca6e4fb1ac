"""The law of networks observed at every layer."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array, ArrayLike, Float, PRNGKeyArray
from numpyro.distributions import Distribution, constraints

from sdeinfer._files import InputError
from sdeinfer.covariance import reciprocal
from sdeinfer.layers import AbstractLayer, FiniteWidth, Limit, NetworkKeys
from sdeinfer.likelihood._moments import Moments, bounded, moments_of
from sdeinfer.likelihood._statistics import LIMIT_ROWS, QUADRATIC, ROW_GROUPS, PathStatistics
from sdeinfer.networks import covariance_chain

LARGEST_CHANGE = 0.75
"""Bound on the first-order part of a variance, relative to ρ v; parts below half of it are unchanged."""


class FullPath(Distribution):
    """Law of observed covariance paths given their initial covariance, as a density of their sufficient statistics.

    A transition over one layer, dt = 1/n, is Gaussian with independent entries in the spectral coordinates of its
    start, with the drift and the diffusion of Corollary 4.3, or with the means and variances of a layer of width n
    (`FiniteWidth`). The variance of a finite-width layer is v + Δ, where v is a function of e and Δ is not. Δ enters to
    first order about the reference of the statistics (see `_statistics`): Δ/v = ρ − 1 + (Δ/v − (ρ − 1)), where the
    bracket is O(1/n) and zero at the reference. In the tails of the prior, where the bracket is not small, it is
    bounded by `LARGEST_CHANGE` times ρ. The terms that depend on the parameters are divided by the dispersion of the
    path's `Adjustment`.

    One batch element is one network; its log density is that of the covariances V_αβ, α ≤ β, after every layer but the
    first.

    Attributes:
        law: coefficients of the SDE, for statistics without a reference, or of one layer. The latter have a leading
            axis of the path's `widths`; the former may have one.
        path: statistics of the data.
    """

    arg_constraints: dict[str, Any] = {}
    pytree_data_fields = ("law", "path")
    support = constraints.independent(constraints.real, 3)  # pyright: ignore[reportAssignmentType, reportIncompatibleMethodOverride]

    def __init__(self, law: Limit | FiniteWidth, path: PathStatistics, *, validate_args: bool | None = None):
        if isinstance(law, Limit) and path.adjustment is not None:
            raise ValueError("path: these statistics were made for a law of finite width, not for the limit")
        self.law = law
        self.path = path
        super().__init__((path.networks,), path.weights.shape[1:], validate_args=validate_args)

    def log_prob(self, value: ArrayLike, intermediates: list | None = None) -> Float[Array, " networks"]:
        """Log density of each network; `value` holds `PathStatistics.weights`."""
        del intermediates
        path, law, weights = self.path, self.law, jnp.asarray(value)
        mask = (law if isinstance(law, Limit) else law.limit).causal
        if mask != path.causal:
            raise ValueError(
                f"path: these statistics were made for attention {'with' if path.causal else 'without'} mask"
            )
        few = path.networks == len(path.widths)
        if isinstance(law, Limit):
            weights = weights[:, :LIMIT_ROWS]
            if law.linear_noise.ndim == 0:
                return path.constant - weights.reshape(path.networks, -1) @ limit_kernel(law, path).reshape(-1) / 2
            kernel = jax.vmap(limit_kernel, (0, None))(law, path)
            twice = jnp.sum(weights * kernel[path.width], axis=(1, 2, 3)) if few else _by_width(weights, kernel, path)
            return path.constant - twice / 2
        moments = jax.vmap(lambda law: moments_of(law, path.centre))(law)
        if few:
            own, reference = jax.tree.map(lambda x: x[path.width], (moments, path.reference))
            twice = jax.vmap(contracted, (0, 0, None, 0))(own, reference, path, weights)
        else:
            twice = _by_width(weights, jax.vmap(finite_width_kernel, (0, 0, None))(moments, path.reference, path), path)
        dispersion = jnp.ones(()) if path.adjustment is None else path.adjustment.dispersion
        return path.constant - twice / (2 * jnp.broadcast_to(dispersion, path.widths.shape)[path.width])


class CovariancePath(FullPath):
    """Law of observed covariance paths of networks of a layer, given their initial covariance.

    The path's assumptions choose the law: one layer at each network's width to the next order in 1/n, or the limit.
    The path's `Adjustment` is applied to the layer's parameters.

    Attributes:
        layer: the layer; each parameter is a scalar or has one value per network.
    """

    pytree_data_fields = ("law", "path", "layer")

    def __init__(self, layer: AbstractLayer, path: PathStatistics, *, validate_args: bool | None = None):
        self.layer = layer
        leaves = jax.tree.leaves(layer)
        if any(jnp.ndim(leaf) for leaf in leaves):
            for name, value in layer.parameters().items():
                if jnp.shape(value) not in ((), (path.networks,)):
                    raise InputError(
                        f"{name}: one value, or one for each of {path.networks} networks, is needed; got the shape "
                        f"{jnp.shape(value)}"
                    )
            path = path.by_network()
            layer = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (path.networks,)), layer)
        law = _law_of(layer, path)
        super().__init__(law, path, validate_args=validate_args)

    def sample(self, key: PRNGKeyArray | None, sample_shape: tuple[int, ...] = ()) -> Float[Array, "..."]:
        """Sample networks from their initial covariances by the chain, the exact law of finite networks.

        Returns:
            Covariances of every layer, shape (*sample_shape, networks, 1 + depth, m, m).

        Raises:
            InputError: for a path without initial covariances or a layer without `forward_covariance`.
        """
        path = self.path
        if path.initial is None:
            raise InputError("path: networks are sampled from the data of si.prepare, not from pooled statistics")
        assert key is not None
        layer = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (path.networks,)), self.layer)
        widths = path.widths[path.width]
        if not jnp.issubdtype(jnp.result_type(key), jax.dtypes.prng_key):
            key = jr.wrap_key_data(key)

        def network(layer, V0, width, number, key):
            keys = NetworkKeys.numbered(key, number[None])
            return covariance_chain(layer, V0[None], width=width.astype(int), layers=path.depth, keys=keys)[0]

        def draw(key):
            numbers = jnp.arange(path.networks, dtype=jnp.uint32)
            return jax.vmap(network, (0, 0, 0, 0, None))(layer, path.initial, widths, numbers, key)

        if not sample_shape:
            return draw(key)
        drawn = jax.lax.map(draw, jr.split(key, math.prod(sample_shape)))
        return drawn.reshape(*sample_shape, *drawn.shape[1:])


def _law_of(layer: AbstractLayer, path: PathStatistics) -> Limit | FiniteWidth:
    """The law of a layer, with a leading axis if the layer, the widths or the adjustments have one."""
    own = any(jnp.ndim(leaf) for leaf in jax.tree.leaves(layer))
    if path.assumptions.law == "limit":
        return jax.vmap(lambda layer: layer.limit())(layer) if own else layer.limit()
    adjustment = path.adjustment
    if adjustment is not None and adjustment.centre.ndim > 1:
        layer = jax.vmap(lambda adjustment, layer: adjustment(layer), (0, 0 if own else None))(adjustment, layer)
        own = True
    elif adjustment is not None:
        layer = jax.vmap(adjustment)(layer) if own else adjustment(layer)
    return jax.vmap(lambda layer, width: layer.finite_width(width), (0 if own else None, 0))(layer, path.widths)


def limit_kernel(law: Limit, path: PathStatistics) -> Float[Array, "rows p nodes"]:
    """Coefficients of the first `LIMIT_ROWS` rows of the statistics in −2 log density: log v and θ_s θ_t/v."""
    variance = law.linear_noise + law.attention_noise * path.nodes
    drift = jnp.stack([law.attention_drift, law.relu_drift])
    return jnp.concatenate([jnp.log(variance)[None], products(drift, LIMIT_ROWS - 1)[:, None, None] / variance])


def finite_width_kernel(moments: Moments, reference: Moments, path: PathStatistics) -> Float[Array, "rows p nodes"]:
    """Coefficients of the rows of the statistics in −2 log density, for one width."""
    variance, shares = _shares(moments, path.nodes)
    square = products(moments.drift, len(QUADRATIC))[:, None, None] / variance
    first = _allowed(moments, reference, path) * jnp.concatenate([shares, -jnp.ones_like(variance)[None]])
    return jnp.concatenate([jnp.log(variance)[None], square, first, -first / variance])


def contracted(
    moments: Moments, reference: Moments, path: PathStatistics, weights: Float[Array, "rows p nodes"]
) -> Float[Array, ""]:
    """`finite_width_kernel` times the statistics of one width; cheaper, since it sums over rows first."""
    own = jnp.stack([moments.variance, moments.variance_mixing])
    allowed = _allowed(moments, reference, path)
    quadratic = products(moments.drift, len(QUADRATIC))
    return _contracted(quadratic, moments.noise, moments.mixing, own, allowed, path.nodes, weights)


@jax.custom_jvp
def _contracted(
    quadratic: Float[Array, " count"],
    noise: Float[Array, " p"],
    mixing: Float[Array, " p"],
    own: Float[Array, "2 features"],
    allowed: Float[Array, "p 1"],
    nodes: Float[Array, "p nodes"],
    weights: Float[Array, "rows p nodes"],
) -> Float[Array, ""]:
    return _value_and_slopes(quadratic, noise, mixing, own, allowed, nodes, weights)[0]


def _value_and_slopes(
    quadratic: Array, noise: Array, mixing: Array, own: Array, allowed: Array, nodes: Array, weights: Array
) -> tuple[Float[Array, ""], tuple[Array, Array, Array, Array, Array]]:
    """The value, and its derivatives in the first five arguments.

    With r = 1/v, S = Σ c b b, the first-order sums L₁ and M₁, and the same sums L₂ and M₂ times y², the value is

        Σ n log v + r (S + A (L₁ + M₂)) − A (M₁ + r² L₂).

    The derivatives are written out because automatic differentiation compiles three times as many kernels.
    """

    def times(rows: Array, matrix: Array) -> Array:
        """The product of a matrix and the rows, at every node."""
        return (matrix @ rows.reshape(len(rows), -1)).reshape(*matrix.shape[:-1], *nodes.shape)

    def against(rows: Array, values: Array) -> Array:
        """The inner product of values and each row over all nodes."""
        return values.reshape(*values.shape[:-2], -1) @ rows.reshape(len(rows), -1).T

    count, square, first, first_square = jnp.split(weights, ROW_GROUPS)
    v = noise[:, None] + mixing[:, None] * nodes
    r = 1 / v
    (L1, L1_mixing), (L2, L2_mixing) = times(first[:-1], own), times(first_square[:-1], own)
    gain, loss = L1 + nodes * L1_mixing + first_square[-1], r * (L2 + nodes * L2_mixing)
    bracket = times(square, quadratic) + allowed * gain
    value = jnp.sum(count[0] * jnp.log(v) + r * (bracket - allowed * loss) - allowed * first[-1])
    of_v = r * (count[0] - r * (bracket - 2 * allowed * loss))
    pull = allowed * r * jnp.stack([jnp.ones_like(nodes), nodes])
    slopes = (
        against(square, r),
        jnp.sum(of_v, axis=1),
        jnp.sum(of_v * nodes, axis=1),
        against(first[:-1], pull) - against(first_square[:-1], pull * r),
        jnp.sum(r * (gain - loss) - first[-1], axis=1, keepdims=True),
    )
    return value, slopes


@functools.partial(_contracted.defjvp, symbolic_zeros=True)
def _contracted_jvp(primals: tuple, tangents: tuple) -> tuple[Array, Array]:
    if not all(isinstance(tangent, SymbolicZero) for tangent in tangents[5:]):
        raise NotImplementedError("FullPath: sufficient statistics have no derivative; those of the law have")
    value, slopes = _value_and_slopes(*primals)
    moved = [(slope, dx) for slope, dx in zip(slopes, tangents[:5], strict=True) if not isinstance(dx, SymbolicZero)]
    return value, sum((jnp.sum(slope * dx) for slope, dx in moved), jnp.zeros_like(value))


def products(drift: Float[Array, " drifts"], count: int) -> Float[Array, " count"]:
    """Coefficients of b_s b_t in (z − Σ_s θ_s b_s)², for the first `count` pairs of `QUADRATIC`."""
    signed = jnp.concatenate([jnp.ones_like(drift[:1]), -drift])
    chosen = np.zeros((count, len(signed), len(signed)))
    for row, (s, t) in enumerate(QUADRATIC[:count]):
        chosen[row, s, t] = 2 - (s == t)
    return jnp.asarray(chosen.reshape(count, -1), signed.dtype) @ jnp.outer(signed, signed).reshape(-1)


def _by_width(
    weights: Float[Array, "networks rows p nodes"], kernel: Float[Array, "widths rows p nodes"], path: PathStatistics
) -> Float[Array, " networks"]:
    """Each network's statistics times the kernel of its width."""
    products = weights.reshape(path.networks, -1) @ kernel.reshape(len(path.widths), -1).T
    return jnp.take_along_axis(products, path.width[:, None], axis=1)[:, 0]


def _allowed(moments: Moments, reference: Moments, path: PathStatistics) -> Float[Array, "p 1"]:
    """Factor that bounds the first-order part, from its largest value at e = 0 and at both ends of the range of e."""
    ends = path.nodes[:, np.array([0, 1, -1])]
    change = jnp.abs(_shares(moments, ends)[1] - _shares(reference, ends)[1])
    largest = jnp.max(jnp.sum(change * path.spread[:, :, None], axis=0), axis=1) / path.least
    return bounded(largest / LARGEST_CHANGE)[:, None]


def _shares(
    moments: Moments, nodes: Float[Array, "p nodes"]
) -> tuple[Float[Array, "p nodes"], Float[Array, "features p nodes"]]:
    """Variance v and c_k = (w_k + w′_k e)/v at the nodes of each pair."""
    variance = moments.common_variance(nodes.T).T
    weight = moments.variance[:, None, None] + moments.variance_mixing[:, None, None] * nodes
    return variance, weight * reciprocal(variance)
