"""The log density of a path's sufficient statistics, as their product with functions of the law at the nodes.

The variance of a finite-width layer is v + Δ, where v is a function of e and Δ is not. Δ enters to first order about
the reference of the statistics (see `_statistics`): Δ/v = ρ − 1 + (Δ/v − (ρ − 1)), where the bracket is O(1/n) and zero
at the reference. In the tails of the prior, where the bracket is not small, it is bounded by `LARGEST_CHANGE` times ρ.
"""

import functools
import itertools
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array, Float

from sdeinfer.covariance import reciprocal
from sdeinfer.layers import VARIANCE_FEATURES, FiniteWidth, Limit
from sdeinfer.likelihood._moments import Moments, bounded, moments_of

if TYPE_CHECKING:
    from sdeinfer.likelihood._statistics import PathStatistics

LARGEST_CHANGE = 0.75
"""Bound on the first-order part of a variance, relative to ρ v; parts below half of it are unchanged."""

LIMIT_DRIFTS, DRIFTS, FEATURES = 2, 4, len(VARIANCE_FEATURES)
QUADRATIC = sorted(itertools.combinations_with_replacement(range(1 + DRIFTS), 2), key=lambda st: st[1] > LIMIT_DRIFTS)
"""Pairs (s, t) whose products b_s b_t are summed, with b₀ = z; the pairs of the limit, s, t ≤ 2, come first."""

LIMIT_ROWS = 1 + sum(t <= LIMIT_DRIFTS for _, t in QUADRATIC)
FIRST_ORDER = FEATURES + 1
ROWS = 1 + len(QUADRATIC) + 2 * FIRST_ORDER
"""Number of sums per node: of 1; of b_s b_t/ρ; of (f_k − f̄_k)/ρ and (ρ − 1)/ρ; and of these times y²/ρ."""

ROW_GROUPS = (1, 1 + len(QUADRATIC), 1 + len(QUADRATIC) + FIRST_ORDER)
"""Boundaries between these four groups of rows."""


def log_density(
    law: Limit | FiniteWidth, path: "PathStatistics", weights: Float[Array, "networks rows p nodes"]
) -> Float[Array, " networks"]:
    """Log density of each network; see `AbstractPath.log_density`."""
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


def limit_kernel(law: Limit, path: "PathStatistics") -> Float[Array, "rows p nodes"]:
    """Coefficients of the first `LIMIT_ROWS` rows of the statistics in −2 log density: log v and θ_s θ_t/v."""
    variance = law.linear_noise + law.attention_noise * path.nodes
    drift = jnp.stack([law.attention_drift, law.relu_drift])
    return jnp.concatenate([jnp.log(variance)[None], products(drift, LIMIT_ROWS - 1)[:, None, None] / variance])


def finite_width_kernel(moments: Moments, reference: Moments, path: "PathStatistics") -> Float[Array, "rows p nodes"]:
    """Coefficients of the rows of the statistics in −2 log density, for one width."""
    variance, shares = _shares(moments, path.nodes)
    square = products(moments.drift, len(QUADRATIC))[:, None, None] / variance
    first = _allowed(moments, reference, path) * jnp.concatenate([shares, -jnp.ones_like(variance)[None]])
    return jnp.concatenate([jnp.log(variance)[None], square, first, -first / variance])


def contracted(
    moments: Moments, reference: Moments, path: "PathStatistics", weights: Float[Array, "rows p nodes"]
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
    weights: Float[Array, "networks rows p nodes"], kernel: Float[Array, "widths rows p nodes"], path: "PathStatistics"
) -> Float[Array, " networks"]:
    """Each network's statistics times the kernel of its width."""
    products = weights.reshape(path.networks, -1) @ kernel.reshape(len(path.widths), -1).T
    return jnp.take_along_axis(products, path.width[:, None], axis=1)[:, 0]


def _allowed(moments: Moments, reference: Moments, path: "PathStatistics") -> Float[Array, "p 1"]:
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
