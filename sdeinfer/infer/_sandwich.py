"""Adjustment of the likelihood's curvature by the sandwich estimator.

At width n the increments of one layer are normal only up to O(1/n), and their squares are correlated. The score remains
unbiased, but a likelihood of independent normals gives too small standard deviations: by up to one half for γ near 1
and n = 32, by a few percent at n = 512. As in composite likelihoods (Ribatet, Cooley and Davison 2012), the log
likelihood is divided by a dispersion φ and its argument is transformed linearly about the mode û, so that its curvature
at û agrees with the scatter of the score. With H the information and J the covariance of the score, both of ℓ/φ, and
G = H + I:

    ℓ(û + C (u − û))/φ,    C = G^{−1/2} (I + G^{−1/2} (J − H) G^{−1/2})^{−1/2} G^{1/2}.

For informative data this is the sandwich, CᵀHC = H J⁻¹ H; without information C is the identity. G is the information
of the posterior, since that of the priors is about I. φ is the ratio of J to H averaged over all directions, which
keeps C near the identity; dividing by φ remains valid where ℓ is not quadratic. The omitted terms of the
softmax expansion shift the score by approximately a known vector, whose outer product is added to J.
"""

import math

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Bool, Float

from sdeinfer.infer._innovations import Innovations, LawAt, innovations, law_at
from sdeinfer.infer._range import logit_spread, mean_spread
from sdeinfer.layers import ATTENTION_DRIFT_NEXT, ATTENTION_NEXT, AbstractArchitecture, AbstractLayer
from sdeinfer.likelihood import Adjustment, Path
from sdeinfer.networks import sample_layer

FEWEST = 4096
"""Smallest number of transitions whose scores determine their own scatter. With fewer, the estimate is noisy and tends
to be small; the scatter is then computed from this many transitions of exact networks, drawn at the mode from the
transitions' starts."""

FEWEST_TERMS, FEWEST_OF_MANY = 2**18, 512
"""With many tokens, `FEWEST` is the number of transitions with so many terms, but not less than the second number: a
transition costs O(m⁴)."""

FEWEST_TERMS_OF_PATTERN = 40_960
"""As `FEWEST`, in terms of the transitions with an attention pattern, which cost the cube of their number of terms."""

OMITTED, OMITTED_OF_TWO = 1.0, 2.0
"""Estimated omitted order of attention: −OMITTED · s² times the last retained term, with a larger value for two tokens.
Measured in the variance that is free of attention in the limit: 1.5 to 2.4 for two equal tokens, 0.9 for three, 0.5 for
four."""

LARGEST_SPREAD = 0.75
"""Largest mean spread s of the logits at which the law is used; it determines `Adjustment.least_tau0`."""


NEGLIGIBLE = 1e-3
"""Regularisation of φ: information, relative to the priors' 1, below which φ tends to 1."""


