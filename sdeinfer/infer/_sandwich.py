"""Adjustment of the likelihood's curvature by the sandwich estimator.

At width n the increments of one layer are normal only up to O(1/n), and their squares are correlated. The score remains
unbiased, but a likelihood of independent normals gives too small standard deviations: by up to one half for γ near 1
and n = 32, by a few percent at n = 512. As in composite likelihoods (Ribatet, Cooley and Davison 2012), the log
likelihood is divided by a dispersion φ and its argument is transformed linearly about the mode û, so that its curvature
at û agrees with the scatter of the score. With H the information and J the covariance of the score, both of ℓ/φ, P the
curvature of the priors at û, and G = H + P:

    ℓ(û + C (u − û))/φ,    C = G^{−1/2} (I + G^{−1/2} (J − H) G^{−1/2})^{−1/2} G^{1/2}.

For informative data this is the sandwich, CᵀHC = H J⁻¹ H; without information C is the identity. φ is the ratio of J to
H averaged over all directions, which keeps C near the identity; dividing by φ remains valid where ℓ is not quadratic.
The omitted terms of the softmax expansion shift the score by approximately a known vector, whose outer product is added
to J.

J is the sum over transitions of the covariance of their scores under exact layers. A few transitions, those with the
largest logits, hold most of the information on τ0, and their scores have heavy tails: the squares of the observed
scores would give J to 10 to 30 % only. Exact layers are therefore drawn at û from the starts of the transitions, most
of them where the information is. Each draw depends on its start and its place in the order of the information, so that
J depends neither on the order of the networks nor on that of exchangeable tokens.
"""

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
from sdeinfer.likelihood._path import Adjustment
from sdeinfer.likelihood._terms import increments_of
from sdeinfer.likelihood._transitions import Path
from sdeinfer.networks import sample_layer

DRAWS, DRAWN_TERMS, FEWEST_DRAWS = 16_384, 2**18, 512
"""Number of exact layers that are drawn; with many tokens as many as have so many terms, m(m + 1)/2 each, but not less
than the third number: a layer costs O(m⁴)."""

DRAWN_TERMS_OF_PATTERN = 2**17
"""As `DRAWN_TERMS`, with an attention pattern, where a layer costs the cube of its number of terms."""

EVENLY = 0.25
"""Share of the draws that is divided equally among the transitions; the others are divided by their information."""

PARTS = 16
"""Number of parts of the draws whose estimates give the Monte Carlo error of the standard deviations."""

OMITTED, OMITTED_OF_TWO = 1.0, 2.0
"""Estimated omitted order of attention: −OMITTED · s² times the last retained term, with a larger value for two tokens.
Measured in the variance that is free of attention in the limit: 1.5 to 2.4 for two equal tokens, 0.9 for three, 0.5 for
four."""

LARGEST_SPREAD = 0.75
"""Largest mean spread s of the logits at which the law is used; it determines `Adjustment.least_tau0`."""

NEGLIGIBLE = 1e-3
"""Regularisation of φ: information, relative to the priors', below which φ tends to 1."""


class Scatter(NamedTuple):
    """The information and the scatter of the score of one layer's transitions.

    Attributes:
        information: H, that of independent normals.
        parts: estimates of J by parts of the draws; one if the scores are those observed.
        shift: effect of the omitted order on the score, see `OMITTED`.
    """

    information: Float[np.ndarray, "k k"]
    parts: Float[np.ndarray, "parts k k"]
    shift: Float[np.ndarray, " k"]


