"""Layers between two observations: latent, and proposed by bridges towards what was observed.

Given θ, the layers between two observations have the law p of `LayerLaw`; a bridge proposes them from q, by independent
standard normals ("innovations") that are the latent variables of a model. Then

    p(observation | start, θ) = E_u[ w(θ, u) ],    w = Π p(V_{ℓ+1} | V_ℓ)/q(V_{ℓ+1} | V_ℓ, observation),

and with u ~ N(0, I) a priori, log w is what the observation adds to the log density of (θ, u). The better the bridge,
the less w varies with u, and the nearer u stays to N(0, I) a posteriori.

The bridge works in relative coordinates, where the noise of every layer is the same: R V_end Rᵀ = exp Λ has r layers
to go, so one layer goes Λ/r of the way, with 1 − 1/r of a layer's variance. That would be the exact bridge if the
steps commuted and the noise did not depend on V. An observation with an error, as outputs are of the covariance, stands
further away by as many layers as have the variance of that error.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from sdeinfer.covariance import (
    cholesky,
    diagonal,
    eigh,
    gram,
    identity_like,
    invert_lower,
    matmul,
    square_of,
    total,
    transpose,
)
from sdeinfer.likelihood._layer_step import LayerLaw, conjugated, layer_step

LOG_TERMS = 4
"""Terms of log x = 2 (y + y³/3 + …), y = (x − 1)/(x + 1): the bridge need not be exact, and is nearly so for x < 5."""


class Span(eqx.Module):
    """What lies between two observations, for a batch of them.

    Attributes:
        start: V at the first, shape (m, m, batch).
        end: V at the second; or X Xᵀ/q of q outputs, if that is what was observed.
        layers: how many layers lie between, shape (batch,).
        outputs: q; 0 where the covariance itself was observed.
    """

    start: Float[Array, "m m batch"]
    end: Float[Array, "m m batch"]
    layers: Int[Array, " batch"]
    outputs: int = eqx.field(static=True, default=0)


def innovations_needed(layers: int, outputs: int) -> int:
    """How many layers are latent: the last is not, if its covariance was observed."""
    return layers if outputs else layers - 1


def bridge(
    law: LayerLaw, span: Span, innovations: Float[Array, "latent p batch"]
) -> tuple[Float[Array, " batch"], Float[Array, "latent m m batch"]]:
    """Log w of latent layers proposed by standard normals, and the latent layers.

    Spans of fewer layers than others leave the first of their innovations unused.
    """
    latent = len(innovations)
    most = latent + (0 if span.outputs else 1)

    @jax.checkpoint
    def one_layer(carry, inputs):
        V, log_weight = carry
        xi, to_go = inputs
        after, change = _propose(law, span, V, xi, to_go)
        there = to_go <= span.layers
        V = jnp.where(there, after, V)
        return (V, log_weight + jnp.where(there, change, 0.0)), V

    to_go = jnp.arange(most, most - latent, -1)
    start = (span.start, jnp.zeros_like(law.h))
    (V, log_weight), path = jax.lax.scan(one_layer, start, (innovations, to_go))
    if span.outputs:
        return log_weight + _outputs_log_density(V, span), path
    return log_weight + _arrival(law, span, V), path


def _propose(
    law: LayerLaw, span: Span, V: Float[Array, "m m batch"], xi: Float[Array, "p batch"], to_go: Int[Array, ""]
) -> tuple[Float[Array, "m m batch"], Float[Array, " batch"]]:
    """One layer of the bridge, and log p/q."""
    tokens, equal = len(V), identity_like(V)
    step = layer_step(law, V)
    slack, target = 0.0, span.end
    if span.outputs:
        slack, target = _as_observation(law, span)
    pull = 1 / (to_go + slack)
    kept = 1 - pull
    # Of log (I + Y)^p = p (Y − Y²/2).
    own = law.power * (step.mean - step.square / 2)
    towards = pull * _log(conjugated(step.R, target)) + (1 - to_go * pull) * own
    mean = towards / law.power
    mean = mean + (matmul(mean, mean) + kept * step.square) / 2
    # Rotated from a basis that depends on V smoothly, which that of the spectrum does not where δ repeats.
    noise = conjugated(transpose(step.rotation), xi[square_of(tokens)] * jnp.sqrt(1 + equal))
    Y = mean + jnp.sqrt(kept * step.variance / (1 + equal)) * noise
    p = tokens * (tokens + 1) // 2
    change = (p * jnp.log(kept) + _half(noise**2 / (1 + equal) - (Y - step.mean) ** 2 / step.variance)) / 2
    return gram(matmul(step.Q, _power(equal + Y, law.power // 2))), change


def _arrival(law: LayerLaw, span: Span, V: Float[Array, "m m batch"]) -> Float[Array, " batch"]:
    """Log density of the observed covariance one layer after V."""
    step = layer_step(law, V)
    powers, axes = eigh(conjugated(step.R, span.end))
    root = powers ** (1 / law.power)
    Y = matmul(axes * (root - 1)[None], transpose(axes))
    density = (Y - step.mean) ** 2 / step.variance + jnp.log(2 * jnp.pi * step.variance)
    # The Jacobian of F^p at F with eigenvalues x is Π_{i≤j} Σ_k x_i^k x_j^{p−1−k} = Π (x_i + x_j)(x_i² + x_j²)….
    jacobian = 0.0
    for doubling in range(law.power.bit_length() - 1):
        each = root ** (2**doubling)
        jacobian = jacobian + 2 * jnp.log(each[:, None] + each[None])
    return -_half(density + jacobian) / 2 - (len(V) + 1) * step.log_volume


def _power(F: Float[Array, "m m batch"], power: int) -> Float[Array, "m m batch"]:
    while power > 1:
        F, power = matmul(F, F), power // 2
    return F


def _outputs_log_density(V: Float[Array, "m m batch"], span: Span) -> Float[Array, " batch"]:
    """Log density of q outputs, X_out ~ N(0, V ⊗ I_q) (Eq. 21), which know X of X_out X_outᵀ/q only."""
    L = cholesky(V)
    inverse = invert_lower(L)
    fit = total(total(matmul(inverse, span.end) * inverse))
    log_det = 2 * total(jnp.log(diagonal(L)))
    return -span.outputs / 2 * (fit + log_det + len(V) * jnp.log(2 * jnp.pi))


def _as_observation(law: LayerLaw, span: Span) -> tuple[Float[Array, " batch"], Float[Array, "m m batch"]]:
    """How many layers have the variance of a sample covariance's error; and the latter, its logarithm unbiased.

    Fewer outputs than tokens, whose covariance is singular, do not guide.
    """
    tokens = len(span.start)
    if span.outputs < tokens:
        return jnp.full_like(law.h, jnp.inf), span.start
    noise = total(diagonal(law.noise)) / tokens
    return 1 / (span.outputs * law.h * noise), span.end * np.exp((tokens + 1) / (2 * span.outputs))


def _log(D: Float[Array, "m m batch"]) -> Float[Array, "m m batch"]:
    """Log D, saturating where D is far from the identity; a smooth function of it."""
    equal = identity_like(D)
    inverse = invert_lower(cholesky(D + equal))
    y = equal - 2 * matmul(transpose(inverse), inverse)
    square = matmul(y, y)
    series = equal / (2 * LOG_TERMS - 1) + jnp.zeros_like(y)
    for k in reversed(range(LOG_TERMS - 1)):
        series = equal / (2 * k + 1) + matmul(square, series)
    return 2 * matmul(y, series)


def _half(S: Float[Array, "m m batch"]) -> Float[Array, " batch"]:
    """The sum over i ≤ j of a symmetric matrix."""
    return (total(total(S)) + total(diagonal(S))) / 2
