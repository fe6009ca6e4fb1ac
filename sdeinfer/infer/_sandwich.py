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

import math

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Bool, Float

from sdeinfer._files import InputError
from sdeinfer.infer._innovations import LawAt, innovations, law_at
from sdeinfer.infer._range import logit_spread
from sdeinfer.layers import ATTENTION_NEXT, AbstractArchitecture, AbstractLayer, has_chain
from sdeinfer.likelihood import Adjustment, Path
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
    architecture: AbstractArchitecture,
    u: Float[np.ndarray, "*networks coordinates"],
    centre: Float[np.ndarray, "features p"],
    *,
    free: Bool[np.ndarray, "*networks coordinates"] | None = None,
    times: float,
) -> Adjustment:
    """The adjustment of a likelihood.

    Where each network has a layer of its own, φ and C are those of all networks together, and û is each network's.

    Arguments:
        path: a sample of the transitions.
        architecture: whose parameters are fitted.
        u: coordinates of the layer at the mode, or of each network's.
        centre: means of the features of the variance.
        free: which coordinates vary with the model's sites; others are fixed. All where None.
        times: how many times as many transitions there are.
    """
    own = u.ndim > 1
    parts = [(path.of_networks(np.array([number])), here) for number, here in enumerate(u)] if own else [(path, u)]
    parts = [(part, here) for part, here in parts if len(part)]
    totals = [np.zeros((u.shape[-1],) * 2), np.zeros((u.shape[-1],) * 2), np.zeros(u.shape[-1])]
    laws = [law_at(architecture, here, widths=np.unique(part.width), centre=centre) for part, here in parts]
    layers = [architecture.layer_at(here) for _, here in parts]
    for (part, _), law, layer in zip(parts, laws, layers, strict=True):
        for whole, found in zip(totals, _score(part, law, _coldest(layer)), strict=True):
            whole += times * found
    information, scatter, shift = totals
    if len(path) < ENOUGH:
        # As many exact transitions for each part as its share of all.
        drawn = [
            _one_layer(part, layer, max(1, ENOUGH * len(part) // len(path)))
            for (part, _), layer in zip(parts, layers, strict=True)
        ]
        exact = [each for each in drawn if each is not None]
        if len(exact) == len(parts):
            scatter = np.zeros_like(information)
            for each, (part, _), law, layer in zip(exact, parts, laws, layers, strict=True):
                scatter += times * _score(each, law, _coldest(layer))[1] * len(part) / len(each)
    varies = np.ones(u.shape[-1], bool) if free is None else free.reshape(-1, u.shape[-1]).any(axis=0)
    matrix, dispersion = np.eye(u.shape[-1]), 1.0
    if varies.any():
        block = np.ix_(varies, varies)
        dispersion = _dispersion(information[block], scatter[block])
        scattered = scatter[block] + np.outer(shift[varies], shift[varies])
        matrix[block] = _matrix(information[block] / dispersion, scattered / dispersion**2)
    attends = np.isfinite(_coldest(layers[0]))
    least_tau0 = _least_tau0(_logit_scale(path, slice(None))) if attends else 0.0
    values = (dispersion, least_tau0, u, matrix)
    if own:
        axes = ((), (), (u.shape[-1],), matrix.shape)
        values = tuple(np.broadcast_to(x, (len(u), *shape)) for x, shape in zip(values, axes, strict=True))
    return Adjustment(*jax.device_put([np.asarray(x, jnp.result_type(float)) for x in values]))


def _coldest(layer: AbstractLayer) -> float:
    """The smallest softmax temperature τ0 of a layer; +∞ without attention."""
    values = layer.parameters()
    return min((float(values[name]) for name in layer.coordinates.temperatures), default=math.inf)


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
    width, parameters = path.width_index(law.widths), law.slopes.drift.shape[-1]
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


def _one_layer(path: Path, layer: AbstractLayer, count: int) -> Path | None:
    """Transitions of exact networks from where those of a path start; None where the chain cannot sample them."""
    if not has_chain(layer):
        return None
    chosen = np.resize(np.arange(len(path)), count)
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
    first = np.zeros(count, int)
    return Path(np.stack([starts, ends], axis=1), widths, np.arange(count), first, gap=np.ones(1, int))


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