def sandwich(
    path: Path,
    architecture: AbstractLayer,
    u: Float[np.ndarray, "*networks coordinates"],
    *,
    priors: Float[np.ndarray, "coordinates coordinates"],
    free: Bool[np.ndarray, "*networks coordinates"] | None = None,
    times: float,
) -> Adjustment:
    """The adjustment of a likelihood.

    If each network has its own layer, û differs between networks, and φ and C are common.
    """
    own = u.ndim > 1
    parts = [(path.of_networks(np.array([number])), here) for number, here in enumerate(u)] if own else [(path, u)]
    parts = [(part, here) for part, here in parts if len(part)]
    found = []
    for part, here in parts:
        law = law_at(architecture, here, widths=np.unique(part.width))
        draws = math.ceil(_draws(path) * len(part) / len(path))
        found.append(_scatter(part, law, architecture.with_coordinates(here), priors / times, draws))
    information, scatters, shift = (times * np.sum(each, axis=0) for each in zip(*_of_one_length(found), strict=True))
    varies = np.ones(u.shape[-1], bool) if free is None else free.reshape(-1, u.shape[-1]).any(axis=0)
    matrix, dispersion, error = np.eye(u.shape[-1]), 1.0, 0.0
    if varies.any():
        block = np.ix_(varies, varies)
        H, P, shift = information[block], priors[block], shift[varies]
        scatter = scatters.mean(axis=0)[block] + np.outer(shift, shift)
        dispersion = _dispersion(H, scatter, P)
        matrix[block] = _matrix(H / dispersion, scatter / dispersion**2, P)
        each = [np.sqrt(_variances(H, part[block] + np.outer(shift, shift), P)) for part in scatters]
        error = float(np.max(np.std(each, axis=0) / np.mean(each, axis=0)) / math.sqrt(max(len(each) - 1, 1)))
    attends = np.isfinite(_smallest_tau0(architecture.with_coordinates(parts[0][1])))
    least_tau0 = mean_spread(_logit_scale(path, slice(None))) / LARGEST_SPREAD if attends else 0.0
    values = (dispersion, least_tau0, u, matrix, np.zeros_like(u), error)
    if own:
        axes = ((), (), (u.shape[-1],), matrix.shape, (u.shape[-1],), ())
        values = tuple(np.broadcast_to(x, (len(u), *shape)) for x, shape in zip(values, axes, strict=True))
    return Adjustment(*jax.device_put([np.asarray(x, jnp.result_type(float)) for x in values]))


