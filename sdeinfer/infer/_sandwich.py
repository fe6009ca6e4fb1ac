"""Adjustment of the likelihood's curvature by the sandwich estimator, see `docs/theory/likelihood.md`.

The score of independent normals is unbiased, but its scatter J is not their information H. With P the curvature of the
priors at the mode û and G = H + P, both H and J of ℓ/φ:

    ℓ(û + C (u − û))/φ,    C = G^{−1/2} (I + G^{−1/2} (J − H) G^{−1/2})^{−1/2} G^{1/2}.

φ is the ratio of J to H averaged over all directions, which keeps C near the identity; dividing by φ is valid where ℓ
is not quadratic, too. The omitted terms of the softmax expansion shift the score by approximately a known vector, whose
outer product is added to J. J comes from exact layers, drawn at û from the starts of the transitions. Each draw depends
on its start and its place in the order of the information, so that J does not depend on the order of the networks.
"""

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Bool, Float, Int

from sdeinfer.covariance import Pattern
from sdeinfer.infer._innovations import Innovations, LawAt, innovations, law_at
from sdeinfer.infer._measures import logit_spread, mean_spread
from sdeinfer.layers import AbstractLayer
from sdeinfer.layers._finite_width import ATTENTION_DRIFT_NEXT, ATTENTION_NEXT
from sdeinfer.likelihood._path import Adjustment, no_adjustment
from sdeinfer.likelihood._terms import increments_of
from sdeinfer.likelihood._transitions import Path
from sdeinfer.networks import sample_layer

OMITTED_ORDER, OMITTED_ORDER_OF_TWO = 1.0, 2.0
"""Estimated omitted order of attention: −OMITTED_ORDER · s² times the last retained term, more for two tokens. Measured
in the variance that is free of attention in the limit: 1.5 to 2.4 for two equal tokens, 0.9 for three, 0.5 for
four."""

LARGEST_SPREAD = 0.75
"""Largest mean spread s of the logits at which the law is used; it determines `Adjustment.least_tau0`."""


class Scatter(NamedTuple):
    """The information H, estimates of J by parts of the draws, and what the omitted order adds to the score."""

    information: Float[np.ndarray, "k k"]
    parts: Float[np.ndarray, "parts k k"]
    bias: Float[np.ndarray, " k"]


def sandwich(
    path: Path,
    architecture: AbstractLayer,
    u: Float[np.ndarray, "*networks coordinates"],
    *,
    priors: Float[np.ndarray, "coordinates coordinates"],
    free: Bool[np.ndarray, "*networks coordinates"],
    data_per_sample: float,
) -> Adjustment:
    """The adjustment of a likelihood at û, without a shift.

    Where each network has its own layer and û, φ and C are common. The data have `data_per_sample` as many transitions
    as the path.
    """
    own_layers = u.ndim > 1
    layers = (
        [(path.of_networks(np.array([number])), point) for number, point in enumerate(u)] if own_layers else [(path, u)]
    )
    layers = [(transitions, point) for transitions, point in layers if len(transitions)]
    scatters = []
    for transitions, point in layers:
        law = law_at(architecture, point, widths=np.unique(transitions.width))
        draws = math.ceil(_draws(path) * len(transitions) / len(path))
        layer = architecture.with_coordinates(point)
        scatters.append(_scatter(transitions, law, layer, priors / data_per_sample, draws))
    information, parts, bias = (
        data_per_sample * np.sum(column, axis=0) for column in zip(*_of_one_length(scatters), strict=True)
    )
    varies = free.reshape(-1, u.shape[-1]).any(axis=0)
    matrix, dispersion, error = np.eye(u.shape[-1]), 1.0, 0.0
    if varies.any():
        block = np.ix_(varies, varies)
        H, P, bias = information[block], priors[block], bias[varies]
        scatter = parts.mean(axis=0)[block] + np.outer(bias, bias)
        dispersion = _dispersion(H, scatter, P)
        matrix[block] = _matrix(H / dispersion, scatter / dispersion**2, P)
        inverse, without_draws = np.linalg.inv(H + P), P + np.outer(bias, bias)
        sds = [np.sqrt(np.diagonal(inverse @ (part[block] + without_draws) @ inverse)) for part in parts]
        error = float(np.max(np.std(sds, axis=0) / np.mean(sds, axis=0)) / math.sqrt(max(len(sds) - 1, 1)))
    attends = architecture.coordinates.temperatures
    least_tau0 = mean_spread(_logit_scale(path, slice(None))) / LARGEST_SPREAD if attends else 0.0
    identity = no_adjustment(u.shape[-1], len(u) if own_layers else None)
    values = {"dispersion": dispersion, "least_tau0": least_tau0, "centre": u, "matrix": matrix, "error": error}
    arrays = {
        name: np.broadcast_to(np.asarray(x, jnp.result_type(float)), getattr(identity, name).shape)
        for name, x in values.items()
    }
    return dataclasses.replace(identity, **jax.device_put(arrays))


