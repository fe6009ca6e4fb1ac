"""Gradients over depth, and exponents of angles and gradients, from tangents of the covariance SDE (Fig. 2).

The exponents are the criteria of trainability of Cowsik et al. (2024, arXiv:2403.02579).
"""

from typing import Literal, NamedTuple

import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pandas as pd
from jaxtyping import Array, Float, PRNGKeyArray
from numpy.typing import ArrayLike

from sdeinfer._files import InputError
from sdeinfer.covariance._factors import factor_on_host
from sdeinfer.covariance._matrix import validate_covariance
from sdeinfer.covariance._pattern import centring
from sdeinfer.layers import AbstractLayer, ShapedAttention, ShapedTransformer, Stack
from sdeinfer.solve import TangentPaths, simulate, tangents
from sdeinfer.solve._grid import STEP
from sdeinfer.solve._tangents import tangents_from


def squared_jacobian_norm(paths: TangentPaths) -> Float[Array, "paths times"]:
    """The squared norm tr D_t of the change of all tokens by the tangent, over n.

    Its mean over random directions is the squared Frobenius norm of a Jacobian over n: for `directions` e_βe_βᵀ that of
    ∂X_t/∂x_β, and for the identity that of ∂X_t/∂X_0.
    """
    return jnp.trace(paths.tangent, axis1=-2, axis2=-1)


class GradientNorms(NamedTuple):
    """Squared norms of gradients at some depth-times, over networks.

    Attributes:
        times: the depth-times, shape (times,).
        norms: the squared norms, +∞ for a path that explodes; shape (paths, times, m) for the gradients of tokens, and
            (paths, times, 1) for those of weights.
    """

    times: np.ndarray
    norms: np.ndarray

    def quantiles(self, levels: ArrayLike) -> Float[np.ndarray, "*levels times m"]:
        """Quantiles over networks, for one level or an array of levels."""
        return np.quantile(self.norms, np.asarray(levels), axis=0, method="closest_observation")


def gradient_norms(
    layer: AbstractLayer,
    V0: Float[Array | np.ndarray, "m m"],
    ts: ArrayLike,
    *,
    time: float,
    of: Literal["tokens", "values", "queries"] = "tokens",
    paths: int,
    step: float = STEP,
    key: PRNGKeyArray,
) -> GradientNorms:
    """Squared norms of the gradients that reach depth-times ts, for white gradients of the outputs at the last time.

    Let G = ∂L/∂X at the end have independent N(0, 1) entries. The squared norm of the gradient of token β at time t,
    over n, has the law of tr D of a tangent that starts at time t in a random direction at token β, and the mean
    ‖J_β‖_F²/n over G, J_β being the Jacobian of the outputs by this token. The law is for one G: an average over
    several, as `networks.sample_gradients(..., cotangents=8)` gives, has the same mean and a smaller spread.

    A change of the weights of attention at time t makes a tangent there (Fig. 2). The squared norm of the gradient of
    the value weights, over n, is tr D of one that starts with D = γ²V; that of the query weights, not over n, of one
    that starts with D = γ²/τ0² A V Aᵀ, row α of A being y_α H_α/m_α, and y normal with covariance V ⊗ V; with several
    heads, with the mean of D over heads. Its mean is γ²/τ0² V ∘ T, T_αβ = tr(V H_α V H_β)/(m_α m_β).

    Arguments:
        layer: the architecture, with its parameters.
        V0: covariance of the tokens at time 0, shape (m, m).
        ts: depth-times in [0, time), increasing.
        time: depth-time of the outputs.
        of: gradients of tokens, of the value weights or of the query weights of the layer at each time.
        paths: number of independent paths.
        step: longest step in depth-time.
        key: PRNG key.

    Raises:
        InputError: as `simulate`, for times that are not in [0, time), and for weights of a layer without τ0.
    """
    times = np.asarray(ts, float)
    if times.ndim != 1 or not len(times) or times[0] < 0 or times[-1] >= time or (np.diff(times) <= 0).any():
        raise InputError(f"ts: increasing depth-times from 0 to less than {time:g} are needed, got {times.tolist()}")
    attention = _attention_in(layer)
    if of != "tokens" and (of not in ("values", "queries") or len(attention) != 1):
        raise InputError(
            "of: tokens, or values or queries of a layer with one ShapedAttention or ShapedTransformer, is needed; got "
            f"{of!r}"
        )
    V = np.asarray(simulate(layer, V0, times, paths=paths, step=step, key=jr.fold_in(key, 0)))
    of_tokens = [np.diag(row)[None] for row in np.eye(len(V0), dtype=V.dtype)]
    norms = []
    for number, left in enumerate(time - times):
        key_start, *keys = jr.split(jr.fold_in(key, number + 1), len(V0) + 1)
        covariance = V[:, number]
        starts = of_tokens if of == "tokens" else [_of_weights(attention[0], covariance, of, key_start)]
        ends = [
            tangents_from(layer, covariance, [left], D0, step=step, key=key_tangent)
            for D0, key_tangent in zip(starts, keys, strict=False)  # weights have one start
        ]
        norms.append(np.stack([np.asarray(squared_jacobian_norm(end))[:, 0] for end in ends], axis=-1))
    return GradientNorms(times, np.stack(norms, axis=1))


