"""The statistics of a law of finite width: expanded about the mode of the posterior, and as sure as the data allow.

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

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from numpyro.infer.util import constrain_fn

from sdeinfer.infer._mode import Mode, posterior_mode
from sdeinfer.infer._range import logit_spread
from sdeinfer.layers import VARIANCE_FEATURES, Architecture
from sdeinfer.likelihood import (
    Adjustment,
    Moments,
    Path,
    PathStatistics,
    Program,
    Terms,
    constrained,
    moments_of,
    path_layout,
    path_statistics,
    terms_by_block,
    unconstrained,
    variance_ratio,
)

SAMPLE = 16_384
"""How many transitions say where to expand and how the scores scatter; all, where there are fewer."""

ROUNDS = 6
CLOSE = 0.02
"""Two references whose ρ differ by no more are the same: what the expansion leaves out goes with the square."""

NEXT = VARIANCE_FEATURES.index("attention_next")
OMITTED = 1.0
"""What the law leaves out of attention, over −s² times the highest terms that it has: 0.6 to 1.3 were found."""

LARGEST_SPREAD = 0.75
"""The law is not believed where the logits spread more."""

PRIOR_TRANSITIONS = 20
"""The scatter of the scores counts as if so many transitions had shown that of independent normals."""


def expanded_statistics(
    model: Program, path: Path, *, nodes: int | None = None, pooled: bool = False
) -> PathStatistics:
    """Reduce a path under a program whose law is that of a finite width.

    Arguments:
        model: the program, with its options given.
        path: the transitions.
        nodes: how many nodes the statistics have; as many as the data ask for where None.
        pooled: take all networks of one width together.
    """
    architecture = dict(model.options)["architecture"]
    layout, sample, mode = path_layout(path, nodes=nodes), path.thinned(SAMPLE), None
    for _ in range(ROUNDS):
        statistics = path_statistics(sample, layout, pooled=True)
        mode = posterior_mode(model, statistics, start=None if mode is None else mode.x)
        reference, _ = _moments(architecture, _parameters(model, architecture, statistics, mode), statistics)
        change = _largest_change(sample, layout.reference, reference)
        layout = layout._replace(reference=reference)
        if change < CLOSE:
            break
    statistics = path_statistics(path, layout, pooled=pooled)
    together = statistics.pooled()
    mode = posterior_mode(model, together, start=None if mode is None else mode.x)
    u = _parameters(model, architecture, together, mode)
    tau0 = float(constrained(architecture.parameters, u).get("tau0", jnp.inf))
    information, scatter, shift = (
        part * len(path) / len(sample) for part in _score(sample, *_moments(architecture, u, together), tau0=tau0)
    )
    dispersion = _dispersion(information, scatter)
    matrix = _matrix(information / dispersion, (scatter + np.outer(shift, shift)) / dispersion**2)
    least_tau0 = _least_tau0(sample, architecture)
    adjustment = Adjustment(*(jnp.asarray(x, u.dtype) for x in (dispersion, least_tau0, u, matrix)))
    return eqx.tree_at(lambda s: s.adjustment, statistics, adjustment, is_leaf=lambda leaf: leaf is None)


def _parameters(
    model: Program, architecture: Architecture, statistics: PathStatistics, mode: Mode
) -> Float[Array, " parameters"]:
    """The mode in the coordinates of `likelihood.unconstrained`."""
    at = dict(zip(mode.sites, jnp.asarray(mode.x), strict=True))
    sites = constrain_fn(model, (statistics,), {}, at, return_deterministic=True)
    return unconstrained({name: sites[name] for name in architecture.parameters})


def _moments(
    architecture: Architecture, u: Float[Array, " parameters"], statistics: PathStatistics
) -> tuple[Moments, Moments]:
    """The moments at each width, and their derivatives along a last axis of parameters; NumPy arrays in float64."""
    found = _moments_and_slopes(architecture, u, statistics.widths, statistics.centre)
    return jax.tree.map(lambda x: np.asarray(x, np.float64), found)


@eqx.filter_jit
def _moments_and_slopes(
    architecture: Architecture, u: Float[Array, " parameters"], widths: Array, centre: Array
) -> tuple[Moments, Moments]:
    def moments(u: Float[Array, " parameters"]) -> Moments:
        layer = architecture.layer(**constrained(architecture.parameters, u))
        return jax.vmap(lambda width: moments_of(layer.finite_width(width), centre))(widths)

    return moments(u), jax.jacfwd(moments)(u)


def _largest_change(path: Path, before: Moments, after: Moments) -> float:
    change = 0.0
    width = path.which_width
    for block, terms in terms_by_block(path):
        ratios = [variance_ratio(_at(moments, width[block]), terms) for moments in (before, after)]
        change = max(change, float(np.abs(ratios[1] / ratios[0] - 1).max()))
    return change


def _logit_scales(path: Path, block: slice | np.ndarray) -> np.ndarray:
    """The spread of the logits where transitions start, times τ0."""
    return logit_spread(np.asarray(path.starts(block)), path.width[path.network[block]])


def _least_tau0(path: Path, architecture: Architecture) -> float:
    """Where the spread of the logits is `LARGEST_SPREAD`, in the mean by what transitions tell of τ0."""
    if "tau0" not in architecture.parameters:
        return 0.0
    scale = _logit_scales(path, slice(None))
    return np.sqrt((scale**6).sum() / (scale**4).sum()) / LARGEST_SPREAD


def _score(path: Path, moments: Moments, slopes: Moments, *, tau0: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Information of independent normals, covariance of the score over transitions times their number, and the shift of
    the score by what the law leaves out: about `OMITTED` s² times its highest terms in the logits.
    """  # noqa: D205
    width, parameters = path.which_width, slopes.drift.shape[-1]
    information, squares = np.zeros((2, parameters, parameters))
    sums, shift = np.zeros((2, parameters))
    for block, terms in terms_by_block(path):
        here, along = _at(moments, width[block]), _at(slopes, width[block])
        variance = here.common_variance(terms.mixing) * variance_ratio(here, terms)
        sd = np.sqrt(variance)
        of_mean, of_variance = _slopes(along, terms, np.asarray(terms.variance - here.centre))
        mean, log_variance = of_mean / sd[..., None], of_variance / variance[..., None]
        y = (terms.increments - here.mean(terms)) / sd
        score = np.einsum("tp,tpk->tk", y, mean) + np.einsum("tp,tpk->tk", y**2 - 1, log_variance) / 2
        information += np.einsum("tpk,tpl->kl", mean, mean) + np.einsum("tpk,tpl->kl", log_variance, log_variance) / 2
        squares += score.T @ score
        sums += score.sum(axis=0)
        omitted = OMITTED * np.minimum(_logit_scales(path, block) / tau0, 1.0)[:, None] ** 2
        mean_left = omitted * here.drift[:, -1:] * terms.drift[:, -1] / sd
        variance_left = omitted * here.variance[:, NEXT, None] * terms.variance[:, NEXT] / variance
        shift += np.einsum("tp,tpk->k", mean_left, mean) + np.einsum("tp,tpk->k", variance_left, log_variance) / 2
    scatter = squares - np.outer(sums, sums) / len(path)
    shown = len(path) / (len(path) + PRIOR_TRANSITIONS)
    return information, shown * scatter + (1 - shown) * information, shift


def _slopes(along: Moments, terms: Terms, own: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Derivatives of each term's mean and variance, with features f − f̄; shape (transitions, p, parameters)."""
    mean = np.einsum("tsk,tsp->tpk", along.drift, terms.drift)
    noise = along.noise + np.einsum("tfk,tfp->tpk", along.variance, own)
    mixing = along.mixing + np.einsum("tfk,tfp->tpk", along.variance_mixing, own)
    return mean, noise + mixing * terms.mixing[..., None]


def _dispersion(information: np.ndarray, scatter: np.ndarray) -> float:
    """φ of the module's docstring."""
    _, inverse = _roots(information + np.eye(len(information)))
    return np.trace(inverse @ scatter @ inverse) / np.trace(inverse @ information @ inverse)


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


def _at(moments: Moments, width: np.ndarray) -> Moments:
    return jax.tree.map(lambda x: x[width], moments)
