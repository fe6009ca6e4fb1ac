"""Latent layers between two observations, proposed by bridges towards the second one, and their NumPyro law.

Given θ, the layers between two observations have the law p of `LayerLaw`. A bridge proposes them from q as a function
of independent standard normals u (the "innovations"), which are the latent variables of a model. Then

    p(observation | start, θ) = E_u[ w(θ, u) ],    w = Π p(V_{ℓ+1} | V_ℓ)/q(V_{ℓ+1} | V_ℓ, observation),

and with u ~ N(0, I) a priori, log w is the log likelihood of the observation given (θ, u). The better the bridge, the
less w varies with u, and the closer the posterior of u is to N(0, I).

The bridge works in relative coordinates, where every layer has the same noise. With R V_end Rᵀ = exp Λ and r layers to
go, the next layer has mean Λ/r and 1 − 1/r of a layer's variance. This is the exact bridge for commuting steps and
noise independent of V. An observation with error, such as outputs instead of their covariance, is treated as lying
further layers away: as many as have the variance of the error.
"""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float, Int
from numpyro.distributions import Distribution, constraints

from sdeinfer._threads import on_cpu
from sdeinfer.covariance._batched import cholesky, diagonal, gram, identity_like, invert_lower, matmul, total, transpose
from sdeinfer.covariance._eigen import eigh
from sdeinfer.covariance._matrix import square_of
from sdeinfer.layers import AbstractLayer, Limit
from sdeinfer.layers._finite_width import ATTENTION_NEXT
from sdeinfer.likelihood._assumptions import NOTHING_ASSUMED, Assumptions
from sdeinfer.likelihood._layer_step import LayerLaw, conjugated, layer_step, power_of
from sdeinfer.likelihood._terms import moments_of
from sdeinfer.likelihood._transitions import Path


class Span(eqx.Module):
    """Pairs of observations with `layers` from one to the next, as a batch; `end` is X Xᵀ/q of q `outputs` X if any."""

    start: Float[Array, "m m batch"]
    end: Float[Array, "m m batch"]
    layers: Int[Array, " batch"]
    outputs: int = eqx.field(static=True, default=0)


def bridge(
    law: LayerLaw, span: Span, innovations: Float[Array, "latent p batch"]
) -> tuple[Float[Array, " batch"], Float[Array, "latent m m batch"]]:
    """Log w of the latent layers from the innovations, and these layers; short spans leave the first ones unused."""
    latent = len(innovations)
    most = latent + (0 if span.outputs else 1)

    @jax.checkpoint
    def one_layer(carry, inputs):
        V, log_weight = carry
        xi, to_go = inputs
        after, change = _propose(law, span, V, xi, to_go)
        active = to_go <= span.layers
        V = jnp.where(active, after, V)
        return (V, log_weight + jnp.where(active, change, 0.0)), V

    to_go = jnp.arange(most, most - latent, -1)
    start = (span.start, jnp.zeros_like(law.h))
    (V, log_weight), path = jax.lax.scan(one_layer, start, (innovations, to_go))
    if span.outputs:
        return log_weight + _outputs_log_density(V, span), path
    return log_weight + _arrival(law, span, V), path


def _propose(
    law: LayerLaw, span: Span, V: Float[Array, "m m batch"], xi: Float[Array, "p batch"], to_go: Int[Array, ""]
) -> tuple[Float[Array, "m m batch"], Float[Array, " batch"]]:
    """Propose one layer of the bridge; also return log p/q."""
    tokens, equal = len(V), identity_like(V)
    step = layer_step(law, V)
    slack, target = 0.0, span.end
    if span.outputs:
        slack, target = _as_observation(law, span)
    pull = 1 / (to_go + slack)
    share = 1 - pull
    # log (I + Y)^p = p (Y − Y²/2) to second order.
    drift = law.power * (step.mean - step.square / 2)
    towards = pull * _log(conjugated(step.R, target)) + (1 - to_go * pull) * drift
    mean = towards / law.power
    mean = mean + (matmul(mean, mean) + share * step.square) / 2
    # Noise is rotated from a basis that is smooth in V; the spectral basis is not smooth at repeated δ.
    noise = conjugated(transpose(step.rotation), xi[square_of(tokens)] * jnp.sqrt(1 + equal))
    Y = mean + jnp.sqrt(share * step.variance / (1 + equal)) * noise
    p = tokens * (tokens + 1) // 2
    change = (p * jnp.log(share) + _half(noise**2 / (1 + equal) - (Y - step.mean) ** 2 / step.variance)) / 2
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
        x = root ** (2**doubling)
        jacobian = jacobian + 2 * jnp.log(x[:, None] + x[None])
    return -_half(density + jacobian) / 2 - (len(V) + 1) * step.log_volume