def _draws(path: Path) -> int:
    """Number of exact layers that are drawn."""
    terms = path.tokens * (path.tokens + 1) // 2
    most = DRAWN_TERMS if path.pattern.everything else DRAWN_TERMS_OF_PATTERN
    return min(DRAWS, max(FEWEST_DRAWS, most // terms))


def _smallest_tau0(layer: AbstractLayer) -> float:
    """Smallest softmax temperature τ0 of a layer; +∞ without attention."""
    values = layer.parameters()
    return min((float(values[name]) for name in layer.coordinates.temperatures), default=math.inf)


def _logit_scale(path: Path, block: slice | np.ndarray) -> np.ndarray:
    """Spread of the logits at the starts of transitions, times τ0."""
    return logit_spread(path.starts(block), path.width[path.network[block]], path.pattern)


def _scatter(path: Path, law: LawAt, layer: AbstractLayer, priors: np.ndarray, draws: int) -> Scatter:
    """The information and the scatter of the score at the mode, summed over transitions, by draws of exact layers.

    `priors` is the curvature of the priors, per sample of the transitions.
    """
    observed, shift, tau0 = [], np.zeros(len(law.u)), _smallest_tau0(layer)
    of_each = np.zeros((len(path), *priors.shape))
    for here in innovations(path, law):
        observed.append(here.score)
        of_each[here.transitions] = here.information_of_each
        mean_left, variance_left = omitted_order(path, here, law, tau0)
        shift += np.einsum("tp,tpk->k", mean_left, here.mean)
        shift += np.einsum("tp,tpk->k", variance_left, here.log_variance) / 2
    information = of_each.sum(axis=0)
    leverage = np.einsum("tkl,kl->t", of_each, np.linalg.inv(information + priors + 1e-9 * np.eye(len(priors))))
    parts = _drawn_scatters(path, law, layer, leverage, draws)
    if parts is None:
        scores = np.concatenate(observed)
        parts = (scores - scores.mean(axis=0)).T @ (scores - scores.mean(axis=0))[None]
    return Scatter(information, parts, shift)


def _drawn_scatters(
    path: Path, law: LawAt, layer: AbstractLayer, leverage: Float[np.ndarray, " transitions"], draws: int
) -> Float[np.ndarray, "parts k k"] | None:
    """Estimates of J by parts of the draws; None if exact layers cannot be drawn.

    Transition t is drawn c_t times on average, by systematic sampling in the order of the leverages, and each draw has
    the weight 1/c_t.
    """
    order = np.argsort(-leverage, kind="stable")
    by_information = leverage / max(leverage.sum(), np.finfo(float).tiny)
    expected = draws * (EVENLY / len(path) + (1 - EVENLY) * by_information)
    expected *= draws / expected.sum()
    last = np.floor(np.cumsum(expected[order]) + 0.5)
    chosen = np.repeat(order, np.diff(last, prepend=0.0).astype(int))
    starts = _with_sorted_tokens(path.starts(slice(None)), path.pattern)
    ends = sample_layer(layer, starts[chosen], width=path.width[path.network[chosen]], key=jr.key(0))
    if ends is None:
        return None
    weighted = _scores_of_ends(path, starts, law, chosen, ends) / np.sqrt(expected[chosen])[:, None]
    parts = min(PARTS, len(chosen))
    return np.stack([parts * weighted[part::parts].T @ weighted[part::parts] for part in range(parts)])


def _scores_of_ends(
    path: Path,
    starts: Float[np.ndarray, "transitions m m"],
    law: LawAt,
    chosen: Int[np.ndarray, " draws"],
    ends: Float[np.ndarray, "draws m m"],
) -> Float[np.ndarray, "draws k"]:
    """Scores of layers from the starts of transitions, each of which `chosen` may name many times, to given ends.

    All that depends on a start is computed once for it.
    """
    distinct, place = np.unique(chosen, return_inverse=True)
    widths, number = path.width[path.network[distinct]], np.arange(len(distinct))
    both = np.stack([starts[distinct]] * 2, axis=1)
    stays = Path(
        both, widths, number, np.zeros_like(number), gap=np.ones(1, int), pattern=path.pattern, others=path.others
    )
    order, scores = np.argsort(place, kind="stable"), np.empty((len(chosen), len(law.u)))
    for here in innovations(stays, law):
        block = here.transitions
        first, last = np.searchsorted(place[order], [block[0], block[-1] + 1])
        drawn = order[first:last]
        mine = place[drawn] - block[0]
        z = increments_of(stays.coordinates(block), mine, ends[drawn] - starts[chosen[drawn]], widths[place[drawn]])
        moved = here._replace(
            y=here.y[mine] + z / here.sd[mine], mean=here.mean[mine], log_variance=here.log_variance[mine]
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


def _of_one_length(found: list[Scatter]) -> list[Scatter]:
    """Scatters with equally many parts: one, if one of them has one."""
    least = min(len(each.parts) for each in found)
    return [
        each._replace(parts=np.stack([each.parts[part::least].mean(axis=0) for part in range(least)])) for each in found
    ]


def omitted_order(path: Path, here: Innovations, law: LawAt, tau0: float) -> tuple[np.ndarray, np.ndarray]:
    """Estimate of the order of the softmax that the law omits, see `OMITTED`, of some transitions of a path."""
    largest = OMITTED_OF_TWO if path.tokens == 2 else OMITTED
    block, terms = here.transitions, here.terms
    omitted = largest * np.minimum(_logit_scale(path, block) / tau0, 1.0)[:, None] ** 2
    moments = law.moments.at(path.width_index(law.widths, block))
    theta, drift = moments.drift[:, ATTENTION_DRIFT_NEXT, None], terms.drift[:, ATTENTION_DRIFT_NEXT]
    mean = omitted * theta * drift / here.sd
    variance = omitted * moments.variance[:, ATTENTION_NEXT, None] * terms.variance[:, ATTENTION_NEXT]
    return np.asarray(mean), np.asarray(variance / here.sd**2)


def _dispersion(information: np.ndarray, scatter: np.ndarray, priors: np.ndarray) -> float:
    """φ of the module's docstring; 1 without information."""
    _, inverse = _roots(information + priors)
    of_information, of_scatter = (np.trace(inverse @ part @ inverse) for part in (information, scatter))
    return (of_scatter + NEGLIGIBLE) / (of_information + NEGLIGIBLE)


def _matrix(information: np.ndarray, scatter: np.ndarray, priors: np.ndarray) -> np.ndarray:
    """C of the module's docstring."""
    root, inverse = _roots(information + priors)
    # I + G^{−1/2} (J − H) G^{−1/2} without the cancellation: G is H and the curvature of the priors.
    _, shrunk = _roots(inverse @ (scatter + priors) @ inverse)
    return inverse @ shrunk @ root


def _variances(information: np.ndarray, scatter: np.ndarray, priors: np.ndarray) -> np.ndarray:
    """Variances of the adjusted posterior where it is normal."""
    inverse = np.linalg.inv(information + priors)
    return np.diagonal(inverse @ (scatter + priors) @ inverse)


def _roots(matrix: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The square roots of a positive definite matrix and of its inverse; its eigenvalues are known up to rounding."""
    values, vectors = np.linalg.eigh((matrix + matrix.T) / 2)
    root = np.sqrt(np.maximum(values, np.finfo(np.float64).eps * values[-1]))
    return (vectors * root) @ vectors.T, (vectors / root) @ vectors.T
