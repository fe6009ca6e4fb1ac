"""Tests of the one-step innovations of observed layers against the fitted law.

Under the law the innovations y of a layer have mean 0 and variance 1 given the preceding layers. Every sum

    g_k = Σ a_k y  +  Σ c_k (y² − 1)/2

over a layer, with weights that are functions of the preceding layers, is therefore a martingale difference: the sum
over all layers is asymptotically normal with variance Σ g_k², however the weights are correlated. It is the score of a
further parameter that shifts the means by a_k and the relative variances by c_k. At the posterior mean instead of the
truth, the effect of estimating the parameters is projected out, g_k − A_k H⁻¹ s with the score s, the information H and
A_k = Σ (a_k μ′/σ + c_k (log σ²)′/2) (Neyman's C(α)). Each direction detects one kind of misfit.
"""

import contextlib
import itertools
import math
from typing import NamedTuple

import numpy as np
import pandas as pd
from jaxtyping import Bool, Float
from scipy import stats

from sdeinfer._files import InputError
from sdeinfer.covariance._diffusion import Spectrum
from sdeinfer.covariance._matrix import pairs, unvech, vech
from sdeinfer.covariance._pattern_noise import PatternSpectrum
from sdeinfer.diagnostics._thresholds import LARGEST_INNOVATION
from sdeinfer.infer import innovations, law_at
from sdeinfer.infer._innovations import Innovations, LawAt
from sdeinfer.infer._sandwich import omitted_order
from sdeinfer.layers import AbstractLayer
from sdeinfer.likelihood._transitions import Path

DIRECTIONS = {
    "growth": "V grows or shrinks as a whole: λ² + γ² = 1 does not hold, the weights have another variance, or "
    "attention lacks its identity or centring",
    "growth of differences": "tokens spread or collapse at another rate than in the architecture",
    "attention's drift": "the drift is not that of shaped, centred attention",
    "ReLU's drift": "the drift is not that of a shaped ReLU",
    "noise of variances": "the noise of a layer is not that of the architecture: check width, heads and branches",
    "noise of correlations": "the noise of a layer is not that of the architecture: check width, heads and branches",
    "noise of attention": "the noise does not grow with the differences of tokens as in this attention",
    "memory": "successive layers deviate in the same way: they share weights, are not independent draws, or have a "
    "term that the law lacks",
}

OMISSIONS = ("omitted order of the softmax", "finite width")
"""Omissions of a law, whose sizes are known; posterior standard deviations include the first."""

type Weights = tuple[Float[np.ndarray, "transitions p some"], Float[np.ndarray, "transitions p some"]]
"""Shifts a of the means, in standard deviations, and c of the relative variances."""