def _power(F: Float[Array, "m m batch"], power: int) -> Float[Array, "m m batch"]:
    while power > 1:
        F, power = matmul(F, F), power // 2
    return F


def _outputs_log_density(V: Float[Array, "m m batch"], span: Span) -> Float[Array, " batch"]:
    """Log density of q outputs X_out ~ N(0, V ⊗ I_q) (Eq. 21), a function of X_out X_outᵀ/q."""
    L = cholesky(V)
    inverse = invert_lower(L)
    fit = total(total(matmul(inverse, span.end) * inverse))
    log_det = 2 * total(jnp.log(diagonal(L)))
    return -span.outputs / 2 * (fit + log_det + len(V) * jnp.log(2 * jnp.pi))


def _as_observation(law: LayerLaw, span: Span) -> tuple[Float[Array, " batch"], Float[Array, "m m batch"]]:
    """The number of layers with the variance of the sample covariance's error, and that covariance, debiased in log."""
    tokens = len(span.start)
    if span.outputs < tokens:  # it is singular, and not used
        return jnp.full_like(law.h, jnp.inf), span.start
    noise = total(diagonal(law.noise)) / tokens
    return 1 / (span.outputs * law.h * noise), span.end * np.exp((tokens + 1) / (2 * span.outputs))


def _log(D: Float[Array, "m m batch"]) -> Float[Array, "m m batch"]:
    """Truncated series of log D, smooth, and saturating for D far from the identity."""
    equal, terms = identity_like(D), 4  # of log x = 2 (y + y³/3 + …), y = (x − 1)/(x + 1): accurate for x < 5
    inverse = invert_lower(cholesky(D + equal))
    y = equal - 2 * matmul(transpose(inverse), inverse)
    square = matmul(y, y)
    series = equal / (2 * terms - 1) + jnp.zeros_like(y)
    for k in reversed(range(terms - 1)):
        series = equal / (2 * k + 1) + matmul(square, series)
    return 2 * matmul(y, series)


def _half(S: Float[Array, "m m batch"]) -> Float[Array, " batch"]:
    """The sum over i ≤ j of a symmetric matrix."""
    return (total(total(S)) + total(diagonal(S))) / 2


class Bridges(eqx.Module):
    """Consecutive observations of networks, with latent layers between them."""

    start: Float[Array, "bridges m m"]
    end: Float[Array, "bridges m m"]
    layers: Int[Array, " bridges"]
    network: Int[Array, " bridges"]
    width: Int[Array, " bridges"]
    widths: Float[Array, " widths"]
    more_drift: Float[Array, "bridges 2 m m"]
    features: Float[Array, "bridges features p"]
    centre: Float[Array, "features p"]
    networks: int = eqx.field(static=True)
    latent: int = eqx.field(static=True)
    outputs: int = eqx.field(static=True, default=0)
    assumptions: Assumptions = eqx.field(static=True, default=NOTHING_ASSUMED)

    @property
    def innovations(self) -> tuple[int, int]:
        """Shape (latent, p) of the standard normals of one bridge."""
        return self.latent, self.centre.shape[-1]

    def __len__(self) -> int:
        return self.start.shape[0]

    def by_network(self, of_bridges: Float[Array, " bridges"]) -> Float[Array, " networks"]:
        """Sum over the bridges of each network."""
        return jnp.zeros(self.networks, of_bridges.dtype).at[self.network].add(of_bridges)


