"""The log density of a path's sufficient statistics, as their product with functions of the law at the nodes."""

import functools
import itertools
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array, Float

from sdeinfer.layers import ATTENTION_NEXT, VARIANCE_FEATURES, FiniteWidth, Limit
from sdeinfer.likelihood._moments import Moments, bounded, moments_of, of_limits

if TYPE_CHECKING:
    from sdeinfer.likelihood._statistics import PathStatistics

LARGEST_CHANGE = 0.75
"""Bound on the relative change of attention's variance by G; changes below half of it are unchanged."""

LIMIT_DRIFTS, FEATURES = 2, len(VARIANCE_FEATURES)


@functools.cache
def quadratic_pairs(drifts: int) -> list[tuple[int, int]]:
    """Pairs (s, t), s ≤ t, whose products b_s b_t are summed, with b₀ = z; those of the limit, t ≤ 2, come first."""
    pairs = itertools.combinations_with_replacement(range(1 + drifts), 2)
    return sorted(pairs, key=lambda st: st[1] > LIMIT_DRIFTS)


def rows_of(drifts: int) -> int:
    """Number of sums per node: of 1, and of b_s b_t."""
    return 1 + len(quadratic_pairs(drifts))


def log_density(
    law: Limit | FiniteWidth, path: "PathStatistics", weights: Float[Array, "networks rows p nodes"]
) -> Float[Array, " networks"]:
    """Log density of each network; see `AbstractPath.log_density`."""
    if isinstance(law, Limit) and not law.others:
        weights = weights[:, : rows_of(LIMIT_DRIFTS)]
        drift = jnp.stack([law.attention_drift, law.relu_drift], axis=-1)
        variance = law.linear_noise[..., None, None] + law.attention_noise[..., None, None] * path.nodes
        drift, variance = (
            jnp.broadcast_to(x, (len(path.widths), *x.shape[x.ndim - axes :]))
            for x, axes in ((drift, 1), (variance, 2))
        )
    else:
        law = of_limits(law, len(path.widths)) if isinstance(law, Limit) else law
        moments = jax.vmap(lambda law: moments_of(law, path.centre))(law)
        drift, variance = moments.drift, jax.vmap(variance_at_nodes, (0, None))(moments, path)
    quadratic = jax.vmap(products)(drift)
    if path.networks == len(path.widths):
        twice = jax.vmap(contracted)(quadratic[path.width], variance[path.width], weights)
    else:
        kernels = jax.vmap(kernel)(quadratic, variance)
        of_widths = weights.reshape(path.networks, -1) @ kernels.reshape(len(path.widths), -1).T
        twice = jnp.take_along_axis(of_widths, path.width[:, None], axis=1)[:, 0]
    dispersion = jnp.ones(()) if path.adjustment is None else path.adjustment.dispersion
    return path.constant - twice / (2 * jnp.broadcast_to(dispersion, path.widths.shape)[path.width])


def variance_at_nodes(moments: Moments, path: "PathStatistics") -> Float[Array, "p nodes"]:
    """Variances by the law of one width, with functions of e for the features."""
    mixing, e = moments.mixing[:, None], path.nodes
    next_order = path.next_order[0][:, None] + path.next_order[1][:, None] * e
    change = moments.variance[ATTENTION_NEXT] * next_order / jnp.where(mixing > 0, mixing, 1.0)
    # One factor for all e of a pair, since interpolation needs a variance that is analytic in e.
    largest = moments.variance[ATTENTION_NEXT] * path.next_order[2][:, None] / jnp.where(mixing > 0, mixing, 1.0)
    return moments.noise[:, None] + mixing * e * (1 + change * bounded(largest / LARGEST_CHANGE))


def kernel(quadratic: Float[Array, " count"], variance: Float[Array, "p nodes"]) -> Float[Array, "rows p nodes"]:
    """Coefficients of the rows of the statistics in −2 log density, for one width: log v and θ_s θ_t/v."""
    return jnp.concatenate([jnp.log(variance)[None], quadratic[:, None, None] / variance])


@jax.custom_jvp
def contracted(
    quadratic: Float[Array, " count"], variance: Float[Array, "p nodes"], weights: Float[Array, "rows p nodes"]
) -> Float[Array, ""]:
    """`kernel` times the statistics of one width; cheaper, since it sums over rows first."""
    return _value_and_slopes(quadratic, variance, weights)[0]


def _value_and_slopes(
    quadratic: Array, variance: Array, weights: Array
) -> tuple[Float[Array, ""], tuple[Array, Array]]:
    """The value Σ n log v + S/v with S = Σ c b b, and its derivatives in the first two arguments.

    The derivatives are written out because automatic differentiation compiles three times as many kernels.
    """
    count, rows = weights[0], weights.reshape(len(weights), -1)
    # Products with all rows: XLA would copy the others in every evaluation.
    r, S = 1 / variance, (jnp.concatenate([jnp.zeros_like(quadratic[:1]), quadratic]) @ rows).reshape(variance.shape)
    slopes = ((rows @ r.reshape(-1))[1:], r * (count - r * S))
    return jnp.sum(count * jnp.log(variance) + r * S), slopes


@functools.partial(contracted.defjvp, symbolic_zeros=True)
def _contracted_jvp(primals: tuple, tangents: tuple) -> tuple[Array, Array]:
    if not isinstance(tangents[2], SymbolicZero):
        raise NotImplementedError("PathStatistics have no derivative in V; use Transitions, of `sdeinfer.transitions`")
    value, slopes = _value_and_slopes(*primals)
    moved = [(slope, dx) for slope, dx in zip(slopes, tangents[:2], strict=True) if not isinstance(dx, SymbolicZero)]
    return value, sum((jnp.sum(slope * dx) for slope, dx in moved), jnp.zeros_like(value))


def products(drift: Float[Array, " drifts"]) -> Float[Array, " count"]:
    """Coefficients of b_s b_t in (z − Σ_s θ_s b_s)², for `quadratic_pairs`."""
    signed = jnp.concatenate([jnp.ones_like(drift[:1]), -drift])
    used = quadratic_pairs(len(drift))
    chosen = np.zeros((len(used), len(signed), len(signed)))
    for row, (s, t) in enumerate(used):
        chosen[row, s, t] = 2 - (s == t)
    return jnp.asarray(chosen.reshape(len(used), -1), signed.dtype) @ jnp.outer(signed, signed).reshape(-1)
