"""Values of a pass against those of blocks: activation, softmax, rotations and norms.

Tests: `tests/blocks/test_of.py`.
"""

from collections.abc import Iterable

import jax.numpy as jnp
import numpy as np

from sdeinfer.blocks._mlp import ACTIVATIONS
from sdeinfer.covariance import CAUSAL, Pattern

FORMULA_TOLERANCE = 1e-4
"""Largest relative difference of values that a network computes in float32 from those of a formula."""

SQUARE_ROUNDING = 2e-6
"""Relative error of mean squares that a network computes in float32."""


def gated_activations(z: np.ndarray, linear: np.ndarray, h: np.ndarray) -> tuple[dict[str, float], float]:
    """The activations φ of gated units h = φ(z) (z′ + c), as `activations_of_values`, and c, 0 or 1."""
    for offset in (0.0, 1.0):
        gate = linear + offset
        seen = np.abs(gate) > 0.1 * np.abs(gate).mean()
        if activations := activations_of_values(z[seen], h[seen] / gate[seen]):
            return activations, offset
    return {}, 0.0


def activations_of_values(z: np.ndarray, h: np.ndarray) -> dict[str, float]:
    """The activations that have values near h at z, with their largest errors; several where z is small."""
    scale = np.abs(h).max()
    errors = {name: np.abs(np.asarray(f(jnp.asarray(z))) - h).max() / scale for name, f in ACTIVATIONS.items()}
    return {name: float(error) for name, error in errors.items() if error <= FORMULA_TOLERANCE}


def pattern_of_mask(mask: np.ndarray) -> Pattern:
    """The pattern of a boolean matrix; a lower triangle is a causal mask of any length."""
    return CAUSAL if np.array_equal(mask, np.tri(len(mask), dtype=bool)) else Pattern.of_mask(mask)


def factor_of_logits(probabilities: np.ndarray, logits: np.ndarray, mask: np.ndarray) -> float | None:
    """The factor c of which probabilities (…, tokens, tokens) are the softmax of c times logits under a mask, or None.

    The sums of probabilities over keys do not matter.
    """
    if logits.size != probabilities.size:
        return None
    P, Y = (values.reshape(-1, *mask.shape) for values in (probabilities, logits))
    log, count = np.log(np.where(mask, P, 1.0)), mask.sum(axis=1, keepdims=True)
    log, Y = ((values - (values * mask).sum(-1, keepdims=True) / count) * mask for values in (log, Y))
    factor = (log * Y).sum() / max((Y * Y).sum(), 1e-300)
    return float(factor) if np.abs(log - factor * Y).max() <= FORMULA_TOLERANCE * max(1.0, np.abs(log).max()) else None


def sink_of(probabilities: np.ndarray, logits: np.ndarray, mask: np.ndarray) -> float | None:
    """The mean over heads of the logit of the last column of probabilities; None if it differs between tokens."""
    P, Y = probabilities.reshape(-1, len(mask), len(mask) + 1), logits.reshape(-1, *mask.shape)
    first = mask.argmax(axis=1)
    rows = np.arange(len(mask))
    sinks = np.log(P[:, :, -1]) - np.log(P[:, rows, first]) + Y[:, rows, first]
    return (
        float(sinks.mean())
        if np.ptp(sinks, axis=1).max() <= FORMULA_TOLERANCE * max(1.0, np.abs(sinks).max())
        else None
    )


def rotation_of(before: np.ndarray, after: np.ndarray, tokens: int, sizes: Iterable[int]) -> tuple[float, int] | None:
    """`base_of_rotations` of the first features of queries, and the number of these, one of `sizes`."""
    if before.shape != after.shape:
        return None
    for size in sorted({size for size in sizes if size % 2 == 0 and 2 <= size <= before.shape[-1]}):
        change = np.abs(after[..., size:] - before[..., size:]).max(initial=0.0)
        if change <= FORMULA_TOLERANCE * np.abs(before).max():
            base = base_of_rotations(before[..., :size], after[..., :size], tokens)
            if base is not None:
                return base, size
    return None


def base_of_rotations(before: np.ndarray, after: np.ndarray, tokens: int) -> float | None:
    """The base of the rotations of queries of shape (…, d), with an axis of tokens; None for other changes.

    Token p of pair j is turned by p · base^(−2j/d), up to an angle that all tokens have in common.
    """
    axes = [axis for axis, length in enumerate(before.shape[:-1]) if length == tokens]
    for axis in axes if tokens > 1 and before.shape == after.shape and before.shape[-1] % 2 == 0 else ():
        queries, rotated = (np.moveaxis(x, axis, 0).reshape(tokens, -1, x.shape[-1]) for x in (before, after))
        for half in (True, False):
            x, y = (_pairs(values, half=half) for values in (queries, rotated))
            turn, modulus = y * x.conj(), np.abs(x) ** 2
            angle = turn.sum(1) / modulus.sum(1)  # of each token and pair
            if np.abs(turn - angle[:, None] * modulus).max() > 10 * FORMULA_TOLERANCE * modulus.max():
                continue
            steps = (angle[1:] * angle[:-1].conj()).mean(0)
            if np.abs(np.abs(steps) - 1).max() < 0.01 and (base := _base(np.abs(np.angle(steps)))) is not None:
                return base
    return None


def _pairs(values: np.ndarray, *, half: bool) -> np.ndarray:
    """Pairs of features as complex numbers: halves of a head (Llama), or neighbours (GPT-J)."""
    real, imaginary = np.split(values, 2, axis=-1) if half else (values[..., ::2], values[..., 1::2])
    return real + 1j * imaginary


def _base(angles: np.ndarray) -> float | None:
    """The base of angles base^(−2j/d); None if they are no such powers."""
    pairs = len(angles)
    if abs(angles[0] - 1) > 0.01 or pairs < 2 or (angles <= 0).any():
        return None
    base = float(f"{angles[1] ** -pairs:.2g}")
    far = np.abs(np.log(angles) + np.log(base) * np.arange(pairs) / pairs) > 0.05
    return None if (far & (angles > 1e-3)).any() else base  # smaller ones are lost in rounding


def norms_of_values(x: np.ndarray, y: np.ndarray) -> set[str]:
    """The norms, "layer" and "rms", that make tokens y of x up to one factor a token; both if x has no mean."""
    x, y = (values.reshape(-1, values.shape[-1]) for values in (x, y))
    norms = set()
    for name, centred in (("rms", x), ("layer", x - x.mean(1, keepdims=True))) if x.shape == y.shape else ():
        square = (centred**2).sum(1, keepdims=True)
        factor = (centred * y).sum(1, keepdims=True) / np.where(square > 0, square, 1.0)
        if np.abs(y - factor * centred).max() <= FORMULA_TOLERANCE * np.abs(y).max():
            norms.add(name)
    return norms


def epsilon_of_norm(x: np.ndarray, y: np.ndarray, gain: float) -> float:
    """ε of a norm of x with a gain, as far as the rounding of the smallest mean square shows it; else 0."""
    x, y = (values.reshape(-1, values.shape[-1]) for values in (x, y))
    read, made = (np.square(values).mean(1) for values in (x, y))
    smallest = int(read.argmin())
    epsilon = gain**2 * read[smallest] / made[smallest] - read[smallest]
    return float(f"{epsilon:.2g}") if epsilon > SQUARE_ROUNDING * read[smallest] else 0.0
