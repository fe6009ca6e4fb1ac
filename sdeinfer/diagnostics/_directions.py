"""The directions in which layers may leave a law, as weights of their innovations."""

import jax
import numpy as np
from jaxtyping import Float

from sdeinfer.covariance._diffusion import Spectrum
from sdeinfer.covariance._matrix import pairs, tokens_of, unvech, vech
from sdeinfer.covariance._pattern_noise import PatternSpectrum
from sdeinfer.infer._innovations import Innovations
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
    "memory": "successive layers are correlated: they share weights, or are not independent draws",
}
"""Interpretation of a deviation in each direction."""


def weights(
    path: Path, here: Innovations, at: Spectrum | PatternSpectrum
) -> tuple[Float[np.ndarray, "transitions p directions"], Float[np.ndarray, "transitions p directions"]]:
    """Weights a and c of each direction; those of the last, which are not functions of one layer, are 0."""
    e = here.terms.mixing
    if isinstance(at, PatternSpectrum):
        growth, spread, diagonal = _pattern_weights(path.starts(here.transitions), at)
    else:
        rows, columns = pairs(tokens_of(e.shape[1]))
        growth = diagonal = np.broadcast_to(np.where(rows == columns, 1.0, 0.0), e.shape)
        spread = diagonal * np.sqrt(e / 2)
    drift = here.terms.drift
    zero = np.zeros_like(e)
    with_attention = e - e.mean(axis=1, keepdims=True)
    of_mean = np.stack([growth, spread, drift[:, 0], drift[:, 1], zero, zero, zero, zero], axis=-1)
    of_variance = np.stack([zero, zero, zero, zero, diagonal, 1 - diagonal, with_attention, zero], axis=-1)
    return _at_most_one(of_mean / here.sd[..., None]), _at_most_one(of_variance)


def memory(path: Path, here: Innovations, at: Spectrum | PatternSpectrum) -> Float[np.ndarray, " transitions"]:
    """Products of each layer's innovations with those of the preceding layer, in the same coordinates."""
    chosen = here.transitions
    follows = (np.diff(path.network[chosen]) == 0) & (np.diff(path.layer[chosen]) == 1)
    rows, columns = pairs(tokens_of(here.y.shape[1]))
    y = unvech(here.y * np.where(rows == columns, np.sqrt(2), 1.0))
    earlier, now = (jax.tree.map(lambda x, some=some: x[some], at) for some in (slice(-1), slice(1, None)))
    # Transform from the coordinates of each transition to those of the next.
    before = now.whiten(earlier.colour(y[:-1]))
    return np.concatenate([[0.0], np.where(follows, (before * y[1:]).sum(axis=(1, 2)) / 2, 0.0)])


def _at_most_one(weights: np.ndarray) -> np.ndarray:
    """Weights bounded per layer, so that an exploding layer does not dominate the sum."""
    return weights / np.sqrt(1 + (weights**2).sum(axis=1, keepdims=True))


def _pattern_weights(
    V: Float[np.ndarray, "transitions m m"], at: PatternSpectrum
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The directions of V and V H V in the coordinates of a pattern, and the weight of each entry on the diagonal.

    Without a mask the directions are diagonal: the identity and δ/m.
    """
    rows, columns = pairs(V.shape[-1])
    equal = np.where(rows == columns, 1.0, 0.0)
    moved = V @ (V - V.mean(axis=-2, keepdims=True))
    growth, spread = (vech(at.whiten(S)) * np.where(equal == 1, 1.0, np.sqrt(2.0)) for S in (V, moved))
    return growth, spread / V.shape[-1], (equal[:, None] * at.rotation**2).sum(axis=-2)
