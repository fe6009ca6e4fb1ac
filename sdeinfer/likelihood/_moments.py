"""Means and variances of the terms of a transition by the law of a layer of width n."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from sdeinfer.covariance import reciprocal
from sdeinfer.layers import VARIANCE_FEATURES, FiniteWidth, Limit
from sdeinfer.likelihood._terms import Terms


class Moments(eqx.Module):
    """z_p ~ N(Σ_s θ_s b_s, v), with v = noise + mixing · e + Σ_k (w_k + w′_k e)(f_k − f̄_k), for each pair p.

    The contributions of the means f̄ are part of `noise` and `mixing`. Every field may have leading axes.

    Attributes:
        drift: θ_s, shape (drifts,).
        noise: shape (p,).
        mixing: shape (p,).
        variance: w_k, shape (features,).
        variance_mixing: w′_k, shape (features,).
    """

    drift: Float[Any, "... drifts"]
    noise: Float[Any, "... p"]
    mixing: Float[Any, "... p"]
    variance: Float[Any, "... features"]
    variance_mixing: Float[Any, "... features"]

    def at(self, width: np.ndarray) -> "Moments":
        """The moments at an array of indices into the leading axis of widths."""
        return jax.tree.map(lambda x: x[width], self)

    def mean(self, terms: Terms) -> Float[Any, "... p"]:
        """Mean Σ_s θ_s b_s of each term."""
        return (self.drift[..., None] * terms.drift).sum(axis=-2)

    def common_variance(self, e: Float[Any, "... p"]) -> Float[Any, "... p"]:
        """The part noise + mixing · e of v."""
        return self.noise + self.mixing * e

    def own_variance(self, e: Float[Any, "... p"], features: Float[Any, "... features p"]) -> Float[Any, "... p"]:
        """The part Σ_k (w_k + w′_k e)(f_k − f̄_k) of v, for `features` f − f̄."""
        weight = self.variance[..., None] + self.variance_mixing[..., None] * e[..., None, :]
        return (weight * features).sum(axis=-2)


def moments_of(law: FiniteWidth, centre: Float[Array, "features p"] | None = None) -> Moments:
    """The moments by the law at one width, with features f − f̄ of means f̄ = `centre`, or f̄ = 0.

    In the tails of the prior, where the expansion in 1/n fails, negative feature means could make v negative; their
    reduction is bounded by half of the limit's variance.
    """
    limit = law.limit
    centre = jnp.zeros((len(VARIANCE_FEATURES), 1)) if centre is None else centre
    return Moments(
        drift=law.drift,
        noise=_raised(limit.linear_noise, law.variance[:, None] * centre),
        mixing=_raised(limit.attention_noise, law.variance_mixing[:, None] * centre),
        variance=law.variance,
        variance_mixing=law.variance_mixing,
    )


def at_least_a_quarter(change: Any) -> Any:
    """1 + x for x ≥ −½, where the expansion in 1/n holds; for smaller x a function above ¼, with one derivative."""
    xp = change.__array_namespace__()
    below = xp.minimum(change + 0.5, xp.zeros_like(change))
    return xp.maximum(1 + change, xp.full_like(change, 0.5)) - 0.25 + 0.25 * xp.exp(4 * below)


@jax.custom_jvp
def bounded(x: Array) -> Array:
    """(1 + x⁴)^{−1/4}: x times this factor is at most 1, and equals x for small x up to a relative x⁴/4."""
    return jax.lax.rsqrt(jnp.sqrt(1 + (x * x) ** 2))


@bounded.defjvp
def _bounded_jvp(primals: tuple[Any], tangents: tuple[Any]) -> tuple[Array, Array]:
    (x,), (dx,) = primals, tangents
    y = bounded(x)
    # x y is at most 1 where x³ overflows.
    return y, -((x * y) ** 3) * (y * y) * dx


def _raised(base: Float[Array, ""], features: Float[Array, "features p"]) -> Float[Array, " p"]:
    """Sum of base and features, where negative features subtract at most half of the base."""
    above = jnp.sum(jnp.maximum(features, 0.0), axis=0)
    below = -jnp.sum(jnp.minimum(features, 0.0), axis=0)
    present = base > 0
    inverse = reciprocal(jnp.where(present, base / 2, 1.0))
    return base + above - jnp.where(present, below * bounded(below * inverse), 0.0)


def of_limits(limit: Limit, widths: int) -> FiniteWidth:
    """A limit, whose coefficients are scalars or of each width, as the law of every width."""
    return jax.vmap(FiniteWidth.of_limit)(jax.tree.map(lambda x: jnp.broadcast_to(x, widths), limit))
