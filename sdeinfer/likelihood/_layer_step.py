"""One latent layer, as a step that keeps V positive definite.

In the coordinates Q of `covariance.Spectrum`, V = QQᵀ becomes Q (I + Y)^p Qᵀ with Y symmetric and its entries
independent normals. Their means and variances give dV the moments of the law of one layer, to second order in 1/n.

The power p sets the third moment. With latent layers the likelihood depends on log V rather than dV. A layer of
skewness c s, with s the relative standard deviation of V, adds −c s⁴ to the variance s² of log V. A Gaussian dV has
c = 0, (I + Y)^p has c = 3 − 3/p; p is chosen by the c of the architecture (`AbstractLayer.skewness`).

The last axis of all arrays is a batch of covariances.
"""

import math
from typing import NamedTuple

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float

from sdeinfer.covariance._batched import cholesky, diagonal, identity_like, invert_lower, matmul, total, transpose
from sdeinfer.covariance._diffusion import centred_gram
from sdeinfer.covariance._eigen import eigh
from sdeinfer.covariance._matrix import square_of
from sdeinfer.likelihood._terms import Moments, bounded
from sdeinfer.terms._attention import attention_drift
from sdeinfer.terms._limit import Limit
from sdeinfer.terms._relu import relu_drift


class LayerLaw(eqx.Module):
    """The law of one layer, for a batch of covariances.

    θ₁ and θ₂; the part θ₃ DB₂[B₁] + θ₄ B₁′ of the drift; noise and mixing of var Z_ij/(1 + [i = j]) = a + κ² e_ij, for
    all V and of this V; h = 1/n and p. What is of O(1/n) is computed at the last observed layer, and changes little.
    """

    drift: Float[Array, "2 batch"]
    more_drift: Float[Array, "m m batch"]
    noise: Float[Array, "m m batch"]
    mixing: Float[Array, "m m batch"]
    own_noise: Float[Array, "m m batch"]
    own_mixing: Float[Array, "m m batch"]
    h: Float[Array, " batch"]
    power: int = eqx.field(static=True)

    @classmethod
    def of_limit(cls, limit: Limit, h: Float[Array, " batch"], *, tokens: int, power: int) -> "LayerLaw":
        """The law of the SDE over steps h."""
        drift = jnp.stack([limit.attention_drift, limit.relu_drift])[:, None] + jnp.zeros_like(h)
        zero = jnp.zeros((tokens, tokens, *h.shape), h.dtype)
        noise, mixing = limit.linear_noise + zero, limit.attention_noise + zero
        return cls(drift, zero, noise, mixing, zero, zero, h, power)

    @classmethod
    def of_moments(
        cls,
        moments: Moments,
        more_drift: Float[Array, "2 m m batch"],
        features: Float[Array, "features m m batch"],
        h: Float[Array, " batch"],
        *,
        power: int,
    ) -> "LayerLaw":
        """The law of one layer of finite width."""
        square = square_of(features.shape[1])
        theta = moments.drift.T
        weights = jnp.stack([moments.variance.T, moments.variance_mixing.T])
        own_noise, own_mixing = jnp.sum(weights[:, :, None, None] * features, axis=1)
        return cls(
            theta[:2],
            jnp.sum(theta[2:, None, None] * more_drift, axis=0),
            moments.noise.T[square],
            moments.mixing.T[square],
            own_noise,
            own_mixing,
            h,
            power,
        )


class LayerStep(NamedTuple):
    """The law of Y, where Q (I + Y)^p Qᵀ is the covariance after a layer; shapes (m, m, batch)."""

    Q: Float[Array, "m m batch"]
    R: Float[Array, "m m batch"]
    rotation: Float[Array, "m m batch"]
    mean: Float[Array, "m m batch"]
    variance: Float[Array, "m m batch"]
    square: Float[Array, "m m batch"]
    log_volume: Float[Array, " batch"]


def power_of(skewness: float) -> int:
    """The power whose step has the skewness closest to c; powers of two need few matrix products."""
    return min((2, 4, 8, 16), key=lambda power: abs(3 - 3 / power - skewness))


def layer_step(law: LayerLaw, V: Float[Array, "m m batch"]) -> LayerStep:
    """The law of one layer at V."""
    tokens, equal = len(V), identity_like(V)
    L = cholesky(V)
    delta, U = eigh(centred_gram(L)[1])
    Q, R = matmul(L, U), matmul(transpose(U), invert_lower(L))
    e = (delta[:, None] ** 2 + delta[None] ** 2) / tokens**2
    common, deviation = law.noise + law.mixing * e, law.own_noise + law.own_mixing * e
    share = deviation / (0.5 * common)  # their ratio is bounded by ½, and unchanged below half of that
    variance = _variance_of_entries(law.h * (1 + equal) * (common + deviation * bounded(share)), law.power)
    drift = law.drift[0] * attention_drift(V) + law.drift[1] * relu_drift(V)
    mean, square = _mean(law.h * conjugated(R, drift + law.more_drift), variance, law.power)
    return LayerStep(Q, R, U, mean, variance, square, total(jnp.log(diagonal(L))))


def _variance_of_entries(wanted: Float[Array, "m m batch"], power: int) -> Float[Array, "m m batch"]:
    """Variances w of Y for which (I + Y)^p has the wanted variances, to second order.

    With the mean μ = −(p − 1)/2 E[Y²] of Y, the first-order term of (I + Y)^p is p (1 + (p − 1)(μ_i + μ_j)/2) Y_ij.
    Isserlis' theorem gives the variance of the term Y² and the covariance of the term Y³ with Y.
    """
    w = wanted / power**2
    square = total(w, axis=1)
    both = square[:, None] + square[None]
    first = -(power**2) * (power - 1) ** 2 / 2 * both + 2 * power * math.comb(power, 3) * (both + w)
    second = math.comb(power, 2) ** 2 * _of_square(w)
    change = (first + second / w) / power**2
    # Equal to w (1 − change) to second order, and positive for any change.
    return w * (jnp.sqrt(1 + change**2 / 4) - change / 2) ** 2


def _mean(
    wanted: Float[Array, "m m batch"], variance: Float[Array, "m m batch"], power: int
) -> tuple[Float[Array, "m m batch"], Float[Array, "m m batch"]]:
    """The mean of Y for which (I + Y)^p − I has the wanted mean; and E[Y²] about that mean, diagonal."""
    equal = identity_like(wanted)
    square = total(variance, axis=1)
    about = equal * square[:, None]
    mean = (wanted - math.comb(power, 2) * about) / power
    shift = diagonal(mean)
    third = 2 * shift * square + total(variance * shift[None], axis=1)
    fourth = total(_of_square(variance), axis=1) + square**2
    higher = math.comb(power, 3) * third + math.comb(power, 4) * fourth
    return mean - (power - 1) / 2 * matmul(mean, mean) - equal * higher[:, None] / power, about


def _of_square(w: Float[Array, "m m batch"]) -> Float[Array, "m m batch"]:
    """Variances of the entries of Y², for symmetric Y with independent entries of variances w."""
    equal = identity_like(w)
    # Off the diagonal: Y_ij (Y_ii + Y_jj) + Σ_k Y_ik Y_kj over k ≠ i, j.
    return equal * 2 * total(w * w, axis=1)[:, None] + (1 - equal) * matmul(w, w)


def conjugated(R: Float[Array, "m m batch"], S: Float[Array, "m m batch"]) -> Float[Array, "m m batch"]:
    """R S Rᵀ."""
    return matmul(matmul(R, S), transpose(R))
