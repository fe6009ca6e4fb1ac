"""One layer of width n, to first order in 1/n beyond the limit.

In the coordinates Q of `covariance.Spectrum`, let Z = Q⁻¹ dV Q⁻ᵀ for the increment dV of one layer. Then

    n E dV = θ₁ B₁ + θ₂ B₂ + θ₃ DB₂[B₁] + θ₄ B₁′ (+ θ₅ ½𝒜:∇²B₂, with an attention pattern)
    n var Z_ij/(1 + [i = j]) = a + κ² e_ij + Σ_k (w_k + w′_k e_ij) f_k,ij

up to O(n⁻²), where θ₃ to θ₅ and w are O(1/n) and the f_k are functions of V (`VARIANCE_FEATURES`). θ₂ includes the He
constant c at width n, so the drift of a ReLU is exact at every width. The entries of Z have correlations O(1/n), which
do not bias the score of a Gaussian quasi-likelihood. With an attention pattern the same holds in the coordinates of
`covariance.PatternSpectrum`.
"""

from typing import Any

import equinox as eqx
import numpy as np
from jaxtyping import ArrayLike, Float

from sdeinfer.covariance import Pattern
from sdeinfer.covariance._diffusion import Spectrum
from sdeinfer.covariance._matrix import engine, reciprocal, vech
from sdeinfer.covariance._pattern import EVERY_TOKEN
from sdeinfer.covariance._pattern_noise import PatternSpectrum
from sdeinfer.layers._next_order import (
    attention_drift_next,
    attention_noise_next,
    diagonals,
    frame,
    outer_product,
    relu_drift_along,
    relu_noise,
)
from sdeinfer.layers._pattern_order import (
    attention_noise_tensor,
    pattern_drift_next,
    pattern_features,
    relu_drift_curvature,
)
from sdeinfer.terms import AbstractTerm
from sdeinfer.terms._attention import attention_drift
from sdeinfer.terms._limit import Limit
from sdeinfer.terms._relu import relu_drift

VARIANCE_FEATURES = (
    *("attention_growth", "relu_growth", "attention_growth_next"),
    *("attention_next", "relu_hidden", "relu_tokens", "relu_response"),
    *("relu_growth_square", "relu_hidden_square", "linear_repeat", "attention_repeat", "attention_repeat_rest"),
)
"""Names of the f_k, in order; see `_next_order`: the sums β of two diagonal entries of the attention and ReLU drifts,
which change Σ_lin within the layer, and of B₁′, which alone widens tokens near a line: its coefficient is O(1/n²), its
value up to O(n); G; F of hidden units and of tokens; D. The next two have coefficients q², which is
small only for c₊ − c₋ small against √n: (B_ii B_jj + B_ij²)/(1 + [i = j]) with B the ReLU drift, and F₂. The
last three are noise on top of noise, E[V_αδ V_βω + V_αω V_βδ] for a V that has the noise Σ_lin or 𝒜: 1 + [i = j] and
(1 + [i = j]) e without a mask. The second is divided by e; of a pattern it is 1, and the rest is the third."""

ATTENTION_DRIFT_NEXT = 3
"""Place of B₁′ among the drift terms."""

ATTENTION_NEXT = VARIANCE_FEATURES.index("attention_next")


