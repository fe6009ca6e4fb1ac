"""Norms of Jacobians and gradients over depth, from tangents of the covariance SDE (Fig. 2)."""

from typing import Literal, NamedTuple

import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray
from numpy.typing import ArrayLike

from sdeinfer._files import InputError
from sdeinfer.covariance import centring, factor_on_host
from sdeinfer.layers import AbstractLayer, ShapedAttention, ShapedTransformer, Stack
from sdeinfer.solve import STEP, TangentPaths, simulate, tangents_from


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
    found = []
    for number, left in enumerate(time - times):
        key_start, *keys = jr.split(jr.fold_in(key, number + 1), len(V0) + 1)
        at = V[:, number]
        starts = of_tokens if of == "tokens" else [_of_weights(attention[0], at, of, key_start)]
        ends = [
            tangents_from(layer, at, [left], D0, step=step, key=each)
            for D0, each in zip(starts, keys, strict=False)  # weights have one start
        ]
        found.append(np.stack([np.asarray(squared_jacobian_norm(end))[:, 0] for end in ends], axis=-1))
    return GradientNorms(times, np.stack(found, axis=1))


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
            return [each for part in layer.layers for each in _attention_in(part)]
        case ShapedAttention() | ShapedTransformer():
            return [layer]
    return []