class ScoreSums(NamedTuple):
    """Sums over layers, for the directions g, the score s of the parameters and the omissions."""

    corrected: np.ndarray  # Σ (g − A_k H⁻¹ s), shape (directions,)
    squares: np.ndarray  # Σ (g − A_k H⁻¹ s)², shape (directions,)
    sizes: np.ndarray  # derivative of `corrected` in the size of a misfit in the same direction, shape (directions,)
    along: np.ndarray  # A, shape (directions, parameters)
    score: np.ndarray  # s, shape (parameters,)
    information: np.ndarray  # H, shape (parameters, parameters)
    scatter: np.ndarray  # Σ s sᵀ, shape (parameters, parameters)
    of_networks: np.ndarray  # the same with s summed over the layers of a network
    omitted: np.ndarray  # shift of the score by each omission, shape (omissions, parameters)
    completed: np.ndarray  # H by the law with each omission, where it is known; (omissions, parameters, parameters)
    noise: np.ndarray  # of each layer: transitions, Σ mean y² and Σ (mean y²)², shape (3, layers)
    transitions: int

    @classmethod
    def of(cls, path: Path, law: LawAt, kind: AbstractLayer, *, fitted: str) -> "ScoreSums":
        """The sums over the layers of a path, whose law was fitted as "finite-width" or "limit".

        Scores have an axis of the parameters, the omissions, which have known sizes up to factors of about 1 and are
        estimated as parameters, and the directions.
        """
        exact, values = exact_law(law, kind) if fitted == "limit" else None, kind.coordinates.constrained(law.u)
        tau0 = min((float(values[name]) for name in kind.coordinates.temperatures), default=math.inf)
        parameters, known = np.s_[: len(law.u)], np.s_[: len(law.u) + len(OMISSIONS)]
        omitted, tested = np.s_[parameters.stop : known.stop], np.s_[known.stop :]
        count = known.stop + len(DIRECTIONS)
        score, squares, information = np.zeros(count), np.zeros((count, count)), np.zeros((count, count))
        network_scores = np.zeros((len(path.width), parameters.stop))
        noise = np.zeros((3, path.covariance.shape[1] - 1))
        sums, overlap, follow = np.zeros((2, path.covariance.shape[-1] ** 2)), 0.0, 0
        for batch in innovations(path, law):
            spectrum = path.coordinates(batch.transitions)
            batch = batch._replace(y=np.clip(batch.y, -LARGEST_INNOVATION, LARGEST_INNOVATION))  # noqa: PLW2901
            parts = (
                (batch.mean, batch.log_variance),
                omitted_weights(path, batch, law, tau0=tau0, exact=exact),
                direction_weights(path, batch, spectrum),
            )
            mean, log_variance = (np.concatenate(part, axis=-1) for part in zip(*parts, strict=True))
            joint = batch._replace(mean=mean, log_variance=log_variance)
            s = joint.score
            before, now = successive(path, batch, spectrum)
            s[:, -1] = (before * now).sum(axis=1)
            sums += [before.sum(axis=0), now.sum(axis=0)]
            overlap += (before[1:] * now[:-1]).sum()
            following = np.count_nonzero(s[:, -1])
            follow += following
            score, squares, information = score + s.sum(axis=0), squares + s.T @ s, information + joint.information
            information[-1, -1] += batch.y.shape[1] * following
            np.add.at(network_scores, path.network[batch.transitions], s[:, parameters])
            squared = np.square(batch.y).mean(axis=1)
            for moment in range(3):
                np.add.at(noise[moment], path.layer[batch.transitions], squared**moment)
        # A mean that all layers have is no memory. Without one, the product of the sums has the mean of the overlap.
        score[-1] -= (sums[0] @ sums[1] - overlap) / max(follow, 1)
        along, own_information = information[tested, known], information[parameters, parameters]
        projected = along @ inverse_of(information[known, known] + np.eye(known.stop))
        completed = [own_information, own_information]
        if exact is not None:
            completed[1] = np.sum([batch.information for batch in innovations(path, exact)], axis=0)
        of_known = (projected @ squares[known, known] * projected).sum(axis=1)
        return cls(
            corrected=score[tested] - projected @ score[known],
            squares=np.diag(squares)[tested] - 2 * (projected * squares[tested, known]).sum(axis=1) + of_known,
            sizes=np.diag(information)[tested] - (projected * along).sum(axis=1),
            along=along[:, parameters],
            score=score[parameters],
            information=own_information,
            scatter=squares[parameters, parameters],
            of_networks=network_scores.T @ network_scores,
            omitted=information[omitted, parameters],
            completed=np.stack(completed),
            noise=noise,
            transitions=len(path),
        )

    @property
    def tested(self) -> Bool[np.ndarray, " directions"]:
        """The directions that these networks can show."""
        return (self.squares > 0) & (self.sizes > 0)

    @property
    def tests(self) -> pd.DataFrame:
        """The table of `innovation_tests`."""
        corrected, squares, sizes = (x[self.tested] for x in (self.corrected, self.squares, self.sizes))
        names = list(itertools.compress(DIRECTIONS, self.tested))
        z = corrected / np.sqrt(squares)
        columns = {"effect": corrected / np.sqrt(sizes * self.transitions), "z": z, "p": 2 * stats.norm.sf(np.abs(z))}
        return pd.DataFrame(columns, index=pd.Index(names, name="direction"))

    @property
    def dispersion(self) -> float:
        """Scatter of the score relative to the information, averaged over directions; at least 1."""
        inverse = inverse_of(self.information + np.eye(len(self.information)))
        scatter, information = (np.trace(inverse @ x) for x in (self.scatter, self.information))
        return max(1.0, float(scatter / information)) if information > 0 else 1.0


def exact_law(law: LawAt, kind: AbstractLayer) -> LawAt | None:
    """The law of finite width at the same parameters, if the layer has one, as one of a user may not."""
    if kind.pattern.everything:
        with contextlib.suppress(InputError):
            return law_at(kind, law.u, widths=law.widths, law="finite-width")
    return None


def omitted_weights(path: Path, batch: Innovations, law: LawAt, *, tau0: float, exact: LawAt | None) -> Weights:
    """Omitted means, in standard deviations, and omitted relative variances, of known size."""
    zero = np.zeros_like(batch.y)
    softmax = (zero, zero) if math.isinf(tau0) else omitted_order(path, batch, law, tau0)
    width = (zero, zero)
    if exact is not None:
        number = path.width_index(law.widths, batch.transitions)
        fitted, whole = (x.moments.at(number).mean_and_variance(batch.terms) for x in (law, exact))
        width = ((whole[0] - fitted[0]) / batch.sd, whole[1] / fitted[1] - 1)
    mean, variance = (np.stack(part, axis=-1) for part in zip(softmax, width, strict=True))
    return mean, variance