class FiniteWidth(eqx.Module):
    """Coefficients of the law of one layer; each may have a leading axis of widths.

    Attributes:
        limit: θ₁, θ₂, a and κ²; θ₂ includes the He constant at this width.
        drift_along: θ₃, the coefficient of DB₂[B₁].
        attention_drift_next: θ₄, the coefficient of B₁′.
        drift_curvature: θ₅, the coefficient of ½𝒜:∇²B₂.
        variance: w_k, shape (features,).
        variance_mixing: w′_k, shape (features,).
    """

    limit: Limit
    drift_along: Float[Any, "..."]
    attention_drift_next: Float[Any, "..."]
    drift_curvature: Float[Any, "..."]
    variance: Float[Any, "... features"]
    variance_mixing: Float[Any, "... features"]

    @classmethod
    def without_attention(
        cls,
        relu_drift: Float[Any, "..."],
        *,
        linear_noise: Float[Any, "..."] | float = 1.0,
        **variance: Float[Any, "..."],
    ) -> "FiniteWidth":
        """The law of a layer without attention, with its w_k by name."""
        zero, features = relu_drift * 0, weights(**variance)
        return cls(
            limit=Limit(relu_drift=relu_drift, linear_noise=linear_noise + zero),
            drift_along=zero,
            attention_drift_next=zero,
            drift_curvature=zero,
            variance=features,
            variance_mixing=features * 0,
        )

    @classmethod
    def of_limit(cls, limit: Limit) -> "FiniteWidth":
        """The limit as a law of finite width without corrections."""
        zero = limit.linear_noise * 0
        return eqx.tree_at(lambda law: law.limit, cls.without_attention(zero, relu_growth=zero), limit)

    @property
    def drift(self) -> Float[Any, "... drifts"]:
        """The coefficients θ₁ to θ₄, θ₅ with an attention pattern, and those of other terms of the limit."""
        terms = (self.limit.attention_drift, self.limit.relu_drift, self.drift_along, self.attention_drift_next)
        curvature = () if self.limit.pattern.everything else (self.drift_curvature,)
        every = (*terms, *curvature, *self.limit.others.values())
        xp = engine(*every)
        return xp.stack(xp.broadcast_arrays(*every), axis=-1)

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
            drift_curvature=second.relu_drift * first.attention_noise * h,
            variance=self.variance
            + feedforward.variance
            + weights(
                attention_growth=moved * first.attention_drift,
                attention_growth_next=moved * self.attention_drift_next,
                linear_repeat=moved * first.linear_noise,
                attention_repeat_rest=moved * first.attention_noise,
            )
            + weights(**passed) * first.linear_noise[..., None],
            variance_mixing=self.variance_mixing
            + weights(attention_repeat=moved * first.attention_noise)
            + weights(**passed) * first.attention_noise[..., None],
        )


def drift_count(pattern: Pattern, others: tuple[AbstractTerm, ...] = ()) -> int:
    """Number of drift terms of a layer of finite width."""
    return (4 if pattern.everything else 5) + len(others)


def weights(**named: Float[Any, "..."]) -> Float[Any, "... features"]:
    """Coefficients of the variance features by name; the others are zero."""
    xp = engine(*named.values())
    return xp.stack(xp.broadcast_arrays(*(named.get(name, 0.0) for name in VARIANCE_FEATURES)), axis=-1)


def drift_terms(
    V: Float[Any, "... m m"], pattern: Pattern = EVERY_TOKEN, others: tuple[AbstractTerm, ...] = ()
) -> Float[Any, "drifts ... m m"]:
    """B₁, B₂, DB₂[B₁], B₁′, with a pattern ½𝒜:∇²B₂, and the drifts of other terms, of one layer of finite width."""
    xp = V.__array_namespace__()
    last = xp.moveaxis(V, (-2, -1), (0, 1))
    last = np.ascontiguousarray(last) if xp is np else last
    b1, b2 = (xp.moveaxis(B, (0, 1), (-2, -1)) for B in (attention_drift(last, pattern), relu_drift(last)))
    terms = [b1, b2, relu_drift_along(V, b1)]
    if pattern.everything:
        terms.append(attention_drift_next(V))
    else:
        curvature = relu_drift_curvature(V, attention_noise_tensor(V, pattern))
        terms += [pattern_drift_next(V, pattern), curvature]
    other_drifts = [xp.moveaxis(xp.asarray(term.drift(1.0, last)), (0, 1), (-2, -1)) for term in others]
    return xp.stack([*terms, *other_drifts])


def variance_terms(
    V: Float[Any, "... m m"],
    coordinates: Spectrum | PatternSpectrum,
    drift: Float[Any, "drifts ... m m"],
    pattern: Pattern = EVERY_TOKEN,
) -> Float[Any, "features ... p"]:
    """The features f_k of `VARIANCE_FEATURES` in the spectral coordinates of V."""
    xp, growing = V.__array_namespace__(), (drift[0], drift[1], drift[ATTENTION_DRIFT_NEXT])
    if isinstance(coordinates, PatternSpectrum):
        *terms, repeated = pattern_features(V, pattern, *coordinates.forms(), *growing)
        return xp.stack([*terms, xp.ones_like(repeated), repeated - coordinates.mixing])
    basis, equal = frame(V, coordinates), np.eye(V.shape[-1], dtype=V.dtype)
    attention, relu, after = (basis.R @ B @ basis.R.mT for B in growing)
    noise, growths = relu_noise(basis, relu), [diagonals(B) for B in (attention, relu, after)]
    relu_growth, repeated = growths[1], xp.broadcast_to(1 + equal, V.shape)
    terms = [
        *(growth[..., :, None] + growth[..., None, :] for growth in growths),
        attention_noise_next(basis),
        noise.hidden,
        noise.tokens,
        noise.response,
        (outer_product(relu_growth, relu_growth) + relu**2) / (1 + equal),
        noise.hidden_square,
        repeated,
        repeated,
        xp.zeros_like(V),
    ]
    return vech(xp.stack(terms))