def sandwich(
    path: Path,
    architecture: AbstractArchitecture,
    u: Float[np.ndarray, "*networks coordinates"],
    centre: Float[np.ndarray, "features p"],
    *,
    free: Bool[np.ndarray, "*networks coordinates"] | None = None,
    times: float,
) -> Adjustment:
    """The adjustment of a likelihood.

    If each network has its own layer, û differs between networks, and φ and C are common.

    Arguments:
        path: a sample of the transitions.
        architecture: the kind of layer.
        u: coordinates of the layer, or of each network's layer, at the mode.
        centre: means of the variance features, shape (features, p).
        free: mask of the coordinates that vary with the model's sites; the others are fixed. All if None.
        times: ratio of the number of all transitions to the sample's.
    """
    own = u.ndim > 1
    parts = [(path.of_networks(np.array([number])), here) for number, here in enumerate(u)] if own else [(path, u)]
    parts = [(part, here) for part, here in parts if len(part)]
    totals = [np.zeros((u.shape[-1],) * 2), np.zeros((u.shape[-1],) * 2), np.zeros(u.shape[-1])]
    laws = [law_at(architecture, here, widths=np.unique(part.width), centre=centre) for part, here in parts]
    layers = [architecture.layer_at(here) for _, here in parts]
    for (part, _), law, layer in zip(parts, laws, layers, strict=True):
        for whole, found in zip(totals, _score(part, law, _smallest_tau0(layer)), strict=True):
            whole += times * found
    information, scatter, shift = totals
    fewest = _fewest(path)
    if len(path) < fewest:
        # The exact transitions are divided among the parts in proportion to their sizes.
        drawn = [
            _one_layer(part, layer, max(1, fewest * len(part) // len(path)))
            for (part, _), layer in zip(parts, layers, strict=True)
        ]
        exact = [each for each in drawn if each is not None]
        if len(exact) == len(parts):
            scatter = np.zeros_like(information)
            for each, (part, _), law, layer in zip(exact, parts, laws, layers, strict=True):
                scatter += times * _score(each, law, _smallest_tau0(layer))[1] * len(part) / len(each)
    varies = np.ones(u.shape[-1], bool) if free is None else free.reshape(-1, u.shape[-1]).any(axis=0)
    matrix, dispersion = np.eye(u.shape[-1]), 1.0
    if varies.any():
        block = np.ix_(varies, varies)
        dispersion = _dispersion(information[block], scatter[block])
        scattered = scatter[block] + np.outer(shift[varies], shift[varies])
        matrix[block] = _matrix(information[block] / dispersion, scattered / dispersion**2)
    attends = np.isfinite(_smallest_tau0(layers[0]))
    least_tau0 = _least_tau0(_logit_scale(path, slice(None))) if attends else 0.0
    values = (dispersion, least_tau0, u, matrix, np.zeros_like(u))
    if own:
        axes = ((), (), (u.shape[-1],), matrix.shape, (u.shape[-1],))
        values = tuple(np.broadcast_to(x, (len(u), *shape)) for x, shape in zip(values, axes, strict=True))
    return Adjustment(*jax.device_put([np.asarray(x, jnp.result_type(float)) for x in values]))


def _fewest(path: Path) -> int:
    """Smallest number of transitions whose scores determine their own scatter."""
    terms = path.tokens * (path.tokens + 1) // 2
    if path.pattern.everything:
        return min(FEWEST, max(FEWEST_OF_MANY, FEWEST_TERMS // terms))
    return min(FEWEST, FEWEST_TERMS_OF_PATTERN // terms)


def _smallest_tau0(layer: AbstractLayer) -> float:
    """Smallest softmax temperature τ0 of a layer; +∞ without attention."""
    values = layer.parameters()
    return min((float(values[name]) for name in layer.coordinates.temperatures), default=math.inf)


def _logit_scale(path: Path, block: slice | np.ndarray) -> np.ndarray:
    """Spread of the logits at the starts of transitions, times τ0."""
    return logit_spread(path.starts(block), path.width[path.network[block]], path.pattern)


def _least_tau0(scale: np.ndarray) -> float:
    """τ0 at which the logits' mean spread is `LARGEST_SPREAD`."""
    return mean_spread(scale) / LARGEST_SPREAD


def _score(path: Path, law: LawAt, tau0: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Information, scatter and shift of the score, summed over transitions.

    The information is that of independent normals. The scatter is the covariance of the score over transitions times
    their number. The shift estimates the effect of the omitted order, see `OMITTED`.
    """
    parameters = law.slopes.drift.shape[-1]
    information, squares = np.zeros((2, parameters, parameters))
    sums, shift = np.zeros((2, parameters))
    for here in innovations(path, law):
        information += here.information
        squares += here.score.T @ here.score
        sums += here.score.sum(axis=0)
        mean_left, variance_left = omitted_order(path, here, law, tau0)
        shift += np.einsum("tp,tpk->k", mean_left, here.mean)
        shift += np.einsum("tp,tpk->k", variance_left, here.log_variance) / 2
    return information, squares - np.outer(sums, sums) / len(path), shift


def omitted_order(path: Path, here: Innovations, law: LawAt, tau0: float) -> tuple[np.ndarray, np.ndarray]:
    """Estimate of the order of the softmax that the law omits, see `OMITTED`.

    Arguments:
        path: the transitions.
        here: the innovations of some of them.
        law: the law.
        tau0: smallest temperature of the layer.

    Returns:
        The omitted mean of each increment in its standard deviations, and its omitted relative variance; both of shape
        (transitions, p).
    """
    largest = OMITTED_OF_TWO if path.tokens == 2 else OMITTED
    block, terms = here.transitions, here.terms
    omitted = largest * np.minimum(_logit_scale(path, block) / tau0, 1.0)[:, None] ** 2
    moments = law.moments.at(path.width_index(law.widths, block))
    theta, drift = moments.drift[:, ATTENTION_DRIFT_NEXT, None], terms.drift[:, ATTENTION_DRIFT_NEXT]
    mean = omitted * theta * drift / here.sd
    variance = omitted * moments.variance[:, ATTENTION_NEXT, None] * terms.variance[:, ATTENTION_NEXT]
    return np.asarray(mean), np.asarray(variance / here.sd**2)


def _one_layer(path: Path, layer: AbstractLayer, count: int) -> Path | None:
    """Transitions of exact networks from the starts of a path; None if the chain cannot sample them."""
    chosen = np.resize(np.arange(len(path)), count)
    starts, widths = path.starts(chosen), path.width[path.network[chosen]]
    ends = sample_layer(layer, starts, width=widths, key=jr.key(0))
    if ends is None:
        return None
    starts = starts.astype(ends.dtype)
    first = np.zeros(count, int)
    ends_of = np.stack([starts, ends], axis=1)
    return Path(ends_of, widths, np.arange(count), first, gap=np.ones(1, int), pattern=path.pattern)


def _dispersion(information: np.ndarray, scatter: np.ndarray) -> float:
    """φ of the module's docstring; 1 without information."""
    _, inverse = _roots(information + np.eye(len(information)))
    of_information, of_scatter = (np.trace(inverse @ part @ inverse) for part in (information, scatter))
    return (of_scatter + NEGLIGIBLE) / (of_information + NEGLIGIBLE)


def _matrix(information: np.ndarray, scatter: np.ndarray) -> np.ndarray:
    """C of the module's docstring."""
    identity = np.eye(len(information))
    root, inverse = _roots(information + identity)
    # I + G^{−1/2} (J − H) G^{−1/2} without the cancellation: G is H + I.
    _, shrunk = _roots(inverse @ (scatter + identity) @ inverse)
    return inverse @ shrunk @ root


def _roots(matrix: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The square roots of a positive definite matrix and of its inverse; its eigenvalues are known up to rounding."""
    values, vectors = np.linalg.eigh((matrix + matrix.T) / 2)
    root = np.sqrt(np.maximum(values, np.finfo(np.float64).eps * values[-1]))
    return (vectors * root) @ vectors.T, (vectors / root) @ vectors.T
