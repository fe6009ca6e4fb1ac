"""The law of networks of which every layer is observed."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float
from numpyro.distributions import Distribution, constraints

from sdeinfer.covariance import pairs, tokens_of
from sdeinfer.layers import FiniteWidth, Limit
from sdeinfer.likelihood._statistics import LIMIT_ROWS, QUADRATIC, ROW_GROUPS, PathStatistics
from sdeinfer.likelihood._transitions import Terms

LARGEST_RESIDUAL = 0.75
"""Bound on the part of a variance that is expanded to first order; below half of it, the bound changes nothing."""


class FullPath(Distribution):
    """Law of observed covariance paths given their initial covariance, as a density of their sufficient statistics.

    A transition over one layer, dt = 1/n, is Gaussian with independent entries in the spectral coordinates of its
    start: with the drift and the diffusion of Corollary 4.3, or with the means and variances of a layer of width n
    (`FiniteWidth`). Of the latter, the mean of each finite-width feature over the data enters as it is, and what is
    left of it to first order, as log v + z²/v ≈ log v₀ + z²/v₀ + Δ/v₀ − z² Δ/v₀². Δ/v₀ is O(1/n); far away in the
    prior, where it is not small, it is kept below `LARGEST_RESIDUAL`, and a mean that would make v₀ negative above
    −½ a.

    What a law of finite width says of variances, log v and z²/v, is divided by the statistics' `dispersion`, since the
    squared increments of finite networks vary more than those of normal ones; what it says of means is not.

    One batch element is one network; its log density is that of the covariances V_αβ, α ≤ β, after every layer but the
    first.

    Attributes:
        law: the coefficients of the SDE, or those of one layer with a leading axis of the path's `widths`.
        path: the statistics of the data, whose nodes and constants belong to the law.
    """

    arg_constraints: dict[str, Any] = {}
    pytree_data_fields = ("law", "path")
    support = constraints.independent(constraints.real, 3)  # pyright: ignore[reportAssignmentType, reportIncompatibleMethodOverride]

    def __init__(self, law: Limit | FiniteWidth, path: PathStatistics, *, validate_args: bool | None = None):
        self.law = law
        self.path = path
        super().__init__((path.networks,), path.weights.shape[1:], validate_args=validate_args)

    def log_prob(self, value: ArrayLike, intermediates: list | None = None) -> Float[Array, " networks"]:
        """Log density of each network; `value` holds `PathStatistics.weights`."""
        del intermediates
        path, law, weights = self.path, self.law, jnp.asarray(value)
        if isinstance(law, Limit):
            kernel = limit_kernel(law, path).reshape(-1)
            return path.constant - weights[:, :LIMIT_ROWS].reshape(path.networks, -1) @ kernel / 2
        if path.networks == len(path.widths):
            return path.constant - jax.vmap(contracted, (0, 0, None, 0))(law, path.dispersion, path, weights) / 2
        kernel = jax.vmap(finite_width_kernel, (0, 0, None))(law, path.dispersion, path)
        kernel = kernel.reshape(len(path.widths), -1)
        scores = weights.reshape(path.networks, -1) @ kernel.T
        return path.constant - jnp.take_along_axis(scores, path.width[:, None], axis=1)[:, 0] / 2


def limit_kernel(law: Limit, path: PathStatistics) -> Float[Array, "rows p nodes"]:
    """What multiplies the first `LIMIT_ROWS` rows of the statistics in −2 log density: log v and θ_s θ_t/v."""
    variance = law.linear_noise + law.attention_noise * path.nodes
    drift = jnp.stack([law.attention_drift, law.relu_drift])
    return jnp.concatenate([jnp.log(variance)[None], products(drift, LIMIT_ROWS - 1)[:, None, None] / variance])


def finite_width_kernel(
    law: FiniteWidth, dispersion: Float[Array, ""], path: PathStatistics
) -> Float[Array, "rows p nodes"]:
    """What multiplies the rows of the statistics in −2 log density, for one width."""
    variance, first_order = variances(law, path)
    weight = first_order / dispersion * (law.variance[:, None, None] + law.variance_mixing[:, None, None] * path.nodes)
    square = dispersed_products(law.drift, dispersion)[:, None, None] / variance
    return jnp.concatenate([jnp.log(variance)[None] / dispersion, square, weight / variance, -weight / variance**2])


def contracted(
    law: FiniteWidth, dispersion: Float[Array, ""], path: PathStatistics, weights: Float[Array, "rows p nodes"]
) -> Float[Array, ""]:
    """The same kernel times the statistics of one width, summed over rows first: several times cheaper for few rows."""
    variance, first_order = variances(law, path)
    count, square, features, feature_squares = jnp.split(weights, ROW_GROUPS)
    coefficients = jnp.stack([law.variance, law.variance_mixing])
    square = jnp.tensordot(dispersed_products(law.drift, dispersion), square, 1)
    plain, mixed = jnp.tensordot(coefficients, features, 1)
    plain_squares, mixed_squares = jnp.tensordot(coefficients, feature_squares, 1)
    precision = 1 / variance
    features = plain + path.nodes * mixed - precision * (plain_squares + path.nodes * mixed_squares)
    first_order = first_order / dispersion
    return jnp.sum(count[0] * jnp.log(variance) / dispersion + precision * (square + first_order * features))


def variances(law: FiniteWidth, path: PathStatistics) -> tuple[Float[Array, "p nodes"], Float[Array, "p 1"]]:
    """The v of each pair and node, means of the finite-width features included, and the factor on their residuals."""
    noise, mixing = pair_variance(law, path)
    # The largest residual that the data have, relative to v.
    largest = jnp.abs(law.variance) @ path.spread / noise
    largest += jnp.abs(law.variance_mixing) @ path.spread / jnp.where(mixing > 0, mixing, 1.0)
    return noise[:, None] + mixing[:, None] * path.nodes, _bounded(largest / LARGEST_RESIDUAL)[:, None]


def pair_variance(law: FiniteWidth, path: PathStatistics) -> tuple[Float[Array, " p"], Float[Array, " p"]]:
    """Both parts of v = noise + mixing · e for each pair, means of the finite-width features included."""
    rows, columns = pairs(tokens_of(len(path.nodes)))
    multiplicity = jnp.where(rows == columns, 2.0, 1.0)
    limit = law.limit
    noise = _raised(limit.linear_noise, law.linear_repeat * multiplicity, law.variance[:, None] * path.centre)
    mixing = _raised(
        limit.attention_noise, law.attention_repeat * multiplicity, law.variance_mixing[:, None] * path.centre
    )
    return noise, mixing


def _raised(
    base: Float[Array, ""], more: Float[Array, " p"], features: Float[Array, "features p"]
) -> Float[Array, " p"]:
    """Base plus more plus the features, of which those below zero take away at most half of the base."""
    above = jnp.sum(jnp.maximum(features, 0.0), axis=0)
    below = -jnp.sum(jnp.minimum(features, 0.0), axis=0)
    present = base > 0
    allowed = jnp.where(present, base / 2, 1.0)
    return base + more + above - jnp.where(present, below * _bounded(below / allowed), 0.0)


def _bounded(x: Array) -> Array:
    """(1 + x⁴)^{−1/4}: x times this is x for small x, up to a relative x⁴/4, and never above 1."""
    return 1 / jnp.sqrt(jnp.sqrt(1 + (x * x) ** 2))


def variance_of_terms(law: FiniteWidth, width: np.ndarray, path: PathStatistics, terms: Terms) -> np.ndarray:
    """The v of each term, its finite-width features in full; `width` says which of the law's widths each has."""
    noise, mixing = (np.asarray(part)[width] for part in jax.vmap(pair_variance, (0, None))(law, path))
    weight = law.variance[width][:, :, None] + law.variance_mixing[width][:, :, None] * terms.mixing[:, None]
    residual = terms.variance - np.asarray(path.centre, np.float64)
    return noise + mixing * terms.mixing + (weight * residual).sum(axis=1)


def dispersed_products(drift: Float[Array, " drifts"], dispersion: Float[Array, ""]) -> Float[Array, " pairs"]:
    """The `products` of all pairs, with z², the first of them, divided by the dispersion."""
    coefficients = products(drift, len(QUADRATIC))
    return jnp.concatenate([coefficients[:1] / dispersion, coefficients[1:]])


def products(drift: Float[Array, " drifts"], count: int) -> Float[Array, " count"]:
    """Coefficients of b_s b_t in (z − Σ_s θ_s b_s)², for the first `count` pairs of `QUADRATIC`."""
    signed = jnp.concatenate([jnp.ones_like(drift[:1]), -drift])
    chosen = np.zeros((count, len(signed), len(signed)))
    for row, (s, t) in enumerate(QUADRATIC[:count]):
        chosen[row, s, t] = 2 - (s == t)
    return jnp.asarray(chosen.reshape(count, -1), signed.dtype) @ jnp.outer(signed, signed).reshape(-1)