def bridges_of(path: Path, assumptions: Assumptions = NOTHING_ASSUMED) -> Bridges:
    """Make one bridge for each transition of a path."""
    path.require_densities(ends=not path.outputs)
    layers, whole = path.gap[path.layer], slice(None)
    more_drift, features = path.next_order()
    # Medians, since the features of an exploding covariance are larger by many orders of magnitude.
    centre = np.median(features, axis=0)
    centre[ATTENTION_NEXT] = 0.0
    widths = np.unique(path.width)
    return Bridges(
        start=jnp.asarray(path.starts(whole), float),
        end=jnp.asarray(path.ends(whole), float),
        layers=jnp.asarray(layers),
        network=jnp.asarray(path.network),
        width=jnp.asarray(path.width_index(widths)),
        widths=jnp.asarray(widths, float),
        more_drift=jnp.asarray(more_drift, float),
        features=jnp.asarray(features, float),
        centre=jnp.asarray(centre, float),
        networks=len(path.width),
        latent=int(layers.max()) - (not path.outputs),  # of an observed covariance the last layer is known
        outputs=path.outputs,
        assumptions=assumptions,
    )


class Bridged(Distribution):
    """Law of the observations given the innovations of the latent layers: log w of `bridge`, for each bridge."""

    arg_constraints: dict[str, Any] = {}
    pytree_data_fields = ("layer", "law", "bridges", "innovations")
    pytree_aux_fields = ("power",)
    support = constraints.independent(constraints.real, 2)  # pyright: ignore[reportAssignmentType, reportIncompatibleMethodOverride]

    def __init__(
        self,
        layer: AbstractLayer,
        bridges: Bridges,
        innovations: Float[Array, "bridges latent p"],
        *,
        validate_args: bool | None = None,
    ):
        self.layer = layer
        limit = bridges.assumptions.law == "limit"
        self.law = layer.limit() if limit else jax.vmap(layer.finite_width)(bridges.widths)
        self.bridges = bridges
        self.innovations = innovations
        self.power = power_of(layer.skewness)
        super().__init__((len(bridges),), bridges.end.shape[1:], validate_args=validate_args)

    def log_prob(self, value: ArrayLike, intermediates: list | None = None) -> Float[Array, " bridges"]:
        """Log density of the ends, covariances or X Xᵀ/q of outputs X, shape (bridges, m, m)."""
        del intermediates
        bridges, count, ends = self.bridges, len(self.bridges), jnp.asarray(value)
        together = 256 if on_cpu() else count  # whose arrays of one layer fit in the cache
        blocks = -(-count // together)
        size = -(-count // blocks)
        arrays = (bridges.start, ends, bridges.layers, bridges.width, bridges.more_drift, bridges.features)
        # The last block is padded with copies of the last bridge.
        index = jnp.minimum(jnp.arange(blocks * size), count - 1).reshape(blocks, size)
        columns = jax.tree.map(lambda x: x[index], (*arrays, self.innovations))
        law_of_block = self._law_of_block()

        def block(columns):
            start, end, layers, width, more_drift, features, innovations = (jnp.moveaxis(x, 0, -1) for x in columns)
            law = law_of_block(width, more_drift, features)
            return bridge(law, Span(start, end, layers, bridges.outputs), innovations)[0]

        return jax.lax.map(block, columns).reshape(-1)[:count]

    def _law_of_block(self) -> Callable[[Array, Array, Array], LayerLaw]:
        """Return a function from width indices, drift terms and features of bridges to the law of their layers."""
        bridges, law = self.bridges, self.law
        tokens = bridges.start.shape[-1]
        if isinstance(law, Limit):
            h = 1 / bridges.widths
            return lambda width, more_drift, features: LayerLaw.of_limit(law, h[width], tokens=tokens, power=self.power)
        moments = jax.vmap(lambda law: moments_of(law, bridges.centre))(law)

        def of_moments(width: Array, more_drift: Array, features: Array) -> LayerLaw:
            deviations = (features - bridges.centre[..., None])[:, square_of(tokens)]
            of_width = jax.tree.map(lambda x: x[width], moments)
            return LayerLaw.of_moments(of_width, more_drift, deviations, 1 / bridges.widths[width], power=self.power)

        return of_moments