def _of_weights(layer: ShapedAttention | ShapedTransformer, V: np.ndarray, of: str, key: PRNGKeyArray) -> np.ndarray:
    """The D from which the tangent of a change of the weights of attention starts."""
    tokens, heads = V.shape[-1], layer.heads
    finite = np.where(np.isfinite(V).all(axis=(1, 2), keepdims=True), V, np.eye(tokens, dtype=V.dtype))
    variance, tau0 = float(layer.gamma) ** 2, float(layer.tau0)
    if of == "values":
        return variance * finite
    L = factor_on_host(finite)[:, None]
    y = L @ np.asarray(jr.normal(key, (len(V), heads, tokens, tokens), V.dtype)) @ np.swapaxes(L, -1, -2)
    _, differences, selected, _ = centring(layer.pattern, tokens)
    F = (y @ differences.T * selected) @ differences @ L
    return (variance / tau0**2 * np.mean(F @ np.swapaxes(F, -1, -2), axis=1)).astype(V.dtype)


def _attention_in(layer: AbstractLayer) -> list[ShapedAttention | ShapedTransformer]:
    """The layers with the attention of the package, whose γ and heads are known."""
    match layer:
        case Stack():
            return [attention for part in layer.layers for attention in _attention_in(part)]
        case ShapedAttention() | ShapedTransformer():
            return [layer]
    return []


class Exponents(NamedTuple):
    """Growth rates per unit of depth-time, of each path.

    Attributes:
        angle: of 1 − ρ for two tokens that nearly coincide: negative where tokens merge; shape (paths,).
        gradient: of tr D from random directions at all tokens, and of the squared norm of the gradients of all tokens
            from one white gradient of the outputs: negative where gradients vanish; shape (paths,).
    """

    angle: Float[Array, " paths"]
    gradient: Float[Array, " paths"]

    def summary(self) -> pd.DataFrame:
        """Mean and spread over networks, of the paths that do not explode; and the fraction that does."""
        rows = {}
        for name, rate in zip(self._fields, map(np.asarray, self), strict=True):
            finite = rate[np.isfinite(rate)]
            low, high = np.quantile(finite, [0.05, 0.95]) if len(finite) else (np.nan, np.nan)
            mean, sd = (finite.mean(), finite.std(ddof=1)) if len(finite) > 1 else (np.nan, np.nan)
            rows[name] = {"mean": mean, "sd": sd, "5%": low, "95%": high, "exploded": 1 - len(finite) / len(rate)}
        return pd.DataFrame.from_dict(rows, orient="index")


def exponents(
    layer: AbstractLayer,
    V0: Float[Array | np.ndarray, "m m"],
    time: float,
    *,
    token: int = 0,
    paths: int,
    step: float = STEP,
    key: PRNGKeyArray,
) -> Exponents:
    """The angle and the gradient exponent over [0, time].

    Let x and x + εu be two near tokens of one prompt, with a tangent u. 1 − ρ between them is ε²/2 times
    (‖u‖² − (x·u)²/‖x‖²)/‖x‖²; its growth is the angle exponent. The gradient exponent is
    log(tr D_time/tr D_0)/time from D_0 = I. Both are differentiable in the layer's parameters.

    Arguments:
        layer: the architecture, with its parameters.
        V0: covariance of the tokens at time 0, shape (m, m).
        time: depth-time.
        token: the token that is repeated, and parted from its copy.
        paths: number of independent paths.
        step: longest step in depth-time.
        key: PRNG key.

    Raises:
        InputError: as `simulate`, for a token that V0 does not have, and for attention with a pattern: a token and its
            copy would attend to different tokens, and part however near they start.
    """
    if not layer.limit().pattern.everything:
        raise InputError("layer: exponents of a token and its copy need attention without a mask")
    key_angle, key_gradient = jr.split(key)
    repeated, directions = repeated_token(V0, token)
    pair = tangents(layer, repeated, [time], directions, paths=paths, step=step, key=key_angle)
    identity = jnp.eye(len(V0), dtype=repeated.dtype)
    all_tokens = tangents(layer, V0, [time], identity, paths=paths, step=step, key=key_gradient)
    x = pair.covariance[:, 0, token, token]
    u = pair.tangent[:, 0, token, token] + pair.tangent[:, 0, -1, -1] - 2 * pair.tangent[:, 0, token, -1]
    along = pair.cross[:, 0, token, token] - pair.cross[:, 0, token, -1]
    angle = (u - along**2 / x) / x
    start = 1 / jnp.asarray(V0)[token, token]
    jacobian = squared_jacobian_norm(all_tokens)[:, 0] / len(V0)
    return Exponents(_rate(angle / start, pair.time, time), _rate(jacobian, all_tokens.time, time))


def _rate(growth: Float[Array, " paths"], stopped: Float[Array, " paths"], time: float) -> Float[Array, " paths"]:
    """log(growth)/time; NaN for paths that explode, whose value must not enter a derivative."""
    runs = jnp.isposinf(jnp.asarray(stopped))
    return jnp.where(runs, jnp.log(jnp.where(runs, growth, 1.0)) / time, jnp.nan)


def repeated_token(
    V0: Float[Array | np.ndarray, "m m"], token: int
) -> tuple[Float[Array | np.ndarray, "m+1 m+1"], Float[np.ndarray, "m+1 m+1"]]:
    """V0 with a copy of a token as the last one, and the `directions` of a tangent that parts the two.

    The token and its copy move by u/2 and −u/2, in a random direction with ‖u‖² = n.
    """
    V = validate_covariance(V0)
    if not 0 <= token < len(V):
        raise InputError(f"token: 0 to {len(V) - 1} is needed, got {token}")
    index = [*range(len(V)), token]
    apart = np.zeros(len(index), V.dtype)
    apart[token], apart[-1] = 0.5, -0.5
    return V[np.ix_(index, index)], np.outer(apart, apart)