def inverse_of(information: Float[np.ndarray, "k k"]) -> Float[np.ndarray, "k k"]:
    """The inverse of a positive definite matrix.

    Exploding networks, and nearly equal tokens, make an information so ill-conditioned that small eigenvalues are lost
    to rounding; they count as zero, and the others are those of coordinates with one unit of information each.
    """
    scale = np.sqrt(np.diagonal(information))
    inverse = np.linalg.pinv(information / np.outer(scale, scale), hermitian=True) / np.outer(scale, scale)
    inverse[np.diag_indices_from(inverse)] = np.maximum(np.diagonal(inverse), 0.0)
    return inverse


def changes_of(path: Path, law: LawAt) -> Float[np.ndarray, "transitions m m"]:
    """The innovations of a path as changes of V: Q Z Qᵀ for symmetric Z, of unit variance off the diagonal."""
    changes = np.empty((len(path), path.tokens, path.tokens))
    for batch in innovations(path, law):
        spectrum = path.coordinates(batch.transitions)
        changes[batch.transitions] = coloured(spectrum, np.clip(batch.y, -LARGEST_INNOVATION, LARGEST_INNOVATION))
    return changes


def coloured(spectrum: Spectrum | PatternSpectrum, y: np.ndarray) -> np.ndarray:
    """Innovations, shape (transitions, p), as changes of V."""
    rows, columns = pairs(spectrum.tokens)
    return spectrum.colour(unvech(y * np.where(rows == columns, np.sqrt(2), 1.0)))


def direction_weights(path: Path, batch: Innovations, spectrum: Spectrum | PatternSpectrum) -> Weights:
    """Weights a and c of each direction; those of the last, which are not functions of one layer, are 0."""
    e = batch.terms.mixing
    if isinstance(spectrum, PatternSpectrum):
        growth, spread, diagonal = _pattern_weights(path.starts(batch.transitions), spectrum)
    else:
        rows, columns = pairs(spectrum.tokens)
        growth = diagonal = np.broadcast_to(np.where(rows == columns, 1.0, 0.0), e.shape)
        spread = diagonal * np.sqrt(e / 2)
    drift = batch.terms.drift
    zero = np.zeros_like(e)
    with_attention = e - e.mean(axis=1, keepdims=True)
    of_mean = np.stack([growth, spread, drift[:, 0], drift[:, 1], zero, zero, zero, zero], axis=-1)
    of_variance = np.stack([zero, zero, zero, zero, diagonal, 1 - diagonal, with_attention, zero], axis=-1)
    return _at_most_one(of_mean / batch.sd[..., None]), _at_most_one(of_variance)


def successive(path: Path, batch: Innovations, spectrum: Spectrum | PatternSpectrum) -> np.ndarray:
    """The innovations of each preceding layer and of each layer, shape (2, transitions, m²), as V^(−½) dV V^(−½).

    These do not depend on the order of the tokens. Products have the variance p. Both are 0 where no layer precedes in
    the block.
    """
    chosen = batch.transitions
    follows = (np.diff(path.network[chosen]) == 0) & (np.diff(path.layer[chosen]) == 1)
    L, changes = spectrum.cholesky[1:][follows], coloured(spectrum, batch.y)
    values, axes = np.linalg.eigh(L @ L.mT)
    inverse_root = axes / np.sqrt(np.maximum(values, np.finfo(float).tiny))[:, None, :] @ axes.mT
    matrices = np.zeros((2, *changes.shape))
    for place, S in enumerate((changes[:-1], changes[1:])):
        matrices[place, 1:][follows] = inverse_root @ S[follows] @ inverse_root
    return matrices.reshape(2, len(changes), -1) / np.sqrt(2)


def _at_most_one(weights: np.ndarray) -> np.ndarray:
    """Weights bounded per layer, so that an exploding layer does not dominate the sum."""
    return weights / np.sqrt(1 + (weights**2).sum(axis=1, keepdims=True))


def _pattern_weights(V: np.ndarray, spectrum: PatternSpectrum) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The directions of V and V H V in the coordinates of a pattern, and the weight of each entry on the diagonal.

    Without a mask the directions are diagonal: the identity and δ/m.
    """
    rows, columns = pairs(V.shape[-1])
    equal = np.where(rows == columns, 1.0, 0.0)
    moved = V @ (V - V.mean(axis=-2, keepdims=True))
    growth, spread = (vech(spectrum.whiten(S)) * np.where(equal == 1, 1.0, np.sqrt(2.0)) for S in (V, moved))
    return growth, spread / V.shape[-1], (equal[:, None] * spectrum.rotation**2).sum(axis=-2)
