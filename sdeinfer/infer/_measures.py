"""Measures of the start of a transition, by which it is inside the range of the law or not.

Tests: `tests/infer/test_range.py`.
"""

from collections.abc import Callable, Iterable
from functools import partial

import numpy as np
import xarray as xr
from jaxtyping import Float

from sdeinfer.covariance import Pattern
from sdeinfer.covariance._factors import whiten_by
from sdeinfer.covariance._matrix import singular
from sdeinfer.covariance._pattern import EVERY_TOKEN, centring
from sdeinfer.layers._next_order import attention_drift_next
from sdeinfer.layers._pattern_order import pattern_drift_next
from sdeinfer.likelihood._transitions import Path
from sdeinfer.terms._attention import attention_drift
from sdeinfer.terms._relu import relu_drift

type Measure = Callable[[np.ndarray, np.ndarray, Pattern], np.ndarray]
"""Function of covariances, widths and an attention pattern: one of those below."""

type Measures = dict[Measure, Float[np.ndarray, " _transitions"]]
"""The values of measures at the starts of transitions."""


def measures_of(path: Path, kinds: Iterable[Measure]) -> Measures:
    """Measures at the starts of transitions, in the type in which the covariances are stored."""

    def of_block(measure: Measure, block: np.ndarray) -> np.ndarray:
        V = path.covariance[path.network[block], path.layer[block]]
        return measure(V, path.width[path.network[block]], path.pattern)

    return {measure: np.concatenate(list(path.over_blocks(partial(of_block, measure)))) for measure in kinds}


def logit_scale(data: xr.Dataset) -> Float[np.ndarray, "networks transitions"]:
    """The spread s of the logits at the start of each transition of a Dataset, times τ0."""
    V = data["covariance"].transpose("network", "layer", "token_a", "token_b").values
    return logit_spread(V[:, :-1], data["width"].values[:, None], Pattern.in_attributes(data.attrs))


def logit_spread(V: np.ndarray, width: np.ndarray, pattern: Pattern = EVERY_TOKEN) -> np.ndarray:
    """The spread s of the logits for τ0 = 1."""
    variances, matrices = np.diagonal(V, axis1=-2, axis2=-1), centring(pattern, V.shape[-1])
    mean, size = matrices.mean.astype(V.dtype), matrices.size.astype(V.dtype)
    about_mean = size * (variances @ mean.T - np.einsum("an,...nk,ak->...a", mean, V, mean, optimize=True))
    about_mean = np.maximum(about_mean / np.maximum(size - 1, 1), 0.0)
    return np.max(np.sqrt(variances) * np.sqrt(about_mean / np.asarray(width)[..., None]), axis=-1)


def attention_growth(V: np.ndarray, width: np.ndarray, pattern: Pattern = EVERY_TOKEN) -> np.ndarray:
    """The largest relative change of V by the attention of one layer with θ₁ = 1; 0 for a singular V."""
    return _growth_by(partial(attention_drift, pattern=pattern), V, width)


def attention_bend(V: np.ndarray, width: np.ndarray, pattern: Pattern = EVERY_TOKEN) -> np.ndarray:
    """√D n^¼ for τ0 = 1, where D is the largest relative change of V by B₁′; 0 for a singular V.

    Tokens near a line leave it by the square of one normal logit, and the increment goes as its fourth power.
    """
    change = attention_drift_next if pattern.everything else partial(pattern_drift_next, pattern=pattern)

    def of_last(V: np.ndarray) -> np.ndarray:
        return np.moveaxis(change(np.moveaxis(V, (0, 1), (-2, -1))), (-2, -1), (0, 1))

    return np.sqrt(_growth_by(of_last, V, width)) / np.asarray(width) ** 0.25


def relu_growth(V: np.ndarray, width: np.ndarray, pattern: Pattern = EVERY_TOKEN) -> np.ndarray:
    """The largest relative change of V by a shaped ReLU with θ₂ = 1; 0 for a singular V."""
    del pattern
    return _growth_by(relu_drift, V, width)


def rounding(V: np.ndarray, width: np.ndarray, pattern: Pattern = EVERY_TOKEN) -> np.ndarray:
    """The relative rounding of V and of its moments in the direction in which V is smallest, times √n."""
    del pattern
    # Closed forms of moments lose digits between near copies of a token: of 8 networks of 600 layers, n = 64 and
    # γ = 0.7, the adjustment has an error of 9 to 12 % from condition numbers up to 10⁸, of 33 to 59 % up to 10¹².
    of_moments = 1e-11
    eigenvalues = np.linalg.eigvalsh(V.astype(np.float64))
    smallest = np.maximum(eigenvalues[..., 0], np.finfo(np.float64).tiny)
    with np.errstate(over="ignore"):
        return max(np.finfo(V.dtype).eps, of_moments) * eigenvalues[..., -1] / smallest * np.sqrt(width)


def _growth_by(of: Callable[[np.ndarray], np.ndarray], V: np.ndarray, width: np.ndarray) -> np.ndarray:
    """The largest relative change of V by a drift, whose axes of tokens come first, at width n."""
    definite = ~singular(V)
    safe = np.where(definite[..., None, None], V, np.eye(V.shape[-1]))
    with np.errstate(over="ignore", invalid="ignore"):
        drift = np.moveaxis(of(np.moveaxis(V, (-2, -1), (0, 1))), (0, 1), (-2, -1))
        change = whiten_by(np.linalg.cholesky(safe), drift)
    finite = np.isfinite(change).all(axis=(-2, -1))  # too large a V has too large a drift
    size = np.abs(np.linalg.eigvalsh(np.where(finite[..., None, None], change, 0.0))).max(axis=-1)
    return np.where(definite, np.where(finite, size, np.inf), 0.0) / np.asarray(width)


def mean_spread(spread: np.ndarray) -> float:
    """Mean of spreads (root mean square), weighted by the information on τ0 (∝ s⁴)."""
    relative = spread / spread.max()
    return float(spread.max() * np.sqrt((relative**6).sum() / (relative**4).sum()))
