"""The log density of a path's sufficient statistics, as their product with functions of the law at the nodes."""

import functools
import itertools
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array, Float

from sdeinfer.layers import VARIANCE_FEATURES, FiniteWidth, Limit
from sdeinfer.likelihood._moments import moments_of

if TYPE_CHECKING:
    from sdeinfer.likelihood._statistics import PathStatistics

LIMIT_DRIFTS, DRIFTS, FEATURES = 2, 4, len(VARIANCE_FEATURES)
QUADRATIC = sorted(itertools.combinations_with_replacement(range(1 + DRIFTS), 2), key=lambda st: st[1] > LIMIT_DRIFTS)
"""Pairs (s, t) whose products b_s b_t are summed, with b₀ = z; the pairs of the limit, s, t ≤ 2, come first."""

LIMIT_ROWS = 1 + sum(t <= LIMIT_DRIFTS for _, t in QUADRATIC)
ROWS = 1 + len(QUADRATIC)
"""Number of sums per node: of 1, and of b_s b_t."""


def log_density(
    law: Limit | FiniteWidth, path: "PathStatistics", weights: Float[Array, "networks rows p nodes"]
) -> Float[Array, " networks"]:
    """Log density of each network; see `AbstractPath.log_density`."""
    if isinstance(law, Limit):
        weights = weights[:, :LIMIT_ROWS]
        drift = jnp.stack([law.attention_drift, law.relu_drift], axis=-1)
        noise, mixing = (x[..., None] + jnp.zeros(len(path.nodes)) for x in (law.linear_noise, law.attention_noise))
        drift, noise, mixing = (jnp.broadcast_to(x, (len(path.widths), x.shape[-1])) for x in (drift, noise, mixing))
    else:
        moments = jax.vmap(lambda law: moments_of(law, path.centre))(law)
        drift, noise, mixing = moments.drift, moments.noise, moments.mixing
    if path.networks == len(path.widths):
        drift, noise, mixing = (x[path.width] for x in (drift, noise, mixing))
        twice = jax.vmap(contracted, (0, 0, 0, None, 0))(drift, noise, mixing, path.nodes, weights)
    else:
        twice = _by_width(weights, jax.vmap(kernel, (0, 0, 0, None))(drift, noise, mixing, path.nodes), path)
    dispersion = jnp.ones(()) if path.adjustment is None else path.adjustment.dispersion
    return path.constant - twice / (2 * jnp.broadcast_to(dispersion, path.widths.shape)[path.width])


def kernel(
    drift: Float[Array, " drifts"],
    noise: Float[Array, " p"],
    mixing: Float[Array, " p"],
    nodes: Float[Array, "p nodes"],
) -> Float[Array, "rows p nodes"]:
    """Coefficients of the rows of the statistics in −2 log density, for one width: log v and θ_s θ_t/v."""
    variance = noise[:, None] + mixing[:, None] * nodes
    return jnp.concatenate([jnp.log(variance)[None], products(drift)[:, None, None] / variance])


def contracted(
    drift: Float[Array, " drifts"],
    noise: Float[Array, " p"],
    mixing: Float[Array, " p"],
    nodes: Float[Array, "p nodes"],
    weights: Float[Array, "rows p nodes"],
) -> Float[Array, ""]:
    """`kernel` times the statistics of one width; cheaper, since it sums over rows first."""
    return _contracted(products(drift), noise, mixing, nodes, weights)


@jax.custom_jvp
def _contracted(
    quadratic: Float[Array, " count"],
    noise: Float[Array, " p"],
    mixing: Float[Array, " p"],
    nodes: Float[Array, "p nodes"],
    weights: Float[Array, "rows p nodes"],
) -> Float[Array, ""]:
    return _value_and_slopes(quadratic, noise, mixing, nodes, weights)[0]


def _value_and_slopes(
    quadratic: Array, noise: Array, mixing: Array, nodes: Array, weights: Array
) -> tuple[Float[Array, ""], tuple[Array, Array, Array]]:
    """The value Σ n log v + S/v with S = Σ c b b, and its derivatives in the first three arguments.

    The derivatives are written out because automatic differentiation compiles three times as many kernels.
    """
    count, square = weights[0], weights[1:].reshape(len(quadratic), -1)
    v = noise[:, None] + mixing[:, None] * nodes
    r, S = 1 / v, (quadratic @ square).reshape(nodes.shape)
    of_v = r * (count - r * S)
    slopes = (square @ r.reshape(-1), jnp.sum(of_v, axis=1), jnp.sum(of_v * nodes, axis=1))
    return jnp.sum(count * jnp.log(v) + r * S), slopes


@functools.partial(_contracted.defjvp, symbolic_zeros=True)
def _contracted_jvp(primals: tuple, tangents: tuple) -> tuple[Array, Array]:
    if not all(isinstance(tangent, SymbolicZero) for tangent in tangents[3:]):
        raise NotImplementedError("PathStatistics have no derivative in V; use Transitions, of `sdeinfer.transitions`")
    value, slopes = _value_and_slopes(*primals)
    moved = [(slope, dx) for slope, dx in zip(slopes, tangents[:3], strict=True) if not isinstance(dx, SymbolicZero)]
    return value, sum((jnp.sum(slope * dx) for slope, dx in moved), jnp.zeros_like(value))


def products(drift: Float[Array, " drifts"]) -> Float[Array, " count"]:
    """Coefficients of b_s b_t in (z − Σ_s θ_s b_s)², for the pairs of `QUADRATIC` with s, t ≤ the number of drifts."""
    signed = jnp.concatenate([jnp.ones_like(drift[:1]), -drift])
    used = [pair for pair in QUADRATIC if max(pair) <= len(drift)]
    chosen = np.zeros((len(used), len(signed), len(signed)))
    for row, (s, t) in enumerate(used):
        chosen[row, s, t] = 2 - (s == t)
    return jnp.asarray(chosen.reshape(len(used), -1), signed.dtype) @ jnp.outer(signed, signed).reshape(-1)


def _by_width(
    weights: Float[Array, "networks rows p nodes"], kernels: Float[Array, "widths rows p nodes"], path: "PathStatistics"
) -> Float[Array, " networks"]:
    """Each network's statistics times the kernel of its width."""
    products = weights.reshape(path.networks, -1) @ kernels.reshape(len(path.widths), -1).T
    return jnp.take_along_axis(products, path.width[:, None], axis=1)[:, 0]
