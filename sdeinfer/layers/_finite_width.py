"""One layer of width n, to first order in 1/n beyond the limit.

In the coordinates Q of `covariance.Spectrum`, let Z = Q⁻¹ dV Q⁻ᵀ for the increment dV of one layer. Then

    n E dV = θ₁ B₁ + θ₂ B₂ + θ₃ DB₂[B₁] + θ₄ B₁′
    n var Z_ij/(1 + [i = j]) = a + κ² e_ij + (1 + [i = j]) (a′ + κ′² e_ij) + Σ_k (w_k + w′_k e_ij) f_k,ij

up to O(n⁻²), where θ₃, θ₄, a′, κ′² and w are O(1/n) and the f_k are functions of V (`VARIANCE_FEATURES`). θ₂ includes
the He constant c at width n, so the drift of a ReLU is exact at every width. The entries of Z have correlations O(1/n),
which do not bias the score of a Gaussian quasi-likelihood.
"""

from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float

from sdeinfer.covariance import CausalSpectrum, Spectrum, reciprocal
from sdeinfer.layers._limit import Limit, attention_drift, causal_attention_drift
from sdeinfer.layers._next_order import (
    attention_drift_next,
    attention_noise_next,
    diagonals,
    frame,
    outer_product,
    relu_drift_along,
    relu_noise,
)
from sdeinfer.layers._relu import relu_drift

VARIANCE_FEATURES = (
    *("attention_growth", "relu_growth", "attention_next", "relu_hidden", "relu_tokens", "relu_response"),
    *("relu_growth_square", "relu_hidden_square"),
)
"""Names of the f_k, in order; see `_next_order`: the sums β of two diagonal entries of the attention and ReLU drifts,
which change Σ_lin within the layer; G; F of hidden units and of tokens; D. The last two have coefficients q², which is
small only for c₊ − c₋ small against √n: (B_ii B_jj + B_ij²)/(1 + [i = j]) with B the ReLU drift, and F₂."""

ATTENTION_NEXT = VARIANCE_FEATURES.index("attention_next")


class FiniteWidth(eqx.Module):
    """Coefficients of the law of one layer; each may have a leading axis of widths.

    Attributes:
        limit: θ₁, θ₂, a and κ²; θ₂ includes the He constant at this width.
        drift_along: θ₃, the coefficient of DB₂[B₁].
        attention_drift_next: θ₄, the coefficient of B₁′.
        linear_repeat: a′.
        attention_repeat: κ′².
        variance: w_k, shape (8,).
        variance_mixing: w′_k, shape (8,).
    """

    limit: Limit
    drift_along: Float[Any, "..."]
    attention_drift_next: Float[Any, "..."]
    linear_repeat: Float[Any, "..."]
    attention_repeat: Float[Any, "..."]
    variance: Float[Any, "... features"]
    variance_mixing: Float[Any, "... features"]

    @classmethod
    def without_attention(
        cls,
        relu_drift: Float[Array, ""],
        *,
        linear_noise: ArrayLike = 1.0,
        linear_repeat: ArrayLike = 0.0,
        **variance: Float[Array, ""],
    ) -> "FiniteWidth":
        """The law of a layer without attention, with its w_k by name."""
        zero = jnp.zeros_like(relu_drift)
        return cls(
            limit=Limit(zero, relu_drift, jnp.asarray(linear_noise) + zero, zero),
            drift_along=zero,
            attention_drift_next=zero,
            linear_repeat=jnp.asarray(linear_repeat) + zero,
            attention_repeat=zero,
            variance=weights(**variance),
            variance_mixing=jnp.zeros_like(weights(**variance)),
        )

    @classmethod
    def of_limit(cls, limit: Limit) -> "FiniteWidth":
        """The limit as a law of finite width without corrections."""
        zero = jnp.zeros_like(limit.linear_noise)
        return eqx.tree_at(lambda law: law.limit, cls.without_attention(zero, relu_growth=zero), limit)

    @property
    def drift(self) -> Float[Array, "... 4"]:
        """The coefficients θ₁ to θ₄."""
        terms = (self.limit.attention_drift, self.limit.relu_drift, self.drift_along, self.attention_drift_next)
        return jnp.stack(terms, axis=-1)

    def then(self, feedforward: "FiniteWidth", width: ArrayLike) -> "FiniteWidth":
        """The law of attention followed by a layer without attention; both together count as one layer.

        The input covariance of the second layer includes the drift and the noise of the first.
        """
        first, second = self.limit, feedforward.limit
        h = reciprocal(width)
        moved = second.linear_noise * h
        passed = {"relu_response": 2 * second.relu_drift * h}
        return FiniteWidth(
            limit=first + second,
            drift_along=second.relu_drift * first.attention_drift * h,
            attention_drift_next=self.attention_drift_next,
            linear_repeat=self.linear_repeat + feedforward.linear_repeat + moved * first.linear_noise,
            attention_repeat=self.attention_repeat + moved * first.attention_noise,
            variance=self.variance
            + feedforward.variance
            + weights(attention_growth=moved * first.attention_drift)
            + weights(**passed) * first.linear_noise,
            variance_mixing=weights(**passed) * first.attention_noise,
        )


def weights(**named: Float[Array, ""]) -> Float[Array, " features"]:
    """Coefficients of the variance features by name; the others are zero."""
    zero = jnp.zeros_like(next(iter(named.values())))
    return jnp.stack([named.get(name, zero) for name in VARIANCE_FEATURES])


def drift_terms(V: Float[Any, "... m m"], *, causal: bool = False) -> Float[Any, "4 ... m m"]:
    """Drift terms B₁, B₂, DB₂[B₁] and B₁′ of one layer of finite width.

    With a causal mask the last two, which the limit does not need, are 0; they have not been derived. NumPy handles
    NumPy arrays.
    """
    xp = V.__array_namespace__()
    last = xp.moveaxis(V, (-2, -1), (0, 1))
    last = np.ascontiguousarray(last) if xp is np else last
    limit = (causal_attention_drift(last) if causal else attention_drift(last)), relu_drift(last)
    b1, b2 = (xp.moveaxis(B, (0, 1), (-2, -1)) for B in limit)
    if causal:
        return xp.stack([b1, b2, xp.zeros_like(V), xp.zeros_like(V)])
    return xp.stack([b1, b2, relu_drift_along(V, b1), attention_drift_next(V)])


def variance_terms(
    V: Float[Any, "... m m"], coordinates: Spectrum | CausalSpectrum, drift: Float[Any, "4 ... m m"]
) -> Float[Any, "features ... m m"]:
    """The features f_k,ij of `VARIANCE_FEATURES` in the spectral coordinates of V; 0 with a causal mask.

    Arguments:
        V: covariances.
        coordinates: spectral coordinates of V.
        drift: `drift_terms` of V.
    """
    xp = V.__array_namespace__()
    if isinstance(coordinates, CausalSpectrum):
        return xp.zeros((len(VARIANCE_FEATURES), *V.shape), V.dtype)
    at = frame(V, coordinates)
    attention, relu = (at.R @ B @ at.R.mT for B in drift[:2])
    noise, (growth, relu_growth) = relu_noise(at, relu), (diagonals(B) for B in (attention, relu))
    return xp.stack(
        [
            growth[..., :, None] + growth[..., None, :],
            relu_growth[..., :, None] + relu_growth[..., None, :],
            attention_noise_next(at),
            noise.hidden,
            noise.tokens,
            noise.response,
            (outer_product(relu_growth, relu_growth) + relu**2) / (1 + np.eye(V.shape[-1], dtype=V.dtype)),
            noise.hidden_square,
        ]
    )