def _draws(path: Path) -> int:
    """Number of exact layers that are drawn: a layer costs O(m⁴), with a pattern the cube of its number of terms."""
    terms = path.tokens * (path.tokens + 1) // 2
    most = 2**18 if path.pattern.everything else 2**17
    return min(16_384, max(512, most // terms))


def _logit_scale(path: Path, block: slice | np.ndarray) -> np.ndarray:
    """Spread of the logits at the starts of transitions, times τ0."""
    return logit_spread(path.starts(block), path.width[path.network[block]], path.pattern)


def _scatter(path: Path, law: LawAt, layer: AbstractLayer, priors: np.ndarray, draws: int) -> Scatter:
    """The information and the scatter of the score at the mode, by draws of exact layers."""
    observed, bias, values = [], np.zeros(len(law.u)), layer.parameters()
    tau0 = min((float(values[name]) for name in layer.coordinates.temperatures), default=math.inf)
    of_each = np.zeros((len(path), *priors.shape))
    for batch in innovations(path, law):
        observed.append(batch.score)
        of_each[batch.transitions] = batch.information_of_each
        mean_left, variance_left = omitted_order(path, batch, law, tau0)
        bias += np.einsum("tp,tpk->k", mean_left, batch.mean)
        bias += np.einsum("tp,tpk->k", variance_left, batch.log_variance) / 2
    information = of_each.sum(axis=0)
    leverage = np.einsum("tkl,kl->t", of_each, np.linalg.inv(information + priors + 1e-9 * np.eye(len(priors))))
    parts = _drawn_scatters(path, law, layer, leverage, draws)
    if parts is None:
        scores = np.concatenate(observed)
        parts = (scores - scores.mean(axis=0)).T @ (scores - scores.mean(axis=0))[None]
    return Scatter(information, parts, bias)


def _drawn_scatters(
    path: Path, law: LawAt, layer: AbstractLayer, leverage: Float[np.ndarray, " transitions"], draws: int
) -> Float[np.ndarray, "parts k k"] | None:
    """Estimates of J by parts of the draws, whose scatter is their error; None if exact layers cannot be drawn.

    Transition t is drawn c_t times on average, by systematic sampling, and each draw has the weight 1/c_t. A quarter of
    the draws is divided equally, the others by the information, of which a few transitions hold most.
    """
    order = np.argsort(-leverage, kind="stable")
    by_information = leverage / max(leverage.sum(), np.finfo(float).tiny)
    expected = draws * (0.25 / len(path) + 0.75 * by_information)
    expected *= draws / expected.sum()
    last = np.floor(np.cumsum(expected[order]) + 0.5)
    chosen = np.repeat(order, np.diff(last, prepend=0.0).astype(int))
    starts = _with_sorted_tokens(path.starts(slice(None)), path.pattern)
    ends = sample_layer(layer, starts[chosen], width=path.width[path.network[chosen]], key=jr.key(0))
    if ends is None:
        return None
    weighted = _scores_of_ends(path, starts, law, chosen, ends) / np.sqrt(expected[chosen])[:, None]
    parts = min(16, len(chosen))
    return np.stack([parts * weighted[part::parts].T @ weighted[part::parts] for part in range(parts)])


def _scores_of_ends(
    path: Path,
    starts: Float[np.ndarray, "transitions m m"],
    law: LawAt,
    chosen: Int[np.ndarray, " draws"],
    ends: Float[np.ndarray, "draws m m"],
) -> Float[np.ndarray, "draws k"]:
    """Scores of layers from the starts of chosen transitions to given ends; each start is prepared once."""
    distinct, place = np.unique(chosen, return_inverse=True)
    widths = path.width[path.network[distinct]]
    stays = path.between(starts[distinct], starts[distinct], widths)
    order, scores = np.argsort(place, kind="stable"), np.empty((len(chosen), len(law.u)))
    for batch in innovations(stays, law):
        block = batch.transitions
        first, last = np.searchsorted(place[order], [block[0], block[-1] + 1])
        drawn = order[first:last]
        origin = place[drawn] - block[0]
        z = increments_of(stays.coordinates(block), origin, ends[drawn] - starts[chosen[drawn]], widths[place[drawn]])
        moved = batch._replace(
            y=batch.y[origin] + z / batch.sd[origin], mean=batch.mean[origin], log_variance=batch.log_variance[origin]
        )
        scores[drawn] = moved.score
    return scores


def _with_sorted_tokens(V: Float[np.ndarray, "some m m"], pattern: Pattern) -> Float[np.ndarray, "some m m"]:
    """The covariances with exchangeable tokens in an order that depends on their entries alone."""
    if pattern.causal or pattern.rows:
        return V
    prompt = np.repeat(np.arange(max(len(pattern.prompts), 1)), pattern.prompts or V.shape[-1])
    rows, norms = np.sort(V, axis=-1), np.diagonal(V, axis1=-2, axis2=-1)
    keys = [*np.moveaxis(rows, -1, 0), norms, np.broadcast_to(prompt, norms.shape)]
    order = np.lexsort(keys, axis=-1)
    return np.take_along_axis(np.take_along_axis(V, order[..., None], -2), order[..., None, :], -1)


def _of_one_length(scatters: list[Scatter]) -> list[Scatter]:
    """Scatters with equally many parts: one, if one of them has one."""
    least = min(len(scatter.parts) for scatter in scatters)
    return [
        scatter._replace(parts=np.stack([scatter.parts[part::least].mean(axis=0) for part in range(least)]))
        for scatter in scatters
    ]


def omitted_order(path: Path, batch: Innovations, law: LawAt, tau0: float) -> tuple[np.ndarray, np.ndarray]:
    """Estimate of the order of the softmax that the law omits, see `OMITTED_ORDER`, of some transitions of a path."""
    largest = OMITTED_ORDER_OF_TWO if path.tokens == 2 else OMITTED_ORDER
    block, terms = batch.transitions, batch.terms
    omitted = largest * np.minimum(_logit_scale(path, block) / tau0, 1.0)[:, None] ** 2
    moments = law.moments.at(path.width_index(law.widths, block))
    theta, drift = moments.drift[:, ATTENTION_DRIFT_NEXT, None], terms.drift[:, ATTENTION_DRIFT_NEXT]
    mean = omitted * theta * drift / batch.sd
    variance = omitted * moments.variance[:, ATTENTION_NEXT, None] * terms.variance[:, ATTENTION_NEXT]
    return np.asarray(mean), np.asarray(variance / batch.sd**2)


def _dispersion(information: np.ndarray, scatter: np.ndarray, priors: np.ndarray) -> float:
    """φ of the module's docstring; 1 without information."""
    _, inverse = _roots(information + priors)
    of_information, of_scatter = (np.trace(inverse @ part @ inverse) for part in (information, scatter))
    return (of_scatter + 1e-3) / (of_information + 1e-3)  # tends to 1 where the information is negligible


def _matrix(information: np.ndarray, scatter: np.ndarray, priors: np.ndarray) -> np.ndarray:
    """C of the module's docstring."""
    root, inverse = _roots(information + priors)
    # I + G^{−1/2} (J − H) G^{−1/2} without the cancellation: G is H and the curvature of the priors.
    _, shrunk = _roots(inverse @ (scatter + priors) @ inverse)
    return inverse @ shrunk @ root


def _roots(matrix: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The square roots of a positive definite matrix and of its inverse; its eigenvalues are known up to rounding."""
    values, vectors = np.linalg.eigh((matrix + matrix.T) / 2)
    root = np.sqrt(np.maximum(values, np.finfo(np.float64).eps * values[-1]))
    return (vectors * root) @ vectors.T, (vectors / root) @ vectors.T
