"""How sure a posterior of finite networks may be.

At width n the increments of one layer are normal up to O(1/n) only, and their squares are correlated. That biases
nothing, but a likelihood of independent normals would know the parameters too well: by up to half of their standard
deviations where γ is near 1 and n = 32, by a few percent at n = 512. As in composite likelihoods (Ribatet, Cooley and
Davison 2012), it is divided by a dispersion φ and taken at parameters moved towards its mode û, so that its curvature
there is what the scatter of the score says instead of the information. With H the information and J the covariance of
the score, both of ℓ/φ, and G = H + I:

    ℓ(û + C (u − û))/φ,    C = G^{−1/2} (I + G^{−1/2} (J − H) G^{−1/2})^{−1/2} G^{1/2}.

Where the data say much, this is the sandwich: CᵀHC = H J⁻¹ H. Where they say nothing, C is the identity: G is what a
posterior knows, of which the priors are about I. φ is J over H on average over all directions, which leaves C near the
identity: a division holds wherever ℓ is not quadratic, too. What the law leaves out of the softmax shifts the score by
about a known vector, whose outer product is added to J.
"""

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array, Float

from sdeinfer._files import InputError
from sdeinfer.infer._innovations import LawAt, innovations, law_at
from sdeinfer.infer._range import logit_spread
from sdeinfer.layers import ATTENTION_NEXT, AbstractLayer, Architecture
from sdeinfer.likelihood import Adjustment, Path, PathStatistics, constrained
from sdeinfer.networks import check_chain_width, sample_chains

ENOUGH = 4096
"""Fewer transitions tell the scatter of their scores too badly, and make it small just where they are all near their
mean: it is taken from so many of exact networks instead, drawn at the mode from where the transitions start."""

OMITTED, OMITTED_OF_TWO = 1.0, 2.0
"""What the law leaves out of attention, over −s² times the highest terms that it has. In the one variance that is free
of attention in the limit, 1.5 to 2.4 were found for two equal tokens, 0.9 for three, 0.5 for four."""

LARGEST_SPREAD = 0.75
"""The law is not believed where the logits spread more."""


NOTHING = 1e-3
"""Directions of which the data tell less than this, next to the priors' 1, do not count."""


def sandwich(
    path: Path,
    architecture: Architecture,
    u: Float[Array | np.ndarray, " parameters"],
    statistics: PathStatistics,
    *,
    times: float,
) -> Adjustment:
    """The adjustment of a likelihood.

    Arguments:
        path: a sample of the transitions.
        architecture: whose parameters are fitted.
        u: the mode, unconstrained.
        statistics: of all transitions; only the widths and the features' means are looked at.
        times: how many times as many transitions there are.
    """
    layer = architecture.layer(**constrained(architecture.parameters, np.asarray(u)))
    tau0 = float(getattr(layer, "tau0", jnp.inf))
    law = law_at(architecture, u, widths=np.unique(path.width), centre=np.asarray(statistics.centre))
    information, scatter, shift = (times * part for part in _score(path, law, tau0))
    if len(path) < ENOUGH and (drawn := _one_layer(path, layer)) is not None:
        scatter = _score(drawn, law, tau0)[1] * len(path) / ENOUGH
    dispersion = _dispersion(information, scatter)
    matrix = _matrix(information / dispersion, (scatter + np.outer(shift, shift)) / dispersion**2)
    least_tau0 = _least_tau0(_logit_scale(path, slice(None))) if np.isfinite(tau0) else 0.0
    return Adjustment(*jax.device_put([np.asarray(x, u.dtype) for x in (dispersion, least_tau0, u, matrix)]))


def _logit_scale(path: Path, block: slice | np.ndarray) -> np.ndarray:
    """The spread of the logits where transitions start, times τ0."""
    return logit_spread(path.starts(block), path.width[path.network[block]])


def _least_tau0(scale: np.ndarray) -> float:
    """Where the logits' mean spread is `LARGEST_SPREAD`, weighted by what transitions tell of τ0: its fourth power."""
    relative = scale / scale.max()
    return scale.max() * np.sqrt((relative**6).sum() / (relative**4).sum()) / LARGEST_SPREAD


def _score(path: Path, law: LawAt, tau0: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Information of independent normals, covariance of the score over transitions times their number, and the shift of
    the score by what the law leaves out: about `OMITTED` s² times its highest terms in the logits.
    """  # noqa: D205
    largest = OMITTED_OF_TWO if path.tokens == 2 else OMITTED
    width, parameters = path.which(law.widths), law.slopes.drift.shape[-1]
    information, squares = np.zeros((2, parameters, parameters))
    sums, shift = np.zeros((2, parameters))
    for here in innovations(path, law):
        block, terms, mean, log_variance = here.transitions, here.terms, here.mean, here.log_variance
        information += here.information
        squares += here.score.T @ here.score
        sums += here.score.sum(axis=0)
        omitted = largest * np.minimum(_logit_scale(path, block) / tau0, 1.0)[:, None] ** 2
        moments = law.moments.at(width[block])
        mean_left = omitted * moments.drift[:, -1:] * terms.drift[:, -1] / here.sd
        variance_left = omitted * moments.variance[:, ATTENTION_NEXT, None] * terms.variance[:, ATTENTION_NEXT]
        variance_left /= here.sd**2
        shift += np.einsum("tp,tpk->k", mean_left, mean) + np.einsum("tp,tpk->k", variance_left, log_variance) / 2
    return information, squares - np.outer(sums, sums) / len(path), shift


def _one_layer(path: Path, layer: AbstractLayer) -> Path | None:
    """Transitions of exact networks from where those of a path start; None where those are too narrow for the chain."""
    chosen = np.resize(np.arange(len(path)), ENOUGH)
    starts, widths = path.starts(chosen).astype(jnp.result_type(float)), path.width[path.network[chosen]]
    ends = np.empty_like(starts)
    for width in np.unique(widths):
        mine = np.flatnonzero(widths == width)
        try:
            check_chain_width(layer, tokens=path.tokens, width=int(width))
        except InputError:
            return None
        key = jr.fold_in(jr.key(0), np.uint32(width))
        ends[mine] = sample_chains(layer, starts[mine], width=int(width), observed=1, key=key)[:, 1]
    first = np.zeros(ENOUGH, int)
    return Path(np.stack([starts, ends], axis=1), widths, np.arange(ENOUGH), first, gap=np.ones(1, int))


def _dispersion(information: np.ndarray, scatter: np.ndarray) -> float:
    """φ of the module's docstring; 1 where nothing is told."""
    _, inverse = _roots(information + np.eye(len(information)))
    told, scattered = (np.trace(inverse @ part @ inverse) for part in (information, scatter))
    return (scattered + NOTHING) / (told + NOTHING)


def _matrix(information: np.ndarray, scatter: np.ndarray) -> np.ndarray:
    """C of the module's docstring."""
    identity = np.eye(len(information))
    root, inverse = _roots(information + identity)
    _, shrunk = _roots(identity + inverse @ (scatter - information) @ inverse)
    return inverse @ shrunk @ root


def _roots(matrix: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The square root of a positive definite matrix, and that of its inverse."""
    values, axes = np.linalg.eigh(matrix)
    return (axes * np.sqrt(values)) @ axes.T, (axes / np.sqrt(values)) @ axes.T
